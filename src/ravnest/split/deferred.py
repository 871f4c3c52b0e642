"""Weight gradients that are computed apart from the gradients of a stage's inputs.

A stage sends the gradients of its inputs on as soon as they exist. The gradients of its weights are
needed only by its own update, so that they can fill time in which the stage would wait (zero-bubble
pipeline schedules). Autograd computes both in one pass. For the operators below, a function of our own
computes the gradient of the input in that pass and remembers how to compute those of the weights; the
kernels are the ones that autograd calls, so that the results are the same to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from ravnest.split.graph import Operation, Ref, StageGraph

WeightGradients = Callable[[], tuple[torch.Tensor | None, torch.Tensor | None]]
"""Computes the gradients of an operator's weight and bias."""


class DeferredGradients:
    """Weight gradients of one micro-batch that are still to be computed."""

    def __init__(self) -> None:
        self._pending: list[tuple[tuple[str | None, str | None], WeightGradients]] = []

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, keys: tuple[str | None, str | None], compute: WeightGradients) -> None:
        """Remember how to compute the gradients of the weight and bias with these keys."""
        self._pending.append((keys, compute))

    def compute(self, take: Callable[[str, torch.Tensor], None]) -> None:
        """Pass each gradient with its key to ``take``, and release what it was computed from.

        One gradient exists at a time, so that ``take`` can add it to the others of the update. A weight
        that several operators use gets the sum, formed in autograd's order.
        """
        pending, self._pending = self._pending, []
        uses = Counter(key for keys, _ in pending for key in keys)
        sums: dict[str, torch.Tensor] = {}
        pending.reverse()
        while pending:
            keys, compute = pending.pop()
            with torch.no_grad():
                found = list(compute())
            del compute
            for key in keys:
                gradient = found.pop(0)
                if key is None or gradient is None:
                    continue
                uses[key] -= 1
                if key in sums:
                    gradient = sums.pop(key) + gradient
                if uses[key]:
                    sums[key] = gradient
                else:
                    take(key, gradient)
                del gradient


@dataclass(frozen=True)
class _Rule:
    """Positions of an operator's input, weight and bias, and its two formulas."""

    input: int
    weight: int
    bias: int
    dimensions: Collection[int] | None
    """Dimensions of the input for which the formulas hold; ``None`` for two or more."""
    input_gradient: Callable[[_Saved], torch.Tensor]
    weight_gradients: Callable[[_Saved, bool], tuple[torch.Tensor, torch.Tensor | None]]
    """Gradients of the weight and, if the flag is set, of the bias."""

    def fits(self, arguments: Sequence[Any]) -> bool:
        """Return whether the operator's arguments are of the kind that the formulas cover."""
        x, weight = arguments[self.input], arguments[self.weight]
        if not (weight.requires_grad and torch.is_grad_enabled() and x.dtype == weight.dtype):
            return False
        return x.dim() >= 2 if self.dimensions is None else x.dim() in self.dimensions


@dataclass(frozen=True)
class _Saved:
    """Values that the formulas read."""

    gradient: torch.Tensor
    """Gradient of the operator's output."""
    x: torch.Tensor
    weight: torch.Tensor
    arguments: tuple[Any, ...]
    """All arguments of the operator, without its tensors."""


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _linear_input(saved: _Saved) -> torch.Tensor:
    return _rows(saved.gradient).mm(saved.weight).view(saved.x.shape)


def _linear_weights(saved: _Saved, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    gradient = _rows(saved.gradient)
    return gradient.t().mm(_rows(saved.x)), gradient.sum(0) if bias else None


def _addmm_input(saved: _Saved) -> torch.Tensor:
    return saved.gradient.mm(saved.weight.t())


def _addmm_weights(saved: _Saved, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    return saved.x.t().mm(saved.gradient), saved.gradient.sum(0) if bias else None


def _convolution(dimensions: int) -> _Rule:
    """Return the rule of a convolution over this number of dimensions."""

    def backward(saved: _Saved, mask: list[bool]) -> tuple[Any, ...]:
        given = [*saved.arguments[3:], *_CONVOLUTION_DEFAULTS[max(len(saved.arguments) - 3, 0) :]]
        stride, padding, dilation = (_each(value, dimensions) for value in given[:3])
        found: tuple[Any, ...] = torch.ops.aten.convolution_backward(
            saved.gradient,
            saved.x,
            saved.weight,
            [saved.weight.shape[0]],
            stride,
            padding,
            dilation,
            False,  # transposed
            [0] * dimensions,  # output padding
            given[3],
            mask,
        )
        return found

    def of_input(saved: _Saved) -> torch.Tensor:
        result: torch.Tensor = backward(saved, [True, False, False])[0]
        return result

    def of_weights(saved: _Saved, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        return backward(saved, [False, True, bias])[1:]

    return _Rule(0, 1, 2, (dimensions + 2,), of_input, of_weights)


_CONVOLUTION_DEFAULTS = (1, 0, 1, 1)
"""Stride, padding, dilation and groups."""


def _each(value: Any, dimensions: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * dimensions if len(values) == 1 else values


_RULES = {
    "aten::linear.default": _Rule(0, 1, 2, None, _linear_input, _linear_weights),
    "aten::addmm.default": _Rule(1, 2, 0, (2,), _addmm_input, _addmm_weights),
    "aten::conv1d.default": _convolution(1),
    "aten::conv2d.default": _convolution(2),
    "aten::conv3d.default": _convolution(3),
}


class Deferral:
    """One call of a graph whose weight gradients can be deferred."""

    def __init__(
        self, function: Callable[..., Any], rule: _Rule, keys: tuple[str | None, str | None]
    ) -> None:
        self._function = function
        self._rule = rule
        self._keys = keys

    def __call__(self, deferred: DeferredGradients | None, *arguments: Any) -> torch.Tensor:
        """Call the operator; with ``deferred``, its weight gradients go there."""
        rule = self._rule
        if deferred is None or not rule.fits(arguments):
            result: torch.Tensor = self._function(*arguments)
            return result
        x, weight = arguments[rule.input], arguments[rule.weight]
        bias = arguments[rule.bias] if rule.bias < len(arguments) else None
        output: torch.Tensor = _DeferredCall.apply(  # type: ignore[no-untyped-call]
            self, deferred, arguments, x, weight, bias
        )
        return output

    def run(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        """Call the operator as it is."""
        result: torch.Tensor = self._function(*arguments)
        return result

    def of_input(self, saved: _Saved) -> torch.Tensor:
        """Compute the gradient of the input."""
        return self._rule.input_gradient(saved)

    def defer(self, deferred: DeferredGradients, saved: _Saved) -> None:
        """Leave the gradients of weight and bias for later."""
        bias = self._keys[1] is not None
        deferred.add(self._keys, lambda: self._rule.weight_gradients(saved, bias))


class _DeferredCall(torch.autograd.Function):
    """An operator whose backward pass computes the gradient of its input only."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Deferral,
        deferred: DeferredGradients,
        arguments: tuple[Any, ...],
        x: torch.Tensor,
        weight: torch.Tensor,
        _bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.call, ctx.deferred = call, deferred
        # Tensors are kept by autograd only, which notices when one is changed in place.
        ctx.arguments = tuple(None if isinstance(a, torch.Tensor) else a for a in arguments)
        ctx.save_for_backward(x, weight)
        return call.run(arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        saved = _Saved(gradient, x, weight, ctx.arguments)
        of_input = ctx.call.of_input(saved) if ctx.needs_input_grad[3] else None
        ctx.call.defer(ctx.deferred, saved)
        return None, None, None, of_input, None, None


def deferrable_keys(graph: StageGraph) -> frozenset[str]:
    """Return the keys of the weights whose every use in the graph can be deferred."""
    keys = {use.name: use.key for use in graph.state}
    calls = [{keys.get(name) for name in _weight_names(o)} for o in graph.operations]
    others = [
        {keys[name] for name in operation.refs() if name in keys} - weights
        for operation, weights in zip(graph.operations, calls, strict=True)
    ]
    excluded: set[str | None] = {None}.union(*others)
    excluded |= {
        keys.get(output.value.name) for output in graph.outputs if isinstance(output.value, Ref)
    }
    # An operator is deferred as a whole, so that a weight that cannot be takes its bias with it.
    while found := {key for call in calls if call & excluded for key in call - excluded}:
        excluded |= found
    return frozenset(key for call in calls for key in call - excluded if key is not None)


def deferral_of(
    operation: Operation, function: Callable[..., Any], keys: dict[str, str], deferrable: frozenset[str]
) -> Deferral | None:
    """Return the call of an operation as one that can be deferred, or ``None`` if it cannot.

    ``keys`` maps the names of the graph's state to their keys; ``deferrable`` is of ``deferrable_keys``.
    """
    weights = _weight_names(operation)
    if not weights or any(keys.get(name) not in deferrable for name in weights):
        return None
    rule = _RULES[operation.target]
    bias = _argument(operation, rule.bias)
    bias_key = keys.get(bias.name) if isinstance(bias, Ref) else None
    weight = _argument(operation, rule.weight)
    assert isinstance(weight, Ref)
    return Deferral(function, rule, (keys[weight.name], bias_key))


def deferrable_input(node: fx.Node, trained: Collection[str]) -> fx.Node | None:
    """Return the input of a traced operation whose weight gradients can be deferred, else ``None``.

    ``trained`` are the names of the placeholders of trained weights.
    """
    target: Any = node.target
    name = f"{target._schema.name}.{target._overloadname}" if hasattr(target, "_schema") else ""
    rule = _RULES.get(name)
    if rule is None or node.kwargs:
        return None
    x, weight = node.args[rule.input], node.args[rule.weight]
    found = isinstance(x, fx.Node) and isinstance(weight, fx.Node) and weight.name in trained
    return x if found else None  # type: ignore[return-value]


def _weight_names(operation: Operation) -> tuple[str, ...]:
    """Return the names of an operation's weight and bias, if a rule covers the operation."""
    rule = _RULES.get(operation.target)
    if rule is None or operation.kwargs or operation.no_grad:
        return ()
    weight, bias = _argument(operation, rule.weight), _argument(operation, rule.bias)
    x = _argument(operation, rule.input)
    if not isinstance(weight, Ref) or not isinstance(x, Ref):
        return ()
    names = [weight.name, *([bias.name] if isinstance(bias, Ref) else [])]
    return () if x.name in names else tuple(names)


def _argument(operation: Operation, position: int) -> Any:
    return operation.args[position] if position < len(operation.args) else None
