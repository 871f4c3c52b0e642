"""Run a stage's graph with a small interpreter; no source code is generated from untrusted files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ravnest.split.casts import cast_keys
from ravnest.split.deferred import Deferral, DeferredGradients, deferrable_keys, deferral_of
from ravnest.split.graph import Argument, Operation, Ref, StageDevice, StageGraph, refs_in
from ravnest.split.lstm_deferral import LstmDeferral, lstm_deferral_of
from ravnest.split.operator_guards import executable
from ravnest.split.recurrent_deferral import RecurrentDeferral, recurrent_deferral_of
from ravnest.split.shared_casts import SharedCast


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    arguments: tuple[int, ...]
    result: int
    no_grad: bool


class _Step(NamedTuple):
    """A call as it runs; a tuple, because it is the fastest to unpack."""

    function: Callable[..., Any]
    take: Callable[[list[Any]], Sequence[Any]]
    """Function that reads the arguments from their slots."""
    result: int
    free: tuple[int, ...]
    """Slots that no later step reads."""


class Program:
    """A graph prepared to run on a device. Values and constant arguments have numbered slots."""

    def __init__(self, graph: StageGraph, device: torch.device) -> None:
        names = [value.name for value in graph.inputs] + [use.name for use in graph.state]
        self._slots = {name: slot for slot, name in enumerate(names)}
        self._device = device
        self._given = len(names) + 1
        self._deferred = len(names)
        """Slot of the weight gradients that are left for later."""
        self._casts = cast_keys(graph)
        self._state_keys = {use.name: use.key for use in graph.state}
        self._keys = self._state_keys | self._casts
        self._deferrable = deferrable_keys(graph)
        users = (operation for operation in graph.operations if operation.name not in self._casts)
        read = (name for operation in users for name in operation.refs())
        self._uses = Counter(self._keys[name] for name in read if name in self._keys)
        self._rest: list[Any] = []
        """Initial contents of the slots after inputs and state."""
        self._calls: list[_Call] = []
        for operation in graph.operations:
            self._add(operation)
        outputs = [self._place(output.value) for output in graph.outputs]
        self._take_outputs = _taker(outputs)
        self._blocks = [
            (no_grad, [step for _, step in block])
            for no_grad, block in groupby(self._steps(outputs), key=lambda pair: pair[0])
        ]

    def __call__(
        self,
        inputs: Sequence[Any],
        state: Sequence[torch.Tensor],
        deferred: DeferredGradients | None = None,
    ) -> tuple[Any, ...]:
        """Return the outputs for these inputs and state tensors, in the order of the graph.

        With ``deferred``, the backward pass leaves gradients of weights there.
        """
        values = [*inputs, *state, deferred, *self._rest]
        for no_grad, steps in self._blocks:
            if no_grad:
                with torch.no_grad():
                    _run(steps, values)
            else:
                _run(steps, values)
        return tuple(self._take_outputs(values))

    def _add(self, operation: Operation) -> None:
        named = [name for name, _ in operation.kwargs]
        values = [*operation.args, *(value for _, value in operation.kwargs)]
        arguments = tuple(self._place(value, operation.no_grad) for value in values)
        function = executable(operation.target, operation.name)
        if operation.name in self._casts:
            function = SharedCast(function)
        if named:
            function = _by_name(function, named)
        elif deferral := self._deferral(operation, function):
            function, arguments = deferral, (self._deferred, *arguments)
        self._slots[operation.name] = self._new_slot()
        self._calls.append(_Call(function, arguments, self._slots[operation.name], operation.no_grad))

    def _deferral(
        self, operation: Operation, function: Callable[..., Any]
    ) -> Deferral | RecurrentDeferral | LstmDeferral | None:
        """Return the call of an operation whose weight gradients can be deferred, else None."""
        found: Deferral | LstmDeferral | None = deferral_of(
            operation, function, self._keys, self._casts, self._deferrable, self._uses
        )
        if found is None:
            found = lstm_deferral_of(operation, function, self._state_keys)
        return found or recurrent_deferral_of(operation, function, self._keys, self._deferrable)

    def _place(self, argument: Argument, no_grad: bool = False) -> int:
        """Return the slot of an argument; a list of values is assembled by a call of its own."""
        if isinstance(argument, Ref):
            return self._slots[argument.name]
        if not isinstance(argument, tuple) or not any(refs_in(argument)):
            return self._new_slot(self._constant(argument))
        items = tuple(self._place(item, no_grad) for item in argument)
        result = self._new_slot()
        self._calls.append(_Call(_listed, items, result, no_grad))
        return result

    def _new_slot(self, value: Any = None) -> int:
        self._rest.append(value)
        return self._given + len(self._rest) - 1

    def _constant(self, argument: Argument) -> Any:
        if isinstance(argument, StageDevice):
            return self._device
        if isinstance(argument, tuple):
            return [self._constant(item) for item in argument]
        return argument

    def _steps(self, outputs: Sequence[int]) -> Iterator[tuple[bool, _Step]]:
        """Yield the calls, each with the slots to free after it; outputs are not freed."""
        last: dict[int, int] = {}
        for position, call in enumerate(self._calls):
            read = [slot for slot in call.arguments if slot in last]
            last.update(dict.fromkeys([*read, call.result], position))
        free: list[list[int]] = [[] for _ in self._calls]
        for slot in last.keys() - set(outputs):
            free[last[slot]].append(slot)
        for call, slots in zip(self._calls, free, strict=True):
            yield call.no_grad, _Step(call.function, _taker(call.arguments), call.result, tuple(slots))


def _run(steps: list[_Step], values: list[Any]) -> None:
    for function, take, result, free in steps:
        values[result] = function(*take(values))
        for slot in free:
            values[slot] = None


def _taker(slots: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    if len(slots) > 1:
        return itemgetter(*slots)
    first = slots[0] if slots else 0
    return itemgetter(slice(first, first + len(slots)))


def _listed(*items: Any) -> list[Any]:
    return list(items)


def _by_name(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return ``function`` with its last arguments passed by name."""
    count = len(names)

    def call(*args: Any) -> Any:
        return function(*args[:-count], **dict(zip(names, args[-count:], strict=True)))

    return call
