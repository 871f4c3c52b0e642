"""Capture a model as two ATen graphs, one for training and one for evaluation.

``torch.export`` in non-strict mode runs the user's forward once with a symbolic batch size. The two
modes are captured separately over the same parameters, because they can be different programs
(stochastic depth, auxiliary heads). The training IR keeps composite operators, so that kernels, saved
tensors and the use of random numbers are those of the eager model.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram

from ravnest.errors import CaptureError, SplitError
from ravnest.split.checkpointing import noted_checkpoints
from ravnest.split.example import Example, bind_example
from ravnest.split.graph import MODES, Mode
from ravnest.split.state import ModelState, read_state
from ravnest.split.static_conditions import StaticConditions
from ravnest.split.structure import LEAF, Structure, flatten
from ravnest.split.torchscript import from_torchscript
from ravnest.split.unsupported import RefusePacking, refuse_custom_autograd, translate

logger = logging.getLogger(__name__)

_PREFIX = "model."


@dataclass
class ModeCapture:
    """The program of one mode. ``normalise`` rewrites ``graph`` in place."""

    mode: Mode
    program: ExportedProgram
    graph: fx.Graph
    state_of: dict[str, str]
    """State keys by placeholder name."""
    inputs: dict[str, int]
    """Positions among the example's tensors, by placeholder name."""
    structure: Structure
    """Nesting of the model's output, whose leaves are the graph's outputs."""
    fixed_batch: tuple[str, ...]
    """Inputs whose batch size could not be captured as a symbol."""


@dataclass
class Capture:
    """A captured model: two graphs over one state."""

    model: nn.Module
    example: Example
    state: ModelState
    modes: dict[Mode, ModeCapture]

    @property
    def fixed_batch(self) -> tuple[str, ...]:
        """Inputs whose batch size is fixed to the example's in at least one mode."""
        names = dict.fromkeys(name for mode in self.modes.values() for name in mode.fixed_batch)
        return tuple(names)


def capture(
    model: nn.Module,
    example_args: Sequence[Any] | torch.Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    batch_dim: int = 0,
) -> Capture:
    """Capture ``model`` in both modes, without changing it.

    Raises ``CaptureError``, which names the line of the user's code that cannot be captured.
    """
    if isinstance(model, torch.jit.ScriptModule):
        model = from_torchscript(model)
    if not isinstance(model, nn.Module):
        raise SplitError(f"expected a torch.nn.Module to split, got {type(model).__name__}")
    args = (example_args,) if isinstance(example_args, torch.Tensor) else tuple(example_args)
    example = bind_example(model, args, dict(example_kwargs or {}), batch_dim)
    state = read_state(model)
    modes = {mode: _capture_mode(model, example, state, mode) for mode in MODES}
    result = Capture(model, example, state, modes)
    if result.fixed_batch:
        logger.warning(
            "the batch size %d is fixed in the captured model (inputs: %s): forward uses it as a plain "
            "number. Batches of another size are rejected; use drop_last=True in the DataLoader, "
            "or replace int(x.shape[0]), len(x) or a constant in view/reshape by x.shape[0] or -1",
            example.batch_size,
            ", ".join(result.fixed_batch),
        )
    return result


@dataclass
class _TracedOutput:
    """Properties of the model's output, noted while it is traced.

    It is separate from the traced module, because export restores the attributes of modules.
    """

    structure: Structure = LEAF
    opaque: dict[str, str] = field(default_factory=dict)

    def note_opaque(self, path: str, value: object) -> None:
        self.opaque[path] = type(value).__name__


class _Flat(nn.Module):
    """The model with flat tensors as inputs and outputs, so that export sees no classes of the user."""

    def __init__(self, model: nn.Module, example: Example, traced: _TracedOutput) -> None:
        super().__init__()
        self.model = model
        self._example = example
        self._traced = traced

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        args, kwargs = self._example.rebuild(tensors)
        before = [(m, dict(m._buffers)) for m in self.model.modules()]
        output = self.model(*args, **kwargs)
        _write_reassigned_buffers(before)
        leaves, self._traced.structure = flatten(output, "output", self._traced.note_opaque)
        return tuple(leaves)


def _write_reassigned_buffers(before: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Turn ``self.mean = new`` into a write to the buffer: export drops it below the top module."""
    for module, buffers in before:
        for name, old in buffers.items():
            new = module._buffers.get(name)
            if new is not old and old is not None and new is not None:
                old.copy_(new.detach())
                module._buffers[name] = old


def _capture_mode(model: nn.Module, example: Example, state: ModelState, mode: Mode) -> ModeCapture:
    traced = _TracedOutput()
    flat = _Flat(model, example, traced)
    with mode_of(model, mode), noted_checkpoints(model):
        program, fixed = _export(flat, example)
    for path, kind in traced.opaque.items():
        logger.info("%s is a %s, which stages cannot return: it is omitted from the output", path, kind)
    if not any(node.op == "call_function" for node in program.graph.nodes):
        raise SplitError("forward has no operation that could be split")
    graph = copy_graph(program.graph)
    specs = program.graph_signature.input_specs
    inputs = [spec.arg.name for spec in specs if spec.kind.name == "USER_INPUT"]
    state_of = {
        spec.arg.name: state.key_of(spec.target.removeprefix(_PREFIX), spec.kind.name, program, mode)
        for spec in specs
        if spec.kind.name != "USER_INPUT" and spec.target is not None
    }
    return ModeCapture(
        mode=mode,
        program=program,
        graph=graph,
        state_of=state_of,
        inputs={name: position for position, name in enumerate(inputs)},
        structure=traced.structure,
        fixed_batch=fixed,
    )


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph, with the same names and its own copy of the nodes' meta."""
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    output = copy.graph_copy(graph, nodes, return_output_node=True)
    assert isinstance(output, tuple)
    copy.output(output[0])
    for old, new in nodes.items():
        new.meta = dict(old.meta)
    return copy


def _export(flat: _Flat, example: Example) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Export with the first tracing option that keeps the batch size symbolic, else with the best one.

    Libraries can have a separate code path for export. The path outside of export comes first, because
    it is the model's own; then the path for export; then the strict tracer, which keeps
    ``int(x.shape[0])`` symbolic.
    """
    best: tuple[ExportedProgram, tuple[str, ...]] | None = None
    first_error: CaptureError | None = None
    for option in (_TraceOption(hidden=True), _TraceOption(), _TraceOption(strict=True)):
        if option.strict and best is None:
            break
        try:
            program = _try_export(flat, example, option)
        except CaptureError as error:
            first_error = first_error or error
            continue
        fixed = _fixed_batch(program, example)
        if best is None or len(fixed) < len(best[1]):
            best = program, fixed
        if not fixed:
            break
    if best is None:
        assert first_error is not None
        raise first_error
    return best


@dataclass(frozen=True)
class _TraceOption:
    """Options of one attempt to trace the model."""

    hidden: bool = False
    """Tell user code that no export is in progress."""
    strict: bool = False


def _try_export(flat: _Flat, example: Example, option: _TraceOption) -> ExportedProgram:
    dims = tuple(
        {example.batch_dim: Dim.AUTO} if example.has_batch(t) else None for t in example.tensors
    )
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(_quiet_torch())
            stack.enter_context(refuse_custom_autograd())
            stack.enter_context(StaticConditions())
            stack.enter_context(RefusePacking())
            if option.hidden:
                stack.enter_context(_hidden_export())
            warnings.simplefilter("ignore")
            return torch.export.export(
                flat, example.tensors, dynamic_shapes={"tensors": dims}, strict=option.strict
            )
    except CaptureError:
        raise
    except Exception as error:  # the user's forward or the tracer may raise anything
        raise translate(error, flat.model) from error


@contextlib.contextmanager
def _hidden_export() -> Iterator[None]:
    """Let ``torch.compiler.is_exporting`` return False to callers outside torch.

    Some libraries compute something slightly different during export. torch itself gets the true
    answer. ``is_compiling`` stays unpatched: libraries use it to avoid code that no tracer supports.
    """
    original = torch.compiler.is_exporting

    def answer() -> bool:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        return original() if caller.partition(".")[0] == "torch" else False

    torch.compiler.is_exporting = answer
    try:
        yield
    finally:
        torch.compiler.is_exporting = original


def _fixed_batch(program: ExportedProgram, example: Example) -> tuple[str, ...]:
    user_inputs = set(program.graph_signature.user_inputs)
    nodes = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in user_inputs]
    fixed = []
    for node, tensor, path in zip(nodes, example.tensors, example.leaf_paths(), strict=True):
        if not example.has_batch(tensor):
            continue
        size = node.meta["val"].shape[example.batch_dim]
        if not isinstance(size, torch.SymInt) or size.node.maybe_as_int() is not None:
            fixed.append(path)
    return tuple(fixed)


@contextlib.contextmanager
def mode_of(model: nn.Module, mode: Mode) -> Iterator[None]:
    """Switch the model to a mode and back; submodules that the user froze in eval() stay frozen.

    Calls the model's own ``train()``, which some models override to keep submodules in eval().
    """
    before = {module: module.training for module in model.modules()}
    frozen = [module for module, training in before.items() if model.training and not training]
    try:
        model.train(mode == "train")
        for module in frozen:
            module.training = False
        yield
    finally:
        for module, training in before.items():
            module.training = training


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Silence export, which logs and prints before it raises; the user gets our message instead."""
    noisy = [logging.getLogger(name) for name in ("torch.export", "torch.fx", "torch._dynamo")]
    levels = [log.level for log in noisy]
    for log in noisy:
        log.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for log, level in zip(noisy, levels, strict=True):
            log.setLevel(level)
