"""Tensors that the operations of a stage write to, directly or through a view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from ravnest.split.aliases import find_aliases
from ravnest.split.graph import Argument, Operation, Ref, StageSpec, StateSpec
from ravnest.split.operators import resolve


def written_weights(spec: StageSpec) -> list[str]:
    """Return the keys of the trained weights that forward writes to in training."""
    written = _written_keys(spec)
    return [entry.key for entry in spec.state if entry.trainable and entry.key in written]


def changing_state(spec: StageSpec) -> tuple[StateSpec, ...]:
    """Return the state that training may change: trained weights, buffers, and what forward writes."""
    written = _written_keys(spec)
    return tuple(
        entry
        for entry in spec.state
        if entry.trainable or entry.kind == "buffer" or entry.key in written
    )


def _written_keys(spec: StageSpec) -> set[str | None]:
    graph = spec.graphs["train"]
    keys = {use.name: use.key for use in graph.state}
    given = [*(value.name for value in graph.inputs), *keys]
    return {keys.get(name) for name in written_values(given, graph.operations)}


def written_values(given: Iterable[str], operations: Iterable[Operation]) -> list[str]:
    """Return which of the ``given`` values, inputs or state, the operations write to."""
    graph = fx.Graph()
    sources = {name: graph.placeholder(name) for name in given}
    nodes = dict(sources)
    for operation in operations:
        nodes[operation.name] = graph.call_function(
            resolve(operation.target),
            tuple(_with_nodes(argument, nodes) for argument in operation.args),
            {name: _with_nodes(argument, nodes) for name, argument in operation.kwargs},
        )
    written = find_aliases(graph).written()
    return [name for name, node in sources.items() if node in written]


def _with_nodes(argument: Argument, nodes: Mapping[str, fx.Node]) -> Any:
    """Return an argument with fx nodes in place of references."""
    if isinstance(argument, Ref):
        return nodes[argument.name]
    if isinstance(argument, tuple):
        return tuple(_with_nodes(item, nodes) for item in argument)
    return argument
