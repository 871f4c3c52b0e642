"""The end of a training graph that can run on a few positions at a time: the last linear layer.

The logits of a large vocabulary, their log-softmax and their gradient are the largest tensors of many
models. If only the loss reads the logits, the layer and the loss can be computed for some positions
after the other, and the logits of all positions never exist. This module finds the layer in a graph
and decides with numbers if the loss may be computed like that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from msgspec.structs import replace

from ravnest.split.graph import Argument, Operation, OutputSpec, Ref, StageGraph, ValueSpec
from ravnest.split.loss_weighting import (
    NO_WEIGHTS,
    Loss,
    LossWeighting,
    NotDecomposable,
    find_weighting,
)
from ravnest.split.structure import map_tensors, tensors_in

LINEAR = "aten::linear.default"
_KEEPS_POSITIONS = frozenset(
    f"aten::{name}"
    for name in (
        "_log_softmax.default",
        "_to_copy.default",
        "alias.default",
        "clone.default",
        "contiguous.default",
        "div.Scalar",
        "div.Tensor",
        "flatten.using_ints",
        "log_softmax.int",
        "mul.Scalar",
        "mul.Tensor",
        "permute.default",
        "reshape.default",
        "slice.Tensor",
        "softmax.int",
        "tanh.default",
        "to.dtype",
        "transpose.int",
        "unsqueeze.default",
        "view.default",
    )
)
"""Operators between the linear layer and the model's output. ``find_chunking`` tries them out: one that
depends on the number of positions is found there."""
_POSITIONS = 6
_ROWS = 3
_SEED = 20_240_303

_NO_POSITION_WEIGHTS = (
    "the loss of all positions is neither a weighted mean nor the sum of the losses of some positions "
    "after the other: it shifts labels, compares positions or uses a statistic of them"
)

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class LossHead:
    """A training graph in three pieces: what leads to the last linear layer, the layer, and the rest."""

    trunk: StageGraph
    """Graph whose only output is the layer's input."""
    tail: StageGraph
    """Graph from the layer's result, its only input, to the model's output."""
    name: str
    """Name of the layer's operation."""
    weight: str
    """Key of the layer's weight."""
    bias: str | None


def match_loss_head(graph: StageGraph) -> LossHead | str:
    """Return the last linear layer of a training graph, or why the graph does not end in one."""
    outputs = [output for output in graph.outputs if isinstance(output.value, Ref)]
    if len(outputs) != 1:
        return f"the model has {len(outputs)} outputs, and the loss may use each of them"
    uses = Counter(name for operation in graph.operations for name in operation.refs())
    made = {operation.name: operation for operation in graph.operations}
    keys = {use.name: use.key for use in graph.state}
    tail: list[Operation] = []
    value = outputs[0].value
    assert isinstance(value, Ref)
    while (operation := made.get(value.name)) is not None and _keeps_positions(operation):
        tail.insert(0, operation)
        (name,) = operation.refs()
        value = Ref(name)
        if uses[name] != 1:
            return f"{name} is used more than once"
    weights = None if operation is None else _linear_weights(operation, keys)
    if operation is None or weights is None:
        return "the model's output is not the result of a linear layer"
    if uses[operation.name] > (1 if tail else 0):
        return "the result of the last linear layer is used more than once"
    behind = graph.operations[graph.operations.index(operation) + 1 :]
    if list(behind) != tail:
        return "other operations follow the last linear layer"
    return _cut(graph, operation, tail, weights)


def _keeps_positions(operation: Operation) -> bool:
    names = list(operation.refs())
    return operation.target in _KEEPS_POSITIONS and len(names) == 1 and not operation.no_grad


def _linear_weights(operation: Operation, keys: dict[str, str]) -> tuple[str, str | None] | None:
    """Return the keys of a linear layer's weight and bias, if both are parameters or buffers."""
    if operation.target != LINEAR or operation.kwargs or operation.no_grad:
        return None
    x, weight, bias = (*operation.args, None)[:3]
    if not isinstance(x, Ref) or x.name in keys or not isinstance(weight, Ref):
        return None
    if weight.name not in keys or (isinstance(bias, Ref) and bias.name not in keys):
        return None
    return keys[weight.name], keys[bias.name] if isinstance(bias, Ref) else None


def _cut(
    graph: StageGraph,
    linear: Operation,
    tail: Sequence[Operation],
    weights: tuple[str, str | None],
) -> LossHead:
    behind = {linear.name, *(operation.name for operation in tail)}
    before = tuple(operation for operation in graph.operations if operation.name not in behind)
    used = {name for operation in before for name in operation.refs()}
    x: Argument = linear.args[0]
    assert isinstance(x, Ref)
    trunk = replace(
        graph,
        operations=before,
        outputs=(OutputSpec(x.name, x),),
        state=tuple(use for use in graph.state if use.name in used),
        structure=None,
    )
    rest = replace(
        graph,
        inputs=(ValueSpec(linear.name, torch.float32),),
        state=(),
        operations=tuple(tail),
        symbols=(),
    )
    return LossHead(trunk, rest, linear.name, *weights)


# --- chunks of positions ---------------------------------------------------------------------------


def cut_positions(value: _Value, positions: int, sizes: Sequence[int]) -> list[_Value] | None:
    """Cut a nested value along dimension 1 into parts of these sizes; None where nothing can be cut.

    Tensors that do not have ``positions`` elements in dimension 1 are part of each result.
    """
    if not any(_has_positions(tensor, positions) for tensor in tensors_in(value)):
        return None
    parts = []
    first = 0
    for size in sizes:
        parts.append(map_tensors(value, _narrower(positions, first, size)))
        first += size
    return parts


def _narrower(positions: int, first: int, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(1, first, size) if _has_positions(tensor, positions) else tensor

    return change


def _has_positions(tensor: torch.Tensor, positions: int) -> bool:
    return tensor.dim() > 1 and tensor.shape[1] == positions


def find_chunking(
    loss: Loss, tail: Callable[[torch.Tensor], Any], logits: Sequence[int], item: Any, dtype: torch.dtype
) -> LossWeighting | NotDecomposable:
    """Return the weights under which the losses of chunks of positions add up to the loss of all.

    ``tail`` makes the model's output of logits, ``logits`` is their shape: samples, positions, ...,
    classes. ``item`` has as many samples. ``loss`` is called with few samples and positions.
    """
    rows, positions = min(logits[0], _ROWS), logits[1]
    item = map_tensors(item, lambda t: t[:rows] if t.dim() and t.shape[0] == logits[0] else t)
    leaves = [k for k, t in enumerate(tensors_in(item)) if _has_positions(t, positions)]
    if not leaves:
        return NotDecomposable(
            f"no tensor that the labels loader gives has {positions} positions in dimension 1"
        )
    item = few_positions(item, positions)
    made_up = made_up_logits(logits, rows, dtype).transpose(0, 1).contiguous()
    found = find_weighting(_PositionLoss(loss, tail, leaves), made_up, _swap(item, leaves), len(made_up))
    if isinstance(found, NotDecomposable) and found.reason.startswith(NO_WEIGHTS):
        return NotDecomposable(_NO_POSITION_WEIGHTS)
    return found


def few_positions(item: _Value, positions: int) -> _Value:
    """Return labels of a few positions, as many as ``made_up_logits`` has."""
    found = [tensor for tensor in tensors_in(item) if _has_positions(tensor, positions)]
    chosen = _choose_positions(found)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        whole = not _has_positions(tensor, positions)
        return tensor if whole else tensor.index_select(1, chosen.to(tensor.device))

    return map_tensors(item, change)  # type: ignore[no-any-return]


def made_up_logits(shape: Sequence[int], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return noise in place of logits of this shape, for ``rows`` samples and a few positions."""
    generator = torch.Generator().manual_seed(_SEED)
    size = (rows, min(shape[1], _POSITIONS), *shape[2:])
    return torch.randn(size, generator=generator).to(dtype)


class _PositionLoss:
    """A loss of logits and labels whose dimension 0 counts positions instead of samples."""

    def __init__(self, loss: Loss, tail: Callable[[torch.Tensor], Any], leaves: Sequence[int]) -> None:
        self.function = getattr(loss, "function", loss)
        """The user's function, whose options ``find_weighting`` reads."""
        self._loss = loss
        self._tail = tail
        self._leaves = leaves

    def __call__(self, logits: torch.Tensor, labels: Any) -> torch.Tensor:
        return self._loss(self._tail(logits.transpose(0, 1)), _swap(labels, self._leaves))


def _choose_positions(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a few positions, those with the rarest labels: the most frequent one is often padding."""
    positions = tensors[0].shape[1]
    rarity = torch.zeros(positions, dtype=torch.float64)
    for tensor in tensors:
        if not tensor.is_floating_point() and not tensor.is_complex():
            _, inverse, counts = torch.unique(tensor, return_inverse=True, return_counts=True)
            frequency = counts[inverse].double().transpose(0, 1).flatten(1).mean(1)
            rarity += frequency.cpu()
    return rarity.argsort(stable=True)[:_POSITIONS].sort().values


def _change(value: Any, leaves: Sequence[int], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a nested value with some of its tensors changed; they are numbered as in ``tensors_in``."""
    position = iter(range(len(tensors_in(value))))
    return map_tensors(value, lambda tensor: change(tensor) if next(position) in leaves else tensor)


def _swap(value: Any, leaves: Sequence[int]) -> Any:
    return _change(value, leaves, lambda tensor: tensor.transpose(0, 1))
