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
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram

from ravnest.errors import CaptureError, SplitError
from ravnest.split.aliases import find_aliases
from ravnest.split.checkpointing import noted_checkpoints
from ravnest.split.ctc_shapes import ctc_loss_captured
from ravnest.split.example import Example, bind_example
from ravnest.split.graph import MODES, Mode
from ravnest.split.kept_model import model_kept
from ravnest.split.model_inspection import inspect_model, warn_of_resting_dropout
from ravnest.split.outside_randomness import refuse_outside_randomness, tried_again
from ravnest.split.precision import Precision, check_precision, computed_in, delivered
from ravnest.split.recurrent_shapes import lengths_vary
from ravnest.split.size_conditions import SizeCondition, noted_conditions
from ravnest.split.state import ModelState, read_state
from ravnest.split.static_conditions import StaticConditions
from ravnest.split.structure import LEAF, Structure, flatten
from ravnest.split.torchscript import from_torchscript
from ravnest.split.unsupported import (
    RefusedFunctions,
    refuse_custom_autograd,
    refuse_inference_mode,
    translate,
    values_not_read,
)
from ravnest.split.varying import FixedLines, Varying, noted_fixed_sizes, refuse_fixed

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
    checkpointed: bool = False
    """True if forward checkpoints blocks, which the unsplit model runs twice."""
    reassigned: frozenset[str] = frozenset()
    """Keys of buffers that forward replaces by new tensors."""
    conditions: tuple[SizeCondition, ...] = ()
    """Conditions on sizes that forward evaluated; they hold in the graph."""
    batch_symbols: frozenset[sympy.Basic] = frozenset()
    """Symbols in the batch dimension of inputs. Others have at most the example's size."""
    autocast: bool = False
    """True if the program was traced under autocast, whose casts are not part of it."""


@dataclass
class Capture:
    """A captured model: two graphs over one state."""

    model: nn.Module
    example: Example
    state: ModelState
    modes: dict[Mode, ModeCapture]
    precision: Precision | None = None
    """Precision that the model computes in; None for the types of its tensors."""

    @property
    def fixed_batch(self) -> tuple[str, ...]:
        """Inputs whose batch size is fixed to the example's in at least one mode."""
        names = dict.fromkeys(name for mode in self.modes.values() for name in mode.fixed_batch)
        return tuple(names)

    @cached_property
    def written_parameters(self) -> tuple[torch.Tensor, ...]:
        """Parameters of the model that forward writes to in at least one mode."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        found: dict[str, torch.Tensor] = {}
        for mode in self.modes.values():
            for root in find_aliases(mode.graph).written():
                entry = self.state.tensors.get(mode.state_of.get(root.name, ""))
                if entry is not None and entry.kind == "parameter":
                    found[entry.model_names[0]] = own[entry.model_names[0]]
        return tuple(found.values())


def capture(
    model: nn.Module,
    example_args: Sequence[Any] | torch.Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    batch_dim: int = 0,
    varying: Varying | None = None,
    precision: Precision | None = None,
) -> Capture:
    """Capture ``model`` in both modes, without changing it.

    ``varying`` are dimensions besides the batch whose sizes vary up to those of the example.
    ``precision="bf16"`` captures it as it computes under autocast.

    Raises ``CaptureError``, which names the line of the user's code that cannot be captured.
    """
    precision = check_precision(precision, model)
    if isinstance(model, torch.jit.ScriptModule):
        model = from_torchscript(model)
    if not isinstance(model, nn.Module):
        raise SplitError(f"expected a torch.nn.Module to split, got {type(model).__name__}")
    args = (example_args,) if isinstance(example_args, torch.Tensor) else tuple(example_args)
    example = bind_example(model, args, dict(example_kwargs or {}), batch_dim, varying)
    inspect_model(model)
    warn_of_resting_dropout(model)
    state = read_state(model)
    modes = {mode: _capture_mode(model, example, state, mode, precision) for mode in MODES}
    result = Capture(model, example, state, modes, precision)
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
    reassigned: set[str] = field(default_factory=set)
    """Names of buffers that forward replaces."""

    def note_opaque(self, path: str, value: object) -> None:
        self.opaque[path] = type(value).__name__


class _Flat(nn.Module):
    """The model with flat tensors as inputs and outputs, so that export sees no classes of the user."""

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        traced: _TracedOutput,
        precision: Precision | None,
    ) -> None:
        super().__init__()
        self.model = model
        self._example = example
        self._traced = traced
        self._precision = precision

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        args, kwargs = self._example.rebuild(tensors)
        before = [(path, m, dict(m._buffers)) for path, m in self.model.named_modules()]
        output = self.model(*args, **kwargs)
        self._traced.reassigned.update(_write_reassigned_buffers(before))
        leaves, self._traced.structure = flatten(output, "output", self._traced.note_opaque)
        return tuple(delivered(leaves, self._precision))


def _write_reassigned_buffers(before: list[tuple[str, nn.Module, dict[str, Any]]]) -> list[str]:
    """Turn ``self.mean = new`` into a write to the buffer: export drops it below the top module.

    Returns the names of these buffers.
    """
    found = []
    for path, module, buffers in before:
        for name, old in buffers.items():
            new = module._buffers.get(name)
            if new is not old and old is not None and new is not None:
                old.copy_(new.detach())
                module._buffers[name] = old
                found.append(f"{path}.{name}" if path else name)
    return found


@tried_again
def _capture_mode(
    model: nn.Module, example: Example, state: ModelState, mode: Mode, precision: Precision | None
) -> ModeCapture:
    traced = _TracedOutput()
    flat = _Flat(model, example, traced, precision)
    with contextlib.ExitStack() as stack:
        stack.enter_context(refuse_outside_randomness())
        stack.enter_context(model_kept(model))
        stack.enter_context(mode_of(model, mode))
        checkpoints = stack.enter_context(noted_checkpoints(model))
        stack.enter_context(computed_in(precision))
        exported = _export(flat, example)
    program = exported.program
    for (position, dim), line in exported.fixed_sizes.items():
        path, tensor = example.leaf_paths()[position], example.tensors[position]
        raise refuse_fixed(path, dim, tensor.shape[dim], line)
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
        fixed_batch=exported.fixed_batch,
        checkpointed=bool(checkpoints),
        reassigned=frozenset(state.key_of(name, "BUFFER", program, mode) for name in traced.reassigned),
        conditions=_in_final_symbols(program, exported.conditions),
        batch_symbols=_batch_symbols(program, example),
        autocast=precision is not None,
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


@dataclass(frozen=True)
class _Exported:
    """A program, with what became of the sizes that vary."""

    program: ExportedProgram
    fixed_batch: tuple[str, ...]
    """Inputs with a fixed batch size."""
    fixed_sizes: FixedLines
    """Other dimensions that are to vary and are fixed, with the lines that fix them."""
    conditions: Sequence[SizeCondition]
    """Conditions on sizes that the program relies on."""

    @property
    def fixed(self) -> int:
        """Number of dimensions that are not symbols."""
        return len(self.fixed_batch) + len(self.fixed_sizes)


def _export(flat: _Flat, example: Example) -> _Exported:
    """Export with the first tracing option that keeps the batch size symbolic, else with the best one.

    Libraries can have a separate code path for export. The path outside of export comes first, because
    it is the model's own; then the path for export; then the strict tracer, which keeps
    ``int(x.shape[0])`` symbolic.
    """
    best: _Exported | None = None
    first_error: CaptureError | None = None
    for option in (_TraceOption(hidden=True), _TraceOption(), _TraceOption(strict=True)):
        if option.strict and best is None:
            break
        try:
            with noted_conditions() as noted, noted_fixed_sizes() as lines:
                program = _try_export(flat, example, option)
        except CaptureError as error:
            first_error = first_error or error
            continue
        found = _Exported(
            program,
            _fixed_batch(program, example),
            _fixed_sizes(program, example, lines),
            _guards(program) if option.strict else noted,
        )
        if best is None or found.fixed < best.fixed:
            best = found
        if not found.fixed:
            break
    if best is None:
        assert first_error is not None
        raise first_error
    return best


def _symbolic_sizes(program: ExportedProgram) -> list[torch.SymInt]:
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape]
    return [size for size in sizes if isinstance(size, torch.SymInt)]


def _guards(program: ExportedProgram) -> list[SizeCondition]:
    """Return the conditions that the strict tracer relies on.

    It interprets forward, so that conditions are not seen while they are evaluated. It assumes sizes of
    at least 2 without a guard.
    """
    sizes = _symbolic_sizes(program)
    symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
    guards = [guard.expr for guard in sizes[0].node.shape_env.guards] if sizes else []
    at_least_2 = [sympy.Ge(symbol, 2) for symbol in sorted(symbols, key=str)]
    return [SizeCondition(expression, "") for expression in (*guards, *at_least_2)]


def _in_final_symbols(
    program: ExportedProgram, conditions: Sequence[SizeCondition]
) -> tuple[SizeCondition, ...]:
    """Return conditions in the symbols that the tracer ended with; it may have replaced some."""
    sizes = _symbolic_sizes(program)
    if not sizes:
        return ()
    environment = sizes[0].node.shape_env
    replaced = (replace(c, expression=environment.replace(c.expression)) for c in conditions)
    return tuple(condition for condition in replaced if condition.expression.free_symbols)


@dataclass(frozen=True)
class _TraceOption:
    """Options of one attempt to trace the model."""

    hidden: bool = False
    """Tell user code that no export is in progress."""
    strict: bool = False


def _try_export(flat: _Flat, example: Example, option: _TraceOption) -> ExportedProgram:
    dims = tuple(
        dict.fromkeys(sorted(example.dynamic_dims(position)), Dim.AUTO) or None
        for position in range(len(example.tensors))
    )
    refused = RefusedFunctions()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(_quiet_torch())
            stack.enter_context(refuse_custom_autograd())
            stack.enter_context(StaticConditions())
            stack.enter_context(refuse_inference_mode())
            stack.enter_context(values_not_read())
            stack.enter_context(lengths_vary(any(example.varying)))
            stack.enter_context(ctc_loss_captured())
            stack.enter_context(refused)
            if option.hidden:
                stack.enter_context(_hidden_export())
            warnings.simplefilter("ignore")
            return torch.export.export(
                flat, example.tensors, dynamic_shapes={"tensors": dims}, strict=option.strict
            )
    except CaptureError:
        raise
    except Exception as error:  # the user's forward or the tracer may raise anything
        raise translate(error, flat.model, refused.data_line) from error


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


def _input_sizes(program: ExportedProgram) -> list[torch.Size]:
    """Return the captured shape of each tensor of the example."""
    user_inputs = set(program.graph_signature.user_inputs)
    nodes = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in user_inputs]
    return [node.meta["val"].shape for node in nodes]


def _is_fixed(size: int | torch.SymInt) -> bool:
    return not isinstance(size, torch.SymInt) or size.node.maybe_as_int() is not None


def _fixed_batch(program: ExportedProgram, example: Example) -> tuple[str, ...]:
    found = zip(_input_sizes(program), example.tensors, example.leaf_paths(), strict=True)
    dim = example.batch_dim
    return tuple(path for shape, t, path in found if example.has_batch(t) and _is_fixed(shape[dim]))


def _fixed_sizes(program: ExportedProgram, example: Example, lines: FixedLines) -> FixedLines:
    """Return the dimensions besides the batch that are to vary and are fixed."""
    places = ((k, dim) for k, dims in enumerate(example.varying) for dim in sorted(dims))
    shapes = _input_sizes(program)
    return {place: lines.get(place, "") for place in places if _is_fixed(shapes[place[0]][place[1]])}


def _batch_symbols(program: ExportedProgram, example: Example) -> frozenset[sympy.Basic]:
    pairs = zip(_input_sizes(program), example.tensors, strict=True)
    sizes: list[Any] = [shape[example.batch_dim] for shape, t in pairs if example.has_batch(t)]
    return frozenset(s for size in sizes if not _is_fixed(size) for s in size.node.expr.free_symbols)


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
