"""Capture a model as two ATen graphs, one for training and one for evaluation.

``torch.export`` in its non-strict form runs the user's forward once with symbolic batch size. Two
captures share the parameters, because flipping flags afterwards is not the same program (stochastic
depth, auxiliary heads). Its training IR keeps composite operators, so that kernels, saved tensors
and the use of random numbers are those of the eager model.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram

from ravnest.errors import CaptureError, SplitError
from ravnest.split.checkpointing import noted_checkpoints
from ravnest.split.graph import MODES, Mode
from ravnest.split.state import ModelState, read_state
from ravnest.split.static_conditions import StaticConditions
from ravnest.split.structure import LEAF, Structure, flatten, map_tensors
from ravnest.split.torchscript import from_torchscript
from ravnest.split.unsupported import RefusePacking, refuse_custom_autograd, translate

logger = logging.getLogger(__name__)

_PREFIX = "model."


@dataclass(frozen=True)
class Example:
    """The example inputs, bound to forward's signature and taken apart."""

    names: tuple[str, ...]
    structures: tuple[Structure, ...]
    tensors: tuple[torch.Tensor, ...]
    positional: int
    """How many of the names are passed by position; the others go by keyword."""
    batch_size: int | None
    batch_dim: int

    def leaf_paths(self) -> list[str]:
        """Dotted name of each tensor."""
        pairs = zip(self.names, self.structures, strict=True)
        return [path for name, structure in pairs for path in structure.leaf_paths(name)]

    def rebuild(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of forward with these tensors in place of the example's."""
        leaves = iter(tensors)
        values = [structure.build(leaves) for structure in self.structures]
        args = tuple(values[: self.positional])
        return args, dict(zip(self.names[self.positional :], values[self.positional :], strict=True))

    def narrowed(self, batch_size: int) -> Example:
        """The same example with the first ``batch_size`` samples only."""
        tensors = tuple(
            t.narrow(self.batch_dim, 0, batch_size) if self.has_batch(t) else t for t in self.tensors
        )
        return replace(self, tensors=tensors, batch_size=batch_size)

    def has_batch(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's batch dimension has the batch's size."""
        dim = self.batch_dim
        return tensor.dim() > dim and self.batch_size == tensor.shape[dim]


@dataclass
class ModeCapture:
    """One captured program. ``graph`` belongs to the splitter, which rewrites it."""

    mode: Mode
    program: ExportedProgram
    graph: fx.Graph
    state_of: dict[str, str]
    """Placeholder name to state key."""
    inputs: dict[str, int]
    """Placeholder name to position among the example's tensors."""
    structure: Structure
    """How the graph's outputs form the model's output."""
    fixed_batch: tuple[str, ...]
    """Inputs whose batch size the capture could not keep open."""


@dataclass
class Capture:
    """A model as data: two graphs over one state."""

    model: nn.Module
    example: Example
    state: ModelState
    modes: dict[Mode, ModeCapture]

    @property
    def fixed_batch(self) -> tuple[str, ...]:
        """Inputs whose batch size is fixed to the example's in either mode."""
        names = dict.fromkeys(name for mode in self.modes.values() for name in mode.fixed_batch)
        return tuple(names)


def capture(
    model: nn.Module,
    example_args: Sequence[Any] | torch.Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    batch_dim: int = 0,
) -> Capture:
    """Capture ``model`` in both modes. The model is left as it was.

    Raises ``CaptureError`` naming the line of the user's code that cannot be captured.
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
            "number. Batches of another size will be refused; use drop_last=True in the DataLoader, "
            "or replace int(x.shape[0]), len(x) or a constant in view/reshape by x.shape[0] or -1",
            example.batch_size,
            ", ".join(result.fixed_batch),
        )
    return result


def bind_example(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: int = 0
) -> Example:
    """Give every example input the name that forward has for it."""
    names, values, positional = _bind(model, args, kwargs)
    leaves: list[torch.Tensor] = []
    structures = []
    for name, value in zip(names, values, strict=True):
        plain = map_tensors(value, torch.Tensor.detach)
        found, structure = flatten(plain, name)
        leaves += found
        structures.append(structure)
        if not found and value is not None:
            logger.info("input %s is not a tensor: its value %r is fixed in the stages", name, value)
    if not leaves:
        raise SplitError(
            "the model cannot be captured without example inputs: give example_args=(tensor, ...) or "
            "example_kwargs={name: tensor, ...}"
        )
    sizes = Counter(t.shape[batch_dim] for t in leaves if t.dim() > batch_dim)
    batch = sizes.most_common(1)[0][0] if sizes else None
    if batch == 0:
        raise SplitError("the example inputs hold no sample: their batch size is 0")
    if batch == 1:
        leaves = [_doubled(t, batch_dim) for t in leaves]
        batch = 2
    return Example(tuple(names), tuple(structures), tuple(leaves), positional, batch, batch_dim)


def _doubled(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A batch of one repeated to two: a size of 1 would be captured as a constant."""
    if tensor.dim() > dim and tensor.shape[dim] == 1:
        return torch.cat([tensor, tensor], dim)
    return tensor


def _bind(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[str], list[Any], int]:
    """Names and values in the order of the signature; the first ``positional`` go by position."""
    try:
        signature = inspect.signature(model.forward)
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise SplitError(f"the example inputs do not fit the model's forward: {error}") from error
    names: list[str] = []
    values: list[Any] = []
    keyword: list[tuple[str, Any]] = []
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}_{position}" for position in range(len(value))]
            values += value
        elif kind is inspect.Parameter.VAR_KEYWORD:
            keyword += value.items()
        elif name in kwargs:
            keyword.append((name, value))
        else:
            names.append(name)
            values.append(value)
    positional = len(names)
    return names + [name for name, _ in keyword], values + [v for _, v in keyword], positional


@dataclass
class _Seen:
    """What the trace saw of the model's output. Export puts attributes of modules back as they were,
    so it is kept beside the module.
    """

    structure: Structure = LEAF
    opaque: dict[str, str] = field(default_factory=dict)

    def note_opaque(self, path: str, value: object) -> None:
        self.opaque[path] = type(value).__name__


class _Flat(nn.Module):
    """The model with tensors in and tensors out, so that export meets no user class at its edges."""

    def __init__(self, model: nn.Module, example: Example, seen: _Seen) -> None:
        super().__init__()
        self.model = model
        self._example = example
        self._seen = seen

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        args, kwargs = self._example.rebuild(tensors)
        before = [(m, dict(m._buffers)) for m in self.model.modules()]
        output = self.model(*args, **kwargs)
        _write_reassigned_buffers(before)
        leaves, self._seen.structure = flatten(output, "output", self._seen.note_opaque)
        return tuple(leaves)


def _write_reassigned_buffers(before: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Make ``self.mean = new`` a write to the buffer; export would forget it below the top module."""
    for module, buffers in before:
        for name, old in buffers.items():
            new = module._buffers.get(name)
            if new is not old and old is not None and new is not None:
                old.copy_(new.detach())
                module._buffers[name] = old


def _capture_mode(model: nn.Module, example: Example, state: ModelState, mode: Mode) -> ModeCapture:
    seen = _Seen()
    flat = _Flat(model, example, seen)
    with mode_of(model, mode), noted_checkpoints(model):
        program, fixed = _export(flat, example)
    for path, kind in seen.opaque.items():
        logger.info("%s is a %s, which stages cannot return: it is left out", path, kind)
    if not any(node.op == "call_function" for node in program.graph.nodes):
        raise SplitError("forward computes nothing that could be split")
    graph = fx.Graph()
    val_map: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(program.graph, val_map, return_output_node=True)
    assert isinstance(output, tuple)
    graph.output(output[0])
    for old, new in val_map.items():
        new.meta = old.meta
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
        structure=seen.structure,
        fixed_batch=fixed,
    )


def _export(flat: _Flat, example: Example) -> tuple[ExportedProgram, tuple[str, ...]]:
    """The first way of tracing that captures the model with an open batch, or the best there is.

    The path that libraries take outside of export comes first, because that is the model's own; then
    the one that they have for export; then the strict tracer, which keeps ``int(x.shape[0])`` open.
    """
    best: tuple[ExportedProgram, tuple[str, ...]] | None = None
    first_error: CaptureError | None = None
    for way in (_Way(hidden=True), _Way(hidden=False), _Way(strict=True)):
        if way.strict and best is None:
            break
        try:
            program = _try_export(flat, example, way)
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
class _Way:
    """A way of tracing."""

    hidden: bool = False
    """User code is told that nothing is being exported."""
    strict: bool = False


def _try_export(flat: _Flat, example: Example, way: _Way) -> ExportedProgram:
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
            if way.hidden:
                stack.enter_context(_hidden_export())
            warnings.simplefilter("ignore")
            return torch.export.export(
                flat, example.tensors, dynamic_shapes={"tensors": dims}, strict=way.strict
            )
    except CaptureError:
        raise
    except Exception as error:  # whatever the user's forward or the tracer raises, translated once
        raise translate(error, flat.model) from error


@contextlib.contextmanager
def _hidden_export() -> Iterator[None]:
    """Answer "no" to libraries that ask whether they are being exported.

    Some compute something slightly different then. Torch itself gets the true answer. To
    ``is_compiling`` everybody does: libraries ask it to avoid what no tracer can follow.
    """
    original = torch.compiler.is_exporting

    def answer() -> bool:
        asker = str(sys._getframe(1).f_globals.get("__name__", ""))
        return original() if asker.partition(".")[0] == "torch" else False

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
    """Put the model in a mode and back; submodules that the user froze in eval() stay there.

    Through the model's own ``train()``, which some models override to keep parts in eval.
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
    """Export logs advice and prints half a graph before it raises; the user gets our message."""
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
