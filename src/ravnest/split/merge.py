"""Merge units into stages, on the level of data: without the model and its code.

A requester ships its model cut at every legal position; each piece is a **unit**. The server plans
and merges runs of units into stages: it concatenates their operations and replaces each value that
passed between two units by its definition. The result is the stage that a cut of the captured model
gives, and as exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from msgspec.structs import replace

from ravnest.errors import SplitError, StageFormatError
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
from ravnest.split.written_state import written_values

_CLONE = "aten::clone.default"
_OWN = "__own"
"""Suffix of the copy that a stage makes of a received tensor before it writes to it."""
_SIZES = ("aten::sym_size.int", "aten::sym_numel.default", "aten::sym_stride.int")
_CAST = "aten::_to_copy.default"
_ARITHMETIC = ("python::", "math::", "size::")
_KINDS = ("parameter", "buffer", "constant")


def merge_units(units: Sequence[StageSpec], starts: Sequence[int]) -> tuple[StageSpec, ...]:
    """Return the stages that begin at unit 0 and at each of ``starts``, in ascending order.

    Raises ``StageFormatError`` if the units are not the pieces of one model.
    """
    bounds = _bounds(len(units), starts)
    return tuple(_merge_stage(units, bounds, index) for index in range(len(bounds) - 1))


def check_chain(units: Sequence[StageSpec]) -> None:
    """Raise ``StageFormatError`` unless the units form one model, each fed by the previous one."""
    if not units:
        raise StageFormatError("a model needs at least one unit")
    for index, unit in enumerate(units):
        if (unit.index, unit.count) != (index, len(units)):
            raise StageFormatError(f"unit {index} of {len(units)} is at the wrong position")
        if unit.signature != units[0].signature:
            raise StageFormatError(f"unit {index} belongs to a model with other inputs")
    for before, unit in pairwise(units):
        for mode in MODES:
            given = {output.name for output in before.graphs[mode].outputs}
            for value in unit.graphs[mode].inputs:
                if value.name not in given:
                    raise StageFormatError(
                        f"{mode} graph of unit {unit.index}: its input {value.name!r} is not an output "
                        f"of unit {before.index}"
                    )
    _check_state(units)


def _check_state(units: Sequence[StageSpec]) -> None:
    """Check that units agree on shared tensors, and that each tensor lists the units that hold it."""
    entries: dict[str, StateSpec] = {}
    holders: dict[str, list[int]] = {}
    for unit in units:
        for entry in unit.state:
            if entries.setdefault(entry.key, entry) != entry:
                raise StageFormatError(f"two units disagree on {entry.key!r}")
            holders.setdefault(entry.key, []).append(unit.index)
    for key, entry in entries.items():
        if list(entry.stages) != holders[key]:
            raise StageFormatError(f"{key!r} lists other units than those that hold it")
    names = [name for entry in entries.values() for name in entry.names]
    if len(set(names)) != len(names):
        raise StageFormatError("two state tensors have the same name")


def _bounds(units: int, starts: Sequence[int]) -> list[int]:
    inner = list(starts[1:] if starts and starts[0] == 0 else starts)
    bounds = [0, *inner, units]
    if any(before >= after for before, after in pairwise(bounds)):
        raise SplitError(f"stages of {units} units cannot begin at {list(starts)}: they must ascend")
    return bounds


def _merge_stage(units: Sequence[StageSpec], bounds: Sequence[int], index: int) -> StageSpec:
    own = units[bounds[index] : bounds[index + 1]]
    graphs: dict[Mode, StageGraph] = {
        mode: _GraphMerger([unit.graphs[mode] for unit in own]).build() for mode in MODES
    }
    state = {entry.key: entry for unit in own for entry in unit.state}
    spec = StageSpec(
        index=index,
        count=len(bounds) - 1,
        state=tuple(_with_stages(entry, bounds) for entry in sorted(state.values(), key=_place)),
        graphs=graphs,
        signature=own[0].signature,
        module_versions=own[0].module_versions,
    )
    spec.check()
    return spec


def _place(entry: StateSpec) -> tuple[int, int]:
    """Sort key: parameters, then buffers, then constants, each in the order of the state_dict."""
    return _KINDS.index(entry.kind), entry.positions[0]


def _with_stages(entry: StateSpec, bounds: Sequence[int]) -> StateSpec:
    stages = {bisect_right(bounds, unit) - 1 for unit in entry.stages}
    return replace(entry, stages=tuple(sorted(stages)))


class _GraphMerger:
    """Builds one graph from the graphs of consecutive units."""

    def __init__(self, graphs: Sequence[StageGraph]) -> None:
        self._graphs = graphs
        self._operations: list[Operation] = []
        self._state: dict[str, StateUse] = {}
        self._values: dict[str, Argument] = {}
        """Values of the stage by their names in the current unit."""
        self._defined = {value.name for value in graphs[0].inputs}
        self._casts: dict[str, Operation] = {}
        """Casts of state tensors, which every unit that needs one repeats for itself."""

    def build(self) -> StageGraph:
        """Return the stage's graph."""
        self._values = {value.name: Ref(value.name) for value in self._graphs[0].inputs}
        for graph, next_graph in pairwise(self._graphs):
            self._add(graph)
            self._values = self._pass_on(graph, next_graph)
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
        """Add the operations of a unit; ``_values`` has its inputs."""
        for use in graph.state:
            if self._state.setdefault(use.name, use) != use:
                raise StageFormatError(f"the name {use.name!r} is used for two state tensors")
            self._values[use.name] = Ref(use.name)
        received = {value.name for value in graph.inputs}
        for operation in graph.operations:
            copied = _copied(operation)
            if copied in received:  # made inside this stage, so it may be written in place
                self._values[operation.name] = self._values[copied]
                continue
            if operation.name not in self._defined or not self._is_repeated(operation):
                self._operations.append(_substituted(operation, self._values))
                self._defined.add(operation.name)
                if operation.target == _CAST and all(name in self._state for name in operation.refs()):
                    self._casts[operation.name] = operation
            self._values[operation.name] = Ref(operation.name)

    def _is_repeated(self, operation: Operation) -> bool:
        return _is_size(operation) or self._casts.get(operation.name) == operation

    def _pass_on(self, graph: StageGraph, next_graph: StageGraph) -> dict[str, Argument]:
        """Return the values of the next unit's inputs, by name."""
        outputs = {output.name: output.value for output in graph.outputs}
        passed: dict[str, Argument] = {}
        for value in next_graph.inputs:
            if value.name not in outputs:
                raise StageFormatError(
                    f"no earlier unit has the output {value.name!r} that a unit needs"
                )
            found = outputs[value.name]
            if isinstance(found, tuple):  # nested through many units it could grow exponentially
                raise StageFormatError(f"{value.name!r} is a list, which cannot pass between units")
            passed[value.name] = _substitute(found, self._values)
        return passed

    def _written_inputs(self) -> list[str]:
        """Return the received tensors that the stage writes to, directly or through a view."""
        received = [value.name for value in self._graphs[0].inputs]
        try:
            written = written_values([*received, *self._state], self._operations)
        except (KeyError, IndexError, TypeError) as error:
            raise StageFormatError(f"an operation of a unit has invalid arguments: {error}") from error
        return [name for name in received if name in written]


def _copied(operation: Operation) -> str | None:
    """Return the received tensor that an operation copies for the unit; None for other operations."""
    if operation.target == _CLONE and len(operation.args) == 1 and not operation.kwargs:
        (source,) = operation.args
        if isinstance(source, Ref) and operation.name == f"{source.name}{_OWN}":
            return source.name
    return None


def _is_size(operation: Operation) -> bool:
    """Return True for arithmetic on sizes, which every unit repeats for itself."""
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


def _union(symbols: Iterable[Sequence[SymbolRange]]) -> tuple[SymbolRange, ...]:
    found: dict[str, SymbolRange] = {}
    for each in symbols:
        for symbol in each:
            if found.setdefault(symbol.name, symbol) != symbol:
                raise StageFormatError(f"two units disagree on the size {symbol.name!r}")
    return tuple(found.values())
