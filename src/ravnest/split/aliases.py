"""Find the values of a graph that share memory, and the operations that write to it.

The schemas of operators declare both, except for batch and instance norm, which update their running
statistics undeclared.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

_STATISTICS = {"aten::batch_norm": 5, "aten::instance_norm": 5, "aten::native_batch_norm": 5}
"""Operators that write arguments 3 and 4 if the argument at the given position is true."""


@dataclass(frozen=True)
class Aliases:
    """Memory shared between the values of a graph."""

    root: dict[fx.Node, fx.Node]
    """The value whose memory each value uses; the value itself if it has its own memory."""
    writes: tuple[tuple[fx.Node, fx.Node], ...]
    """Pairs of a writing operation and the root of the written memory, in program order."""

    def written(self) -> set[fx.Node]:
        """Return the roots of all written memory."""
        return {root for _, root in self.writes}

    def sharing(self, root: fx.Node) -> list[fx.Node]:
        """Return all values that use the memory of ``root``, including itself."""
        return [node for node, its_root in self.root.items() if its_root is root]


def find_aliases(graph: fx.Graph) -> Aliases:
    """Follow views and in-place operations through a graph."""
    root: dict[fx.Node, fx.Node] = {}
    writes: list[tuple[fx.Node, fx.Node]] = []
    for node in graph.nodes:
        root[node] = node
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            root[node] = root[node.args[0]]
        elif isinstance(node.target, torch._ops.OpOverload):
            written, viewed = _touched(node)
            writes += [(node, root[value]) for value in written]
            if viewed is not None:
                root[node] = root[viewed]
    return Aliases(root, tuple(writes))


def _touched(node: fx.Node) -> tuple[list[fx.Node], fx.Node | None]:
    """Return the arguments that an operation writes, and the argument that its result is a view of."""
    schema = node.target._schema  # type: ignore[union-attr]
    written = list(_statistics(node, schema.name))
    viewed = None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        for value in _nodes_in(_argument(node, position, argument.name)):
            if argument.alias_info.is_write:
                written.append(value)
            if viewed is None and any(r.alias_info is not None for r in schema.returns):
                viewed = value
    return written, viewed


def _statistics(node: fx.Node, name: str) -> Iterator[fx.Node]:
    training = _STATISTICS.get(name)
    if training is not None and _argument(node, training, "training"):
        for position in (3, 4):
            yield from _nodes_in(_argument(node, position, ""))


def _argument(node: fx.Node, position: int, name: str) -> object:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _nodes_in(value: object) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes_in(item)
