"""Decide at capture time if the training graph treats the samples of a batch independently.

A batch may be trained in micro-batches whose gradients are added only if each row of the output
depends on the same row of the inputs alone. The graph is read first, for operators and buffers that
say so themselves; then the outputs of a batch are compared with those of its parts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from ravnest.split.aliases import find_aliases
from ravnest.split.capture import Capture, ModeCapture
from ravnest.split.deterministic import without_randomness
from ravnest.split.dimensions import Dimensions, expression_of
from ravnest.split.graph import Dimension, StageGraph, SymbolRange
from ravnest.split.program import Program
from ravnest.split.rows import cut_rows, repeat_rows, shuffle_rows, vary_floats
from ravnest.split.source import line_of_trace_text

if TYPE_CHECKING:
    from ravnest.split.splitter import PreparedModel

logger = logging.getLogger(__name__)

_ROWS = 8
"""Rows of the example that are compared; a coupling shows among few rows as well as among many."""
_TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""Relative difference of outputs that rounding explains, by the least precise type of the model."""
_USUAL_TOLERANCE = 1e-4
_SEED = 20_240_301
_STATISTICS = (
    "aten::batch_norm",
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_batch_norm_with_update",
)
"""Operators that normalise over the batch unless their argument ``training`` is false."""
_ORDER = ("aten::sort", "aten::argsort", "aten::msort", "aten::topk")
_KEEPS_VALUES = frozenset(
    {"alias", "clone", "contiguous", "detach", "expand", "flatten", "permute", "reshape", "select"}
    | {"slice", "squeeze", "to", "_to_copy", "transpose", "unsqueeze", "view"}
)
"""Operators whose result holds the values of their first argument and no others."""


@dataclass(frozen=True)
class RowSplit:
    """A model's answer to a batch in parts: the same rows as from the whole batch, or not."""

    allowed: bool
    reason: str
    """Sentence for the user: why a batch may not be split, or that it may."""
    smallest: int
    """Samples that the smallest micro-batch must have."""


def row_split(prepared: PreparedModel) -> RowSplit:
    """Return a RowSplit that says if batches of this model may be trained in parts.

    Runs at most twice ``_ROWS`` samples through the model without gradients, on copies of the example.
    The model, its buffers and the random number generators stay as they are.
    """
    capture = prepared.capture
    training = capture.modes["train"]
    stage = prepared.cut(()).stages[0]
    graph = stage.spec.graphs["train"]
    batches = _batch_ranges(graph)
    smallest = max((symbol.minimum for symbol in batches), default=1)
    reason = next(_structural_reasons(capture, training, graph), None)
    if reason is not None:
        return RowSplit(False, reason, smallest)
    plain = without_randomness(graph)
    if isinstance(plain, str):
        reason = f"the operator {plain} draws random numbers, so that results cannot be compared"
        return RowSplit(False, reason, smallest)
    state = [stage.tensors[use.key] for use in graph.state]
    comparison = _Comparison(capture, plain, state)
    reason = comparison.run(smallest)
    if reason is not None and smallest == 1 and comparison.run(2) is None:
        return RowSplit(True, _INDEPENDENT, 2)
    return RowSplit(reason is None, reason or _INDEPENDENT, smallest)


def _batch_ranges(graph: StageGraph) -> list[SymbolRange]:
    """Return the sizes of batches; others are lengths of samples."""
    return [symbol for symbol in graph.symbols if not symbol.length]


_INDEPENDENT = "each row of the outputs depends on the same row of the inputs only"


def _structural_reasons(capture: Capture, training: ModeCapture, graph: StageGraph) -> Iterator[str]:
    """Yield the reasons against a split that the graph itself shows, the clearest first."""
    yield from _about_inputs(capture, training, graph)
    yield from _about_operators(training)
    yield from _about_written_state(capture, training)
    yield from _about_outputs(training)


def _about_inputs(capture: Capture, training: ModeCapture, graph: StageGraph) -> Iterator[str]:
    example = capture.example
    if example.batch_dim != 0:
        yield f"the batch is dimension {example.batch_dim} of the inputs, not dimension 0"
    if training.fixed_batch:
        yield f"the batch size is fixed at {example.batch_size} by the model"
    for symbol in _batch_ranges(graph):
        if symbol.modulus > 1 or symbol.excluded:
            yield f"the model does not take batches of every size ({symbol})"
    paths = example.leaf_paths()
    for value in graph.inputs:
        path = paths[training.inputs[value.name]]
        first = value.shape[0] if value.shape else Dimension(1)
        if not first.symbol:
            yield f"input {path} has no batch dimension"
        elif first.factor != 1:
            yield f"the model takes only batches that are a multiple of {first.factor}"


def _about_operators(training: ModeCapture) -> Iterator[str]:
    """Yield operators that compute over the batch; those on weights alone do not count."""
    from_inputs: set[fx.Node] = set()
    random: set[fx.Node] = set()
    for node in training.graph.nodes:
        before = node.all_input_nodes
        if node.name in training.inputs or any(n in from_inputs for n in before):
            from_inputs.add(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            if any(n in random for n in before):
                random.add(node)
            continue
        name = node.target._schema.name
        arguments = _arguments(node)
        if name in _STATISTICS and node.args[0] in from_inputs and arguments.get("training", True):
            base = name.removeprefix("aten::").strip("_")
            yield f"{base} in {_place(node)} computes statistics over the batch"
        drawn = torch.Tag.nondeterministic_seeded in node.target.tags
        if drawn or any(n in random for n in before):
            random.add(node)
            if name in _ORDER and _sorts_samples(node, arguments):
                yield f"{_place(node)} puts the samples of a batch in a random order"


def _sorts_samples(node: fx.Node, arguments: Mapping[str, Any]) -> bool:
    tensor = arguments["self"].meta["val"]
    dim = 0 if node.target._schema.name == "aten::msort" else arguments.get("dim", -1)  # type: ignore[union-attr]
    return bool(tensor.dim()) and dim % tensor.dim() == 0 and isinstance(tensor.shape[0], torch.SymInt)


def _about_written_state(capture: Capture, training: ModeCapture) -> Iterator[str]:
    for _, root in find_aliases(training.graph).writes:
        key = training.state_of.get(root.name)
        if key is not None:
            kind = capture.state.tensors[key].kind
            yield f"the {kind} {key} changes with each batch"


def _about_outputs(training: ModeCapture) -> Iterator[str]:
    output = next(node for node in training.graph.nodes if node.op == "output")
    leaves = output.args[0]
    assert isinstance(leaves, list | tuple)
    dimensions = Dimensions(training)
    for path, leaf in zip(training.structure.leaf_paths("output"), leaves, strict=True):
        value = leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf
        name = "the output" if path == "output" else f"output {path.removeprefix('output.')}"
        if not isinstance(value, torch.Tensor):
            yield f"{name} is not a tensor with one row for each sample"
        elif not value.dim():
            yield f"{name} has no batch dimension"
        else:
            first = dimensions.of(value.shape)[0]
            if not first.symbol:
                yield f"{name} has no batch dimension"
            elif first.symbol == "?" and not _is_multiple(value.shape[0], training.batch_symbols):
                yield f"the number of rows of {name} is not a multiple of the batch size"
            elif any(_has_symbol(other, training.batch_symbols) for other in value.shape[1:]):
                yield f"{name} has the batch in two dimensions: it compares samples with each other"


def _is_multiple(size: Any, batch: Collection[sympy.Basic]) -> bool:
    """Return True for a size that is the batch size times a length of the samples."""
    expression = expression_of(size)
    found = [symbol for symbol in expression.free_symbols if symbol in batch]
    return len(found) == 1 and not (expression / found[0]).has(found[0])


def _has_symbol(size: Any, symbols: Collection[sympy.Basic]) -> bool:
    expression = expression_of(size)
    return expression is not None and any(symbol in symbols for symbol in expression.free_symbols)


def _arguments(node: fx.Node) -> dict[str, Any]:
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _place(node: fx.Node) -> str:
    """Return the layer of a node as the user calls it, else the line of code."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(modules[-1][0]).partition("model.")[2] if modules else ""
    if path:
        return f"layer {path}"
    return line_of_trace_text(node.meta.get("stack_trace")) or "forward"


class _Comparison:
    """Outputs of a batch compared with those of its parts, without gradients."""

    def __init__(self, capture: Capture, graph: StageGraph, state: Sequence[torch.Tensor]) -> None:
        self._capture = capture
        self._graph = graph
        self._state = state
        device = state[0].device if state else torch.device("cpu")
        self._program = Program(graph, device)
        self._paths = [output.name for output in graph.outputs]
        types = {t.dtype for t in (*state, *capture.example.tensors) if t.is_floating_point()}
        types |= set() if capture.precision is None else {torch.bfloat16}
        self._tolerance = max([_TOLERANCE.get(dtype, 0.0) for dtype in types] + [_USUAL_TOLERANCE])

    def run(self, smallest: int) -> str | None:
        """Return the reason against a split into parts of ``smallest`` samples or more."""
        sizes = self._sizes(smallest)
        if sizes is None:
            return f"the model needs at least {smallest} samples, and the parts of a batch have fewer"
        problem = ""
        for inputs in self._variations(sum(sizes)):
            if not _rows_differ(inputs, sum(sizes)):
                problem = problem or _SAME_ROWS
                continue
            try:
                whole = self._outputs(inputs)
            except (RuntimeError, IndexError, ValueError) as error:
                logger.debug("the model does not take a variation of the example: %s", error)
                problem = _SAME_ROWS
                continue
            if any(bool(torch.isnan(t).any()) for t in whole if t.is_floating_point()):
                problem = "the outputs for the example contain NaN, so that rows cannot be compared"
                continue
            return self._compare(inputs, whole, sizes)
        return problem

    def _sizes(self, smallest: int) -> tuple[int, ...] | None:
        """Return sizes of parts, the smallest one first and one more second: groups would show."""
        batch = self._capture.example.batch_size
        assert batch is not None
        least = 2 * smallest + 1
        rest = min(batch, _ROWS) - least
        sizes = (smallest, smallest + 1, rest) if rest >= smallest else (smallest, smallest + 1)
        ranges = _batch_ranges(self._graph)
        bounds = [symbol.maximum for symbol in ranges if symbol.maximum is not None]
        return sizes if sum(sizes) <= min(bounds, default=sum(sizes)) else None

    def _variations(self, rows: int) -> Iterator[list[torch.Tensor]]:
        """Yield inputs with rows that differ, beginning with those that differ the most."""
        example = self._capture.example
        assert example.batch_size is not None
        positions = self._capture.modes["train"].inputs
        given = {
            value.name: repeat_rows(example.tensors[positions[value.name]], example.batch_size, rows)
            for value in self._graph.inputs
        }
        ranges = self._index_ranges()
        generator = torch.Generator().manual_seed(_SEED)
        drawn = {
            name: _draw(tensor, ranges[name], generator)
            for name, tensor in given.items()
            if name in ranges and bool((tensor == tensor[:1]).all())
        }
        changed = {
            name: vary_floats(t, generator) if t.is_floating_point() else shuffle_rows(t, generator)
            for name, t in given.items()
        }
        yield list((changed | drawn).values())
        yield list(changed.values())
        order = torch.randperm(rows, generator=generator)
        yield [t[order.to(t.device)] for t in given.values()]
        floats = {n: vary_floats(t, generator) for n, t in given.items()}
        yield list(floats.values())

    def _index_ranges(self) -> dict[str, int]:
        """Return how many rows the embeddings have that an integer input is looked up in."""
        sources = {value.name: value.name for value in self._graph.inputs}
        rows = {
            u.name: t.shape[0] for u, t in zip(self._graph.state, self._state, strict=True) if t.dim()
        }
        found: dict[str, int] = {}
        for operation in self._graph.operations:
            read = list(operation.refs())
            base = operation.target.partition("::")[2].partition(".")[0]
            if base in _KEEPS_VALUES and read and read[0] in sources:
                sources[operation.name] = sources[read[0]]
            elif base == "embedding" and read[0] in rows and read[1] in sources:
                name = sources[read[1]]
                found[name] = min(found.get(name, rows[read[0]]), rows[read[0]])
        return found

    def _outputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(self._program([tensor.clone() for tensor in inputs], self._state))

    def _compare(
        self, inputs: list[torch.Tensor], whole: list[torch.Tensor], sizes: Sequence[int]
    ) -> str | None:
        expected = cut_rows(whole, sizes, multiples=True)
        parts = cut_rows(inputs, sizes)
        assert expected is not None
        assert parts is not None
        scales = [_largest(tensor) for tensor in whole]
        for size, part, rows in zip(sizes, parts, expected, strict=True):
            try:
                found = self._outputs(part)
            except (RuntimeError, IndexError, ValueError) as error:
                return f"the model does not take a batch of {size} samples: {error}"
            for path, scale, a, b in zip(self._paths, scales, rows, found, strict=True):
                if a.shape != b.shape:
                    return (
                        f"{path} has the shape {list(b.shape)} instead of {list(a.shape)} when a part "
                        f"of the batch holds {size}"
                    )
                if (difference := _difference(a, b, scale)) > self._tolerance:
                    return (
                        f"the rows of {path} depend on the other samples of the batch: they differ by "
                        f"{difference:.1e} when the batch is split"
                    )
        return None


_SAME_ROWS = (
    "all samples of the example are the same, so that an effect of one on the other cannot be seen: "
    "give an example with different samples"
)


def _draw(tensor: torch.Tensor, below: int, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randint(below, tensor.shape, generator=generator)
    return drawn.to(tensor.dtype).to(tensor.device)


def _rows_differ(inputs: Sequence[torch.Tensor], rows: int) -> bool:
    return any(
        bool((tensor != tensor[:1]).any())
        for tensor in inputs
        if tensor.dim() and tensor.shape[0] == rows
    )


def _difference(a: torch.Tensor, b: torch.Tensor, scale: float) -> float:
    """Return the largest difference of two tensors relative to ``scale``; inf if they are no floats."""
    if torch.equal(a, b):
        return 0.0
    if not (a.is_floating_point() or a.is_complex()) or a.dtype != b.dtype:
        return float("inf")
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)) or not torch.equal(a[~finite], b[~finite]):
        return float("inf")
    return _largest(a[finite] - b[finite]) / max(scale, torch.finfo(torch.float32).tiny)


def _largest(tensor: torch.Tensor) -> float:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 1.0
    values = tensor.detach().abs().double()
    values = values[torch.isfinite(values)]
    return float(values.max()) if values.numel() else 0.0
