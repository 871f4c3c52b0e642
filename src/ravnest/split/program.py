"""Run a stage's graph: a small interpreter, so that no source code is made from a stranger's file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from ravnest.split.graph import Argument, Operation, Ref, StageDevice, StageGraph
from ravnest.split.operators import resolve

_Fill = Callable[[list[Any]], Any]
"""Builds one argument from the values computed so far."""


@dataclass(frozen=True)
class _Step:
    function: Callable[..., Any]
    args: list[Any]
    """Constant arguments in place; the places named in ``direct`` and ``nested`` are filled in."""
    direct: tuple[tuple[int, int], ...]
    nested: tuple[tuple[int, _Fill], ...]
    kwargs: dict[str, Any]
    nested_kwargs: tuple[tuple[str, _Fill], ...]
    result: int
    free: tuple[int, ...]
    """Values that nothing after this step reads."""


class Program:
    """A graph made ready to run on a device. Values live in numbered slots."""

    def __init__(self, graph: StageGraph, device: torch.device) -> None:
        names = [value.name for value in graph.inputs] + [use.name for use in graph.state]
        self._slots = {name: slot for slot, name in enumerate(names)}
        for operation in graph.operations:
            self._slots[operation.name] = len(self._slots)
        self._device = device
        self._outputs = [self._fill(output.value) for output in graph.outputs]
        free = self._last_uses(graph, keep=len(names))
        self._blocks = [
            (no_grad, [self._step(operation, free.get(operation.name, ())) for operation in block])
            for no_grad, block in groupby(graph.operations, key=lambda op: op.no_grad)
        ]

    def __call__(self, inputs: Sequence[Any], state: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Outputs for these inputs and state tensors, in the order that the graph lists them."""
        values: list[Any] = [*inputs, *state]
        values += [None] * (len(self._slots) - len(values))
        for no_grad, steps in self._blocks:
            if no_grad:
                with torch.no_grad():
                    _run(steps, values)
            else:
                _run(steps, values)
        return tuple(fill(values) for fill in self._outputs)

    def _step(self, operation: Operation, free: tuple[int, ...]) -> _Step:
        args: list[Any] = []
        direct, nested = [], []
        for place, argument in enumerate(operation.args):
            constant = self._constant(argument)
            args.append(constant)
            if isinstance(argument, Ref):
                direct.append((place, self._slots[argument.name]))
            elif constant is None and argument is not None:
                nested.append((place, self._fill(argument)))
        kwargs = {name: self._constant(value) for name, value in operation.kwargs}
        nested_kwargs = tuple(
            (name, self._fill(value))
            for name, value in operation.kwargs
            if kwargs[name] is None and value is not None
        )
        return _Step(
            resolve(operation.target),
            args,
            tuple(direct),
            tuple(nested),
            kwargs,
            nested_kwargs,
            self._slots[operation.name],
            free,
        )

    def _constant(self, argument: Argument) -> Any:
        """Value of an argument that refers to nothing; None for one that does."""
        if isinstance(argument, Ref):
            return None
        if isinstance(argument, StageDevice):
            return self._device
        if isinstance(argument, tuple):
            items = [self._constant(item) for item in argument]
            open_ = any(i is None and a is not None for i, a in zip(items, argument, strict=True))
            return None if open_ else items
        return argument

    def _fill(self, argument: Argument) -> _Fill:
        if isinstance(argument, Ref):
            slot = self._slots[argument.name]
            return lambda values: values[slot]
        if isinstance(argument, tuple):
            parts = [self._fill(item) for item in argument]
            return lambda values: [part(values) for part in parts]
        constant = self._constant(argument)
        return lambda _: constant

    def _last_uses(self, graph: StageGraph, keep: int) -> dict[str, tuple[int, ...]]:
        """For each operation, the slots that it is the last to read; inputs, state and outputs stay."""
        needed = {slot for output in graph.outputs for slot in self._slots_in(output.value)}
        last: dict[int, str] = {}
        for operation in graph.operations:
            last[self._slots[operation.name]] = operation.name
            for name in operation.refs():
                last[self._slots[name]] = operation.name
        free: dict[str, list[int]] = {}
        for slot, name in last.items():
            if slot >= keep and slot not in needed:
                free.setdefault(name, []).append(slot)
        return {name: tuple(slots) for name, slots in free.items()}

    def _slots_in(self, argument: Argument) -> list[int]:
        if isinstance(argument, Ref):
            return [self._slots[argument.name]]
        if isinstance(argument, tuple):
            return [slot for item in argument for slot in self._slots_in(item)]
        return []


def _run(steps: list[_Step], values: list[Any]) -> None:
    for step in steps:
        args = step.args.copy()
        for place, slot in step.direct:
            args[place] = values[slot]
        for place, fill in step.nested:
            args[place] = fill(values)
        if step.nested_kwargs:
            kwargs = step.kwargs | {name: fill(values) for name, fill in step.nested_kwargs}
        else:
            kwargs = step.kwargs
        values[step.result] = step.function(*args, **kwargs)
        for slot in step.free:
            values[slot] = None
