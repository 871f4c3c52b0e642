"""Find the legal cuts of a graph, and the values that cross each cut.

Positions count the graph's operations in program order: cut ``c`` lies before operation ``c``.
Arithmetic on sizes and casts of weights have no position; each stage repeats them for itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from ravnest.split.aliases import find_aliases
from ravnest.split.capture import ModeCapture
from ravnest.split.casts import is_state_cast
from ravnest.split.normalise import is_size


@dataclass(frozen=True)
class CutLayout:
    """Operations of a graph in order, and the legal cuts between them."""

    capture: ModeCapture
    operations: tuple[fx.Node, ...]
    legal: tuple[int, ...]
    """Ascending positions of legal cuts, without both ends."""

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        """Position of each operation."""
        return {node: position for position, node in enumerate(self.operations)}

    @cached_property
    def spans(self) -> dict[fx.Node, tuple[int, int]]:
        """First and last cut that each value crosses.

        A model input enters before the first operation; a model output leaves after the last.
        Parameters and buffers do not cross: the stages that use them hold them.
        """
        spans = {}
        end = len(self.operations)
        for node in self.capture.graph.nodes:
            if node.op == "placeholder":
                if node.name in self.capture.state_of:
                    continue
                made = -1
            elif node in self.position:
                made = self.position[node]
            else:
                continue
            last = max((self._used_at(user, end) for user in node.users), default=-1)
            if last > made:
                spans[node] = (made + 1, last)
        return spans

    def crossing(self, cut: int) -> Iterator[fx.Node]:
        """Yield the values that are made before ``cut`` and used after it, in program order."""
        for node, (first, last) in self.spans.items():
            if first <= cut <= last:
                yield node

    def _used_at(self, user: fx.Node, end: int) -> int:
        if user.op == "output":
            return end
        if user in self.position:
            return self.position[user]
        return -1  # a size: read from any tensor that crosses anyway


def lay_out(capture: ModeCapture) -> CutLayout:
    """Number the operations of a normalised graph and find its legal cuts."""
    graph = capture.graph
    operations = tuple(n for n in graph.nodes if n.op == "call_function" and not _is_repeated(n))
    position = {node: index for index, node in enumerate(operations)}
    barred = [False] * (len(operations) + 1)

    def bar(first: int, last: int) -> None:
        """Forbid cuts between the operations at ``first`` and ``last``."""
        for cut in range(first + 1, last + 1):
            barred[cut] = True

    for node in operations:
        if node.target is operator.getitem and node.args[0] in position:
            bar(position[node.args[0]], position[node])
    _bar_written_memory(capture, position, bar)
    legal = tuple(cut for cut in range(1, len(operations)) if not barred[cut])
    return CutLayout(capture, operations, legal)


def _is_repeated(node: fx.Node) -> bool:
    """Return True for a node that each stage repeats for itself."""
    return is_size(node) or is_state_cast(node)


def _bar_written_memory(
    capture: ModeCapture, position: dict[fx.Node, int], bar: Callable[[int, int], None]
) -> None:
    """Forbid cuts that would split memory that is written.

    All operations on a written parameter or buffer stay in one stage. Other memory that is written
    after a cut may cross it under one name: the next stage writes to its own copy. It may not cross
    under two names, which would become two tensors.
    """
    aliases = find_aliases(capture.graph)
    end = len(position)
    writers: dict[fx.Node, list[fx.Node]] = {}
    for writer, root in aliases.writes:
        writers.setdefault(root, []).append(writer)
    for root, writing in writers.items():
        if root.op == "placeholder" and root.name in capture.state_of:
            touching = [position[n] for n in (*root.users, *writing) if n in position]
            bar(min(touching), max(touching))
            continue
        last_write = max(position[n] for n in writing)
        made = position.get(root, -1)
        lives = [_lifetime(node, position, end) for node in aliases.sharing(root) if _is_tensor(node)]
        for cut in range(made + 1, last_write + 1):
            if sum(1 for first, last in lives if first < cut <= last) > 1:
                bar(cut - 1, cut)


def _lifetime(node: fx.Node, position: dict[fx.Node, int], end: int) -> tuple[int, int]:
    """Return the positions of the operation that makes a value and of the last one that uses it."""
    uses = [end if user.op == "output" else position.get(user, -1) for user in node.users]
    return position.get(node, -1), max(uses, default=-1)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
