"""Join the smallest pieces of a model into stages, as data: without the model and without its code.

A requester ships its model cut in every legal place, one stage a **unit**. Whoever plans then joins
runs of units: the operations of all of them, with what passed between two units resolved to what
made it. The result is what a cut of the captured model would have given, and as exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec.structs import replace
from torch import fx

from ravnest.errors import SplitError, StageFormatError
from ravnest.split.aliases import find_aliases
from ravnest.split.graph import (
    MODES,
    Argument,
    Mode,
    Operation,
    OutputSpec,
    Ref,
    StageGraph,
    StageSpec,
    StateSpec,
    StateUse,
    SymbolRange,
)
from ravnest.split.operators import resolve

_CLONE = "aten::clone.default"
_OWN = "__own"
"""Ends the name of a copy that a stage makes of a tensor that it receives and writes to."""
_SIZES = ("aten::sym_size.int", "aten::sym_numel.default", "aten::sym_stride.int")
_ARITHMETIC = ("python::", "math::", "size::")
_KINDS = ("parameter", "buffer", "constant")


def join(units: Sequence[StageSpec], starts: Sequence[int]) -> tuple[StageSpec, ...]:
    """Stages that begin at unit 0 and at each of ``starts``, which ascend.

    ``StageFormatError`` if the units are not the pieces of one model.
    """
    bounds = _bounds(len(units), starts)
    return tuple(_join_stage(units, bounds, index) for index in range(len(bounds) - 1))


def check_chain(units: Sequence[StageSpec]) -> None:
    """Refuse units that do not follow each other: all of one model, each fed by the one before."""
    if not units:
        raise StageFormatError("a model has one unit at least")
    for index, unit in enumerate(units):
        if (unit.index, unit.count) != (index, len(units)):
            raise StageFormatError(f"unit {index} of {len(units)} is not in its place")
        if unit.signature != units[0].signature:
            raise StageFormatError(f"unit {index} belongs to a model with other inputs")
    for before, unit in pairwise(units):
        for mode in MODES:
            given = {output.name for output in before.graphs[mode].outputs}
            for value in unit.graphs[mode].inputs:
                if value.name not in given:
                    raise StageFormatError(
                        f"{mode} graph of unit {unit.index}: nothing before it gives {value.name!r}"
                    )
    _check_state(units)


def _check_state(units: Sequence[StageSpec]) -> None:
    """Units that hold a tensor agree on it, and it lists exactly those units."""
    entries: dict[str, StateSpec] = {}
    holders: dict[str, list[int]] = {}
    for unit in units:
        for entry in unit.state:
            if entries.setdefault(entry.key, entry) != entry:
                raise StageFormatError(f"two units do not agree on {entry.key!r}")
            holders.setdefault(entry.key, []).append(unit.index)
    for key, entry in entries.items():
        if list(entry.stages) != holders[key]:
            raise StageFormatError(f"the units that hold {key!r} are not those that it lists")
    names = [name for entry in entries.values() for name in entry.names]
    if len(set(names)) != len(names):
        raise StageFormatError("two state tensors have the same name")


def _bounds(units: int, starts: Sequence[int]) -> list[int]:
    inner = list(starts[1:] if starts and starts[0] == 0 else starts)
    bounds = [0, *inner, units]
    if any(before >= after for before, after in pairwise(bounds)):
        raise SplitError(f"stages of {units} units cannot begin at {list(starts)}: they must ascend")
    return bounds


def _join_stage(units: Sequence[StageSpec], bounds: Sequence[int], index: int) -> StageSpec:
    mine = units[bounds[index] : bounds[index + 1]]
    graphs: dict[Mode, StageGraph] = {
        mode: _Joining([unit.graphs[mode] for unit in mine]).build() for mode in MODES
    }
    state = {entry.key: entry for unit in mine for entry in unit.state}
    spec = StageSpec(
        index=index,
        count=len(bounds) - 1,
        state=tuple(_with_stages(entry, bounds) for entry in sorted(state.values(), key=_place)),
        graphs=graphs,
        signature=mine[0].signature,
        module_versions=mine[0].module_versions,
    )
    spec.check()
    return spec


def _place(entry: StateSpec) -> tuple[int, int]:
    """The order of a model: parameters, then buffers, then constants, each as in the state_dict."""
    return _KINDS.index(entry.kind), entry.positions[0]


def _with_stages(entry: StateSpec, bounds: Sequence[int]) -> StateSpec:
    stages = {bisect_right(bounds, unit) - 1 for unit in entry.stages}
    return replace(entry, stages=tuple(sorted(stages)))


class _Joining:
    """The graphs of consecutive units on their way to becoming one."""

    def __init__(self, graphs: Sequence[StageGraph]) -> None:
        self._graphs = graphs
        self._operations: list[Operation] = []
        self._state: dict[str, StateUse] = {}
        self._values: dict[str, Argument] = {}
        """What each name of the unit at hand is in the stage."""
        self._made = {value.name for value in graphs[0].inputs}

    def build(self) -> StageGraph:
        """The stage's graph."""
        self._values = {value.name: Ref(value.name) for value in self._graphs[0].inputs}
        for graph, following in pairwise(self._graphs):
            self._add(graph)
            self._values = self._pass_on(graph, following)
        last = self._graphs[-1]
        self._add(last)
        outputs = [OutputSpec(o.name, _substitute(o.value, self._values)) for o in last.outputs]
        copies = [Operation(f"{name}{_OWN}", _CLONE, (Ref(name),)) for name in self._written_inputs()]
        if copies:
            own: dict[str, Argument] = {ref: Ref(copy.name) for copy in copies for ref in copy.refs()}
            self._operations = [_substituted(operation, own) for operation in self._operations]
            outputs = [OutputSpec(o.name, _substitute(o.value, own)) for o in outputs]
        return StageGraph(
            inputs=self._graphs[0].inputs,
            state=tuple(self._state.values()),
            operations=(*copies, *self._operations),
            outputs=tuple(outputs),
            structure=last.structure,
            symbols=_union(graph.symbols for graph in self._graphs),
        )

    def _add(self, graph: StageGraph) -> None:
        """Add the operations of a unit, whose inputs are known."""
        for use in graph.state:
            if self._state.setdefault(use.name, use) != use:
                raise StageFormatError(f"{use.name!r} stands for two state tensors")
            self._values[use.name] = Ref(use.name)
        received = {value.name for value in graph.inputs}
        for operation in graph.operations:
            copied = _copied(operation)
            if copied in received:  # made inside the stage, it is written to as in the model
                self._values[operation.name] = self._values[copied]
                continue
            if operation.name not in self._made or not _is_size(operation):
                self._operations.append(_substituted(operation, self._values))
                self._made.add(operation.name)
            self._values[operation.name] = Ref(operation.name)

    def _pass_on(self, graph: StageGraph, following: StageGraph) -> dict[str, Argument]:
        """What the next unit knows: its inputs, as this unit's outputs are in the stage."""
        outputs = {output.name: output.value for output in graph.outputs}
        passed: dict[str, Argument] = {}
        for value in following.inputs:
            if value.name not in outputs:
                raise StageFormatError(f"nothing before a unit gives its input {value.name!r}")
            found = outputs[value.name]
            if isinstance(found, tuple):  # nested through many units it could grow without end
                raise StageFormatError(f"{value.name!r} passes between units and is a list")
            passed[value.name] = _substitute(found, self._values)
        return passed

    def _written_inputs(self) -> list[str]:
        """Received tensors that the stage writes to, itself or through a view."""
        graph = fx.Graph()
        received = {value.name: graph.placeholder(value.name) for value in self._graphs[0].inputs}
        nodes = dict(received)
        nodes |= {name: graph.placeholder(name) for name in self._state}
        try:
            for operation in self._operations:
                nodes[operation.name] = graph.call_function(
                    resolve(operation.target),
                    tuple(_with_nodes(argument, nodes) for argument in operation.args),
                    {name: _with_nodes(argument, nodes) for name, argument in operation.kwargs},
                )
            written = find_aliases(graph).written()
        except (KeyError, IndexError, TypeError) as error:
            raise StageFormatError(f"an operation of a unit has other arguments: {error}") from error
        return [name for name, node in received.items() if node in written]


def _copied(operation: Operation) -> str | None:
    """The received tensor that an operation makes the unit's own copy of; None for any other."""
    if operation.target == _CLONE and len(operation.args) == 1 and not operation.kwargs:
        (source,) = operation.args
        if isinstance(source, Ref) and operation.name == f"{source.name}{_OWN}":
            return source.name
    return None


def _is_size(operation: Operation) -> bool:
    """Whether it computes a number from sizes, which every unit that needs it does for itself."""
    return operation.target in _SIZES or operation.target.startswith(_ARITHMETIC)


def _substituted(operation: Operation, values: Mapping[str, Argument]) -> Operation:
    return replace(
        operation,
        args=tuple(_substitute(argument, values) for argument in operation.args),
        kwargs=tuple((name, _substitute(argument, values)) for name, argument in operation.kwargs),
    )


def _substitute(argument: Argument, values: Mapping[str, Argument]) -> Argument:
    if isinstance(argument, Ref):
        return values.get(argument.name, argument)
    if isinstance(argument, tuple):
        return tuple(_substitute(item, values) for item in argument)
    return argument


def _with_nodes(argument: Argument, nodes: Mapping[str, fx.Node]) -> Any:
    """An argument as a graph of torch holds it."""
    if isinstance(argument, Ref):
        return nodes[argument.name]
    if isinstance(argument, tuple):
        return tuple(_with_nodes(item, nodes) for item in argument)
    return argument


def _union(symbols: Iterable[Sequence[SymbolRange]]) -> tuple[SymbolRange, ...]:
    found: dict[str, SymbolRange] = {}
    for each in symbols:
        for symbol in each:
            if found.setdefault(symbol.name, symbol) != symbol:
                raise StageFormatError(f"two units do not agree on the size {symbol.name!r}")
    return tuple(found.values())
