"""Weight gradients of recurrent layers that are computed apart from those of inputs and hidden states.

A GRU or RNN layer calls a few operators per step, and autograd has a node for each. The layer is called
with leaves that share the memory of its weights and whose gradients nobody asks for, so that autograd
builds the same graph and calls the same kernels, but does not compute these gradients. The nodes of the
graph that read a weight are looked up, and the backward pass returns the gradients of their outputs. The
gradients of the weights follow from these by autograd's own formulas and in its order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, Node

from ravnest.split.deferred import DeferredGradients, recurrent_weights
from ravnest.split.gradients import product_adds_exactly
from ravnest.split.graph import Operation

_WEIGHTS = 2
"""Position of the list of weights among the arguments; input and hidden states precede it."""
_PRODUCTS = {"AddmmBackward0": (2, 0, "_saved_mat1"), "MmBackward0": (1, None, "_saved_self")}
"""Nodes of products: positions of the transposed weight and of the bias, name of the saved input."""
LEAST_PRODUCT = 300_000
"""Multiplications of a step's product with the hidden state from which on its gradients are deferred. In
smaller steps, looking up the nodes takes a considerable share of the time."""
_MOST_LAYOUTS = 16
"""Shapes of inputs whose graphs are remembered."""
_SUM = "AddBackward0"
_TRANSPOSED = "TBackward0"


class _Group(NamedTuple):
    """Nodes that read the same weight and bias."""

    kind: str
    """Name of the nodes."""
    weight: int | None
    """Number of the weight; None for a sum, which has a bias only."""
    bias: int | None


@dataclass
class _Place:
    """Node of autograd's graph on the way from a layer's outputs to nodes that read weights."""

    slot: tuple[int, int] | None = None
    """Group of a node that reads weights, and position in it in the order of the forward pass."""
    next: dict[int, _Place] = field(default_factory=dict)
    """Places behind it, by position among the node's inputs."""


class _Layout(NamedTuple):
    """Nodes of a layer's graph that read weights."""

    root: _Place
    """Outputs of the layer."""
    groups: tuple[tuple[_Group, int], ...]
    """Groups and the number of their nodes."""

    def nodes(self, outputs: Sequence[torch.Tensor]) -> list[list[Node]]:
        """Return the nodes of each group in the graph of a call."""
        found: list[list[Any]] = [[None] * size for _, size in self.groups]
        for position, place in self.root.next.items():
            _follow(place, outputs[position].grad_fn, found)
        return found


def _follow(place: _Place, node: Node | None, found: list[list[Any]]) -> None:
    """Take the node at ``place`` and those behind it."""
    assert node is not None
    if place.slot is not None:
        group, position = place.slot
        found[group][position] = node
    if place.next:
        behind = node.next_functions
        for at, each in place.next.items():
            _follow(each, behind[at][0], found)


class RecurrentSteps:
    """Steps of a layer that use the same weight and bias, in the order of the forward pass."""

    def __init__(
        self,
        group: _Group,
        nodes: Sequence[Node],
        names: Sequence[str],
        leaves: Sequence[torch.Tensor],
    ) -> None:
        """``names`` and ``leaves`` are the keys of the layer's weights and the leaves in their place."""
        kind, weight, bias = group
        assert all(node.name() == kind for node in nodes), f"nodes of another kind than {kind}"
        self.keys = [None if number is None else names[number] for number in (weight, bias)]
        """Keys of weight and bias."""
        self.dtype: torch.dtype | None = None
        """Gradients have the type of the weights."""
        self.several = len(nodes) > 1
        """True if its gradients are sums of several products."""
        self.edges = [GradientEdge(node, 0) for node in nodes]
        """Places in autograd's graph whose gradients are needed."""
        self._bias_shape = torch.Size() if bias is None else leaves[bias].shape
        saved = None if weight is None else _PRODUCTS[kind][2]
        self._inputs = [getattr(node, saved).detach() for node in nodes] if saved else []
        self._versions = [x._version for x in self._inputs]

    def unchanged(self) -> bool:
        """Return whether the inputs of the steps are what they were."""
        return self._versions == [x._version for x in self._inputs]

    def gradients(
        self,
        saved: Sequence[torch.Tensor | None],
        totals: Mapping[str, torch.Tensor],
        *,
        in_place: bool,
    ) -> list[tuple[str, torch.Tensor]]:
        """Add up the gradients of the steps, the last first, also to ``totals``; return new sums."""
        weight, bias = self.keys
        found: list[tuple[str, torch.Tensor]] = []
        if weight is not None:
            total = self._of_weight(saved, totals.get(weight), in_place)
            found += [(weight, total)] if weight not in totals else []
        if bias is not None:
            total = self._of_bias(saved, totals.get(bias))
            found += [(bias, total)] if bias not in totals else []
        return found

    def _of_weight(
        self, saved: Sequence[torch.Tensor | None], total: torch.Tensor | None, in_place: bool
    ) -> torch.Tensor:
        exact: bool | None = None if in_place else False
        for gradient, x in zip(reversed(saved), reversed(self._inputs), strict=True):
            if gradient is None:
                continue
            left = gradient.t()
            if total is None:
                total = left.mm(x)
                continue
            if exact is None:
                exact = product_adds_exactly(total, left, x)
            if exact and gradient.is_contiguous() and x.is_contiguous():
                total.addmm_(left, x)
            else:
                total.add_(left.mm(x))
        assert total is not None
        return total

    def _of_bias(self, saved: Sequence[torch.Tensor | None], total: torch.Tensor | None) -> torch.Tensor:
        for gradient in reversed(saved):
            if gradient is not None:
                each = gradient.sum_to_size(self._bias_shape)
                total = each if total is None else total.add_(each)
        assert total is not None
        return total


class RecurrentDeferral:
    """One call of a recurrent layer whose weight gradients can be deferred."""

    def __init__(self, function: Callable[..., Any], keys: Sequence[str]) -> None:
        self._function = function
        self._keys = keys
        self._layouts: dict[Any, _Layout | None] = {}
        """Graph of the layer by kind of input; None if it is that of another kernel."""

    def __call__(self, deferred: DeferredGradients | None, *arguments: Any) -> Any:
        """Call the layer; with ``deferred``, its weight gradients go there."""
        inputs, weights = _inputs(arguments), arguments[_WEIGHTS]
        trained = torch.is_grad_enabled() and all(weight.requires_grad for weight in weights)
        product = weights[1].numel() * inputs[1].shape[-2]
        if deferred is None or deferred.sums_only or not trained or product < LEAST_PRODUCT:
            return self._function(*arguments)
        kind = tuple((t.shape, t.stride(), t.requires_grad) for t in inputs)
        if kind in self._layouts and self._layouts[kind] is None:
            return self._function(*arguments)
        own = inputs
        if not deferred.captures:  # a graph of its own, which a custom function joins to the others
            own = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        leaves = [weight.detach().requires_grad_() for weight in weights]
        states = own[1] if isinstance(arguments[1], torch.Tensor) else own[1:]
        outputs = self._function(own[0], states, leaves, *arguments[_WEIGHTS + 1 :])
        if kind not in self._layouts:
            if len(self._layouts) == _MOST_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[kind] = _search(outputs, leaves)
        layout = self._layouts[kind]
        if layout is None:
            return self._function(*arguments)
        groups = zip(layout.groups, layout.nodes(outputs), strict=True)
        steps = [RecurrentSteps(group, nodes, self._keys, leaves) for (group, _), nodes in groups]
        if deferred.captures:
            for each in steps:
                deferred.capture_steps(each)
            return outputs
        recorded = _Recorded(own, outputs, [(deferred.number(), each) for each in steps])
        return _RecurrentCall.apply(deferred, recorded, *inputs, *weights)  # type: ignore[no-untyped-call]


def recurrent_deferral_of(
    operation: Operation, function: Callable[..., Any], keys: dict[str, str], deferrable: frozenset[str]
) -> RecurrentDeferral | None:
    """Return the call of a recurrent layer as one that can be deferred, or ``None``.

    ``keys`` maps the names of the graph's state to their keys; ``deferrable`` is of ``deferrable_keys``.
    """
    names = recurrent_weights(operation)
    own = [keys[name] for name in names if keys.get(name) in deferrable]
    return RecurrentDeferral(function, own) if names and len(own) == len(names) else None


def _inputs(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return input and hidden states."""
    x, states = arguments[:_WEIGHTS]
    return [x, states] if isinstance(states, torch.Tensor) else [x, *states]


def _search(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> _Layout | None:
    """Find all nodes that read a leaf; return None if one of them is of an unknown kind."""
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    found: list[tuple[int, tuple[int, ...], _Group]] = []
    queue: deque[tuple[Node, tuple[int, ...]]] = deque(
        (output.grad_fn, (position,)) for position, output in enumerate(outputs) if output.grad_fn
    )
    seen = {node for node, _ in queue}
    while queue:
        node, path = queue.popleft()
        behind = [following for following, _ in node.next_functions]
        read = {at: number for at, each in enumerate(behind) if (number := _leaf(each, numbers)) >= 0}
        if read:
            group = _group(node.name(), read)
            if group is None:
                return None
            found.append((node._sequence_nr(), path, group))
        for at, each in enumerate(behind):
            if each is not None and at not in read and each not in seen:
                seen.add(each)
                queue.append((each, (*path, at)))
    root, sizes = _Place(), dict.fromkeys(sorted({group for _, _, group in found}, key=str), 0)
    order = list(sizes)
    for _, path, group in sorted(found, key=lambda entry: entry[0]):
        place = root
        for at in path:
            place = place.next.setdefault(at, _Place())
        place.slot = order.index(group), sizes[group]
        sizes[group] += 1
    return _Layout(root, tuple(sizes.items()))


def _leaf(node: Node | None, numbers: Mapping[int, int]) -> int:
    """Return the number of the leaf that a node stands for, directly or transposed; -1 for others."""
    if node is not None and node.name() == _TRANSPOSED:
        node = node.next_functions[0][0]
    return numbers.get(id(getattr(node, "variable", None)), -1)


def _group(kind: str, read: Mapping[int, int]) -> _Group | None:
    """Return the group of a node that reads leaves at these positions; None for an unknown kind."""
    if kind in _PRODUCTS:
        weight, bias, _ = _PRODUCTS[kind]
        if weight in read and set(read) <= {weight, bias}:
            return _Group(kind, read[weight], None if bias is None else read.get(bias))
    if kind == _SUM and len(read) == 1:
        return _Group(kind, None, next(iter(read.values())))
    return None


@dataclass
class _Recorded:
    """Forward pass of a layer in an autograd graph of its own."""

    inputs: Sequence[torch.Tensor]
    """Input and hidden states."""
    outputs: Sequence[torch.Tensor]
    steps: Sequence[tuple[int, RecurrentSteps]]
    """Steps with their positions in the forward pass of the stage."""


class _RecurrentCall(torch.autograd.Function):
    """A recurrent layer whose backward pass computes the gradients of its input and hidden states only.

    Slower than ``DeferredGradients.capture_steps``, for stages whose other gradients take much memory.
    """

    @staticmethod
    def forward(
        ctx: Any, deferred: DeferredGradients, recorded: _Recorded, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.deferred, ctx.recorded, ctx.count = deferred, recorded, len(tensors)
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in recorded.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        recorded: _Recorded = ctx.recorded
        ctx.recorded = None
        pairs = zip(recorded.outputs, gradients, strict=True)
        ends = [(output, gradient) for output, gradient in pairs if gradient is not None]
        leaves: list[Any] = [value for value in recorded.inputs if value.requires_grad]
        edges = [edge for _, steps in recorded.steps for edge in steps.edges]
        outputs, given = zip(*ends, strict=True)
        found = iter(torch.autograd.grad(outputs, [*leaves, *edges], given, allow_unused=True))
        of_inputs = [next(found) if value.requires_grad else None for value in recorded.inputs]
        for number, steps in recorded.steps:
            ctx.deferred.add_steps(number, steps, [next(found) for _ in steps.edges])
        return None, None, *of_inputs, *[None] * (ctx.count - len(of_inputs))
