"""Weight gradients that are computed apart from the gradients of a stage's inputs.

A stage sends the gradients of its inputs on as soon as they exist. The gradients of its weights are
needed only by its own update, so that they can fill time in which the stage would wait (zero-bubble
pipeline schedules). Autograd computes both in one pass. The operators below are called with weights that
need no gradient instead, so that autograd computes the gradient of the input alone. The backward pass
asks it for the gradient of the output too, from which those of the weights follow. The kernels are the
ones that autograd calls, so that the results are the same to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge

from ravnest.split.casts import cast_keys
from ravnest.split.deferral_rules import RULES, DeferralRule, SavedCall
from ravnest.split.gradients import add_product, saves_product
from ravnest.split.graph import Operation, Ref, StageGraph, refs_in
from ravnest.split.recurrent import DEFERRED_COPIES, DEFERRED_TARGETS

Take = Callable[[str, torch.Tensor], None]
"""Function that adds the gradient of the weight with a key."""
_NONE: Mapping[str, torch.Tensor] = {}


class WeightUse(Protocol):
    """Use of weights in a forward pass whose gradients are computed later."""

    @property
    def keys(self) -> Sequence[str | None]:
        """Keys of the weights, the one with the largest gradient first; None for one that is absent."""

    @property
    def several(self) -> bool:
        """True if its gradients are sums of several products."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of the weights, if their gradients are computed in another one."""

    def gradients(
        self, saved: Any, totals: Mapping[str, torch.Tensor], *, in_place: bool
    ) -> list[tuple[str, torch.Tensor]]:
        """Compute the gradients with their keys, except those that are added to ``totals``.

        ``in_place``: products may be added in place where a trial shows that their bits do not change.
        """


class WeightSteps(WeightUse, Protocol):
    """Use of weights in several steps, each with a gradient of its own."""

    edges: list[GradientEdge]
    """Places in autograd's graph whose gradients are needed."""

    def unchanged(self) -> bool:
        """Return whether the inputs of the steps are what they were."""


class DeferredGradients:
    """Weight gradients of one micro-batch that are still to be computed."""

    def __init__(self, *, captures: bool = False, sums_only: bool = False, costly: bool = False) -> None:
        """``captures``: the backward pass calls ``take`` with the gradients of ``edges``.

        ``sums_only``: gradients are deferred only if they are products that are better added to ``sums``
        in ``compute``; autograd computes the others. ``costly``: gradients whose deferral takes
        additional time, and may round in another way, are deferred too.
        """
        self.captures = captures
        self.sums_only = sums_only
        self.costly = costly
        self._calls: list[CapturedCall] = []
        self._steps: list[tuple[int, WeightSteps]] = []
        self._pending: list[tuple[int, WeightUse, Any]] = []
        self._left: set[str | None] = set()
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._pending)

    def number(self) -> int:
        """Return the position of a new call in the forward pass."""
        self._count += 1
        return self._count

    def capture(self, call: CapturedCall) -> None:
        """Remember a call whose gradients need that of its output."""
        self._calls.append(call)

    def capture_steps(self, steps: WeightSteps) -> None:
        """Remember steps whose gradients need those of their outputs."""
        self._steps.append((self.number(), steps))

    def add(self, number: int, call: WeightUse, saved: SavedCall) -> None:
        """Remember a call whose gradients can be computed."""
        self._pending.append((number, call, saved))

    def leave(self, call: WeightUse) -> None:
        """Remember a call that needs a backward pass to its weights."""
        self._left.update(call.keys)

    @property
    def captured(self) -> set[str | None]:
        """Keys of weights that no backward pass needs to reach: ``edges`` suffice."""
        return {key for each in self._calls for key in each.call.keys} - self._left

    def add_steps(
        self, number: int, steps: WeightSteps, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Remember steps whose gradients can be computed from those of ``steps.edges``."""
        steps.edges = []
        if any(gradient is not None for gradient in gradients):
            if not steps.unchanged():
                raise RuntimeError(_CHANGED)
            self._pending.append((number, steps, gradients))

    @property
    def edges(self) -> list[GradientEdge]:
        """Places in autograd's graph whose gradients ``take`` needs."""
        found = [captured.edge for captured in self._calls]
        for _, steps in self._steps:
            found += steps.edges
        return found

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of ``edges``; None for those that nothing depends on."""
        calls, self._calls = self._calls, []
        for each, gradient in zip(calls, gradients, strict=False):
            number, call, _, x, version, weight, arguments = each
            if gradient is not None:
                if x._version != version:
                    raise RuntimeError(_CHANGED)
                self._pending.append((number, call, SavedCall(gradient, x, weight, arguments)))
        groups, self._steps = self._steps, []
        begin = len(calls)
        for number, steps in groups:
            end = begin + len(steps.edges)
            self.add_steps(number, steps, gradients[begin:end])
            begin = end

    def compute(
        self,
        take: Take,
        sums: Mapping[str, torch.Tensor] | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Pass each gradient with its key to ``take``, and release what it was computed from.

        Return ``False`` if ``interrupted`` ends this between two operators; the next call continues.

        One gradient exists at a time, so that ``take`` can add it to the others of the update. A weight
        that several operators use gets the sum, formed in autograd's order: the last call comes first.
        With ``sums``, gradients of the keys in it are added there in place and not passed. Products are
        added without a tensor of their own where that does not change their bits: to ``sums``, or to the
        sum of a weight with several uses.
        """
        pending = self._pending
        pending.sort(key=itemgetter(0))
        uses: dict[str | None, int] = {}
        for _, call, _ in pending:
            for name in call.keys:
                uses[name] = uses.get(name, 0) + 1
        repeated = {name for name, count in uses.items() if count > 1}
        partial: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            while pending:
                _, call, saved = pending.pop()
                apart = call.several or call.keys[0] in repeated
                totals = partial if apart else sums or _NONE
                for key, gradient in call.gradients(saved, totals, in_place=sums is not None):
                    if key in repeated:
                        partial[key] = partial[key].add_(gradient) if key in partial else gradient
                    else:
                        _add(key, _cast(gradient, call.dtype), take, sums)
                for name in call.keys if repeated else ():
                    uses[name] -= 1
                    if name is not None and name in partial and not uses[name]:
                        _add(name, _cast(partial.pop(name), call.dtype), take, sums)
                if pending and not partial and interrupted():
                    return False
        return True


def _cast(gradient: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return gradient if dtype is None else gradient.to(dtype)


def _add(key: str, gradient: torch.Tensor, take: Take, sums: Mapping[str, torch.Tensor] | None) -> None:
    """Add a gradient in place to that in ``sums``, if there is one; else pass it to ``take``."""
    if sums is not None and key in sums:
        sums[key].add_(gradient)
    else:
        take(key, gradient)


_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "the input of a layer was changed after the layer had used it"
)


class CapturedCall(NamedTuple):
    """Call of an operator whose output's gradient the backward pass returns."""

    number: int
    call: WeightUse
    edge: GradientEdge
    """Place of the output in autograd's graph."""
    x: torch.Tensor
    version: int
    """Number of changes of the input until the call."""
    weight: torch.Tensor
    arguments: tuple[Any, ...]


class Deferral:
    """One call of a graph whose weight gradients can be deferred."""

    def __init__(
        self,
        function: Callable[..., Any],
        rule: DeferralRule,
        keys: tuple[str, str | None],
        *,
        alone: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``alone``: no other operation of the graph uses the weight or the bias.

        ``dtype`` is the type of weight and bias, if the operator gets casts of them.
        """
        self._function = function
        self._alone = alone
        self._rule = rule
        self.keys = keys
        """Keys of the weight and the bias."""
        self.dtype = dtype
        self.several = False
        """True if its gradients are sums of several products."""

    def __call__(self, deferred: DeferredGradients | None, *arguments: Any) -> torch.Tensor:
        """Call the operator; with ``deferred``, its weight gradients go there."""
        rule = self._rule
        x, weight = arguments[rule.input], arguments[rule.weight]
        if deferred is None:
            return self.run(arguments)
        if not rule.fits(x, weight) or (deferred.sums_only and not self._saves(x, weight)):
            deferred.leave(self)
            return self.run(arguments)
        if deferred.captures and x.requires_grad and (rule.any_layout or _in_order(x)):
            return self._captured(deferred, arguments, x, weight.detach())
        deferred.leave(self)
        bias = arguments[rule.bias] if rule.bias < len(arguments) else None
        output: torch.Tensor = _DeferredCall.apply(  # type: ignore[no-untyped-call]
            self, deferred, arguments, x, weight, bias
        )
        return output

    def _captured(
        self,
        deferred: DeferredGradients,
        arguments: tuple[Any, ...],
        x: torch.Tensor,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        """Call the operator with weights that need no gradient."""
        rule = self._rule
        plain = list(arguments)
        plain[rule.weight] = weight
        if rule.bias < len(plain) and plain[rule.bias] is not None:
            plain[rule.bias] = plain[rule.bias].detach()
        output: torch.Tensor = self._function(*plain)
        node, version = output.grad_fn, x._version
        assert node is not None, "an output has a gradient if the input has one"
        edge = GradientEdge(node, output.output_nr)
        others = () if rule.factors is not None else _without_tensors(arguments)
        deferred.capture(
            CapturedCall(deferred.number(), self, edge, x.detach(), version, weight, others)
        )
        return output

    def _saves(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether it saves time, and changes no order of sums, to add the gradient in place."""
        terms = x.numel() // (x.shape[-1] or 1)
        alone = self._alone and self.dtype is None and self._rule.factors is not None
        return alone and saves_product(terms, weight)

    def run(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        """Call the operator as it is."""
        result: torch.Tensor = self._function(*arguments)
        return result

    def of_input(self, saved: SavedCall) -> torch.Tensor:
        """Compute the gradient of the input."""
        return self._rule.input_gradient(saved)

    def gradients(
        self, saved: SavedCall, totals: Mapping[str, torch.Tensor], *, in_place: bool
    ) -> list[tuple[str, torch.Tensor]]:
        """Compute the gradients of weight and bias, except one that is added to ``totals``."""
        rule, (weight, bias) = self._rule, self.keys
        if rule.factors is None:
            assert rule.weight_gradients is not None
            of_weight, of_bias = rule.weight_gradients(saved, bias is not None)
        else:
            left, right, rows = rule.factors(saved)
            of_bias = None if bias is None else rows.sum(0)
            if in_place and weight in totals and add_product(totals[weight], left, right):
                return [] if bias is None or of_bias is None else [(bias, of_bias)]
            of_weight = left.mm(right)
        found = [(weight, of_weight)]
        return found if bias is None or of_bias is None else [*found, (bias, of_bias)]


def _in_order(x: torch.Tensor) -> bool:
    """Return whether the tensor has the strides of a new one, also in dimensions of size 1.

    ``is_contiguous`` ignores those; ``aten::matmul``, which some linear layers call, does not.
    """
    if min(x.shape) > 1:
        return x.is_contiguous()
    expected = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


def _without_tensors(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if isinstance(a, torch.Tensor) else a for a in arguments)


class _DeferredCall(torch.autograd.Function):
    """An operator whose backward pass computes the gradient of its input only, if that needs one.

    Slower than ``DeferredGradients.capture``. It is for inputs that need no gradient, whose outputs only
    the weights connect with autograd's graph, and for layouts of which autograd takes another kernel if
    the weights need no gradient.
    """

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
        ctx.call, ctx.deferred, ctx.number = call, deferred, deferred.number()
        # Tensors are kept by autograd only, which notices when one is changed in place.
        ctx.arguments = _without_tensors(arguments)
        ctx.save_for_backward(x, weight)
        return call.run(arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        saved = SavedCall(gradient, x, weight, ctx.arguments)
        of_input = ctx.call.of_input(saved) if ctx.needs_input_grad[3] else None
        ctx.deferred.add(ctx.number, ctx.call, saved)
        return None, None, None, of_input, None, None


def deferrable_keys(graph: StageGraph) -> frozenset[str]:
    """Return the keys of the weights whose every use in the graph can be deferred."""
    casts = cast_keys(graph)
    keys = {use.name: use.key for use in graph.state} | casts
    calls = [{keys.get(name) for name in _weight_names(o)} for o in graph.operations]
    others = [
        {keys[name] for name in operation.refs() if name in keys} - weights
        for operation, weights in zip(graph.operations, calls, strict=True)
        if operation.name not in casts
    ]
    excluded: set[str | None] = {None}.union(*others)
    excluded |= _used_in_two_types(graph, casts)
    excluded |= {
        keys.get(output.value.name) for output in graph.outputs if isinstance(output.value, Ref)
    }
    # An operator is deferred as a whole, so that a weight that cannot be takes its bias with it.
    while found := {key for call in calls if call & excluded for key in call - excluded}:
        excluded |= found
    return frozenset(key for call in calls for key in call - excluded if key is not None)


def _used_in_two_types(graph: StageGraph, casts: Mapping[str, str]) -> set[str]:
    """Return the keys that operations read both as they are and cast, or in several casts."""
    names = Counter(casts.values())
    read = {name for o in graph.operations if o.name not in casts for name in o.refs()}
    direct = {use.key for use in graph.state if use.name in read}
    return {key for key, count in names.items() if count > 1 or key in direct}


def deferral_of(
    operation: Operation,
    function: Callable[..., Any],
    keys: Mapping[str, str],
    casts: Collection[str],
    deferrable: frozenset[str],
    uses: Mapping[str, int],
) -> Deferral | None:
    """Return the call of an operation as one that can be deferred, or ``None`` if it cannot.

    ``keys`` maps the names of the graph's state and of its ``casts`` to their keys; ``deferrable`` is of
    ``deferrable_keys``. ``uses`` counts the operations that use each key.
    """
    weights, rule = _weight_names(operation), RULES.get(operation.target)
    if rule is None or not weights or any(keys.get(name) not in deferrable for name in weights):
        return None
    if len({name in casts for name in weights}) > 1:
        return None
    bias = _argument(operation, rule.bias)
    bias_key = keys.get(bias.name) if isinstance(bias, Ref) else None
    weight = _argument(operation, rule.weight)
    assert isinstance(weight, Ref)
    alone = all(uses[keys[name]] == 1 for name in weights)
    dtype = torch.float32 if weight.name in casts else None
    return Deferral(function, rule, (keys[weight.name], bias_key), alone=alone, dtype=dtype)


def deferrable_input(node: fx.Node, trained: Collection[str]) -> fx.Node | None:
    """Return the input of a traced operation whose weight gradients can be deferred, else ``None``.

    ``trained`` are the names of the placeholders of trained weights.
    """
    target: Any = node.target
    if target in DEFERRED_COPIES:
        weights = node.args[2]
        alone = node.args[4] == 1 and {str(weight) for weight in weights} <= set(trained)  # type: ignore[union-attr]
        return node.args[0] if alone else None  # type: ignore[return-value]
    name = f"{target._schema.name}.{target._overloadname}" if hasattr(target, "_schema") else ""
    rule = RULES.get(name)
    if rule is None or node.kwargs:
        return None
    x, weight = node.args[rule.input], node.args[rule.weight]
    found = isinstance(x, fx.Node) and isinstance(weight, fx.Node) and weight.name in trained
    return x if found else None  # type: ignore[return-value]


def _weight_names(operation: Operation) -> tuple[str, ...]:
    """Return the names of an operation's weights, if their gradients can be deferred."""
    if operation.target in DEFERRED_TARGETS:
        return recurrent_weights(operation)
    rule = RULES.get(operation.target)
    if rule is None or operation.kwargs or operation.no_grad:
        return ()
    weight, bias = _argument(operation, rule.weight), _argument(operation, rule.bias)
    x = _argument(operation, rule.input)
    if not isinstance(weight, Ref) or not isinstance(x, Ref):
        return ()
    names = [weight.name, *([bias.name] if isinstance(bias, Ref) else [])]
    return () if x.name in names else tuple(names)


def recurrent_weights(operation: Operation) -> tuple[str, ...]:
    """Return the names of a recurrent layer's weights; none if they cannot be deferred.

    Several layers in one operation may draw random numbers between them.
    """
    if operation.target not in DEFERRED_TARGETS:
        return ()
    if operation.no_grad or operation.kwargs or _argument(operation, 4) != 1:
        return ()
    x, states, weights = operation.args[:3]
    if not isinstance(weights, tuple):
        return ()
    names = tuple(weight.name for weight in weights if isinstance(weight, Ref))
    inputs = set(refs_in((x, states)))
    return () if not 2 <= len(names) == len(weights) or inputs & set(names) else names


def _argument(operation: Operation, position: int) -> Any:
    return operation.args[position] if position < len(operation.args) else None
