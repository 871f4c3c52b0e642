"""Measured figures of the links between nodes, and how a plan uses them.

A pair of nodes that has measured its link counts with the measured rate, whatever its nodes state. The
bandwidth of a node with measured links, for all its other links, follows from them
(``measured_bandwidth``). A pair that could not connect has no link, so that no plan makes it neighbours.
Links through a relay share the relay's own capacity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise, permutations

NodePair = tuple[int, int]
"""Ids of two nodes, the lower one first."""

REORDERED = 6
"""Longest pipeline whose order may change because of what was measured."""
ORDERS = 6
"""Orders that are tried for each reason."""
NEARER = 0.8
"""Share of the delay that another order of a pipeline may have at most to be tried."""


@dataclass(frozen=True)
class MeasuredLink:
    """Link between two nodes, as they measured it."""

    rate: float
    """Mbit/s in the slower direction."""
    delay: float
    """Seconds in one direction."""
    relayed: bool = False
    """True if it goes through a relay."""


@dataclass(frozen=True)
class LinkFigures:
    """All that is known about the links of a pool of nodes; empty if nothing was measured."""

    pairs: Mapping[NodePair, MeasuredLink] = field(default_factory=dict)
    failing: Mapping[NodePair, str] = field(default_factory=dict)
    """Pairs that cannot connect, each with a sentence that says so and why."""
    relay_rate: float | None = None
    """Mbit/s that all relayed links of a plan share; None: no limit is known."""
    relayed: int = 1
    """Relayed links that share it."""

    @cached_property
    def nodes(self) -> frozenset[int]:
        """Nodes with a measured or a failing link: no other node can take their place."""
        return frozenset(node for pair in (*self.pairs, *self.failing) for node in pair)

    @cached_property
    def _nearest(self) -> Mapping[int, float]:
        """Least measured delay of each node's links."""
        nearest: dict[int, float] = {}
        for pair, link in self.pairs.items():
            for node in pair:
                nearest[node] = min(nearest.get(node, link.delay), link.delay)
        return nearest

    @cached_property
    def _only_relayed(self) -> frozenset[int]:
        """Nodes whose measured links are all relayed."""
        direct = {node for pair, link in self.pairs.items() if not link.relayed for node in pair}
        return frozenset(node for pair in self.pairs for node in pair if node not in direct)

    def link(self, one: int, other: int) -> MeasuredLink | None:
        """Return the measured link of two nodes with its part of the relay's capacity."""
        found = self.pairs.get(pair_of(one, other))
        limit = self.relay_limit(one, other)
        if found is None or limit is None:
            return found
        return replace(found, rate=min(found.rate, limit))

    def fails(self, one: int, other: int) -> bool:
        """Return whether two nodes cannot connect."""
        return pair_of(one, other) in self.failing

    def delay(self, one: int, other: int) -> float | None:
        """Return the delay between two nodes; None if too little is known.

        If the pair was not measured, it is at least that of the nearest measured neighbour of either.
        """
        found = self.pairs.get(pair_of(one, other))
        if found is not None:
            return found.delay
        if one in self._nearest and other in self._nearest:
            return max(self._nearest[one], self._nearest[other])
        return None

    def relay_limit(self, one: int, other: int) -> float | None:
        """Return the Mbit/s that a relay leaves to the link of two nodes; None if nothing limits it."""
        if self.relay_rate is None or not self.passes_relay(one, other):
            return None
        return self.relay_rate / max(self.relayed, 1)

    def passes_relay(self, one: int, other: int) -> bool:
        """Return whether a link is relayed; if it was not measured, whether its ends know no other."""
        found = self.pairs.get(pair_of(one, other))
        if found is not None:
            return found.relayed
        return one in self._only_relayed and other in self._only_relayed

    def shared_by(self, relayed: int) -> LinkFigures:
        """Return the figures of a plan with this many relayed links."""
        return replace(self, relayed=max(relayed, 1))

    def count_relayed(self, pipelines: Iterable[Sequence[int]]) -> int:
        """Return the number of relayed links in pipelines, given as ids of nodes."""
        return sum(self.passes_relay(*pair) for nodes in pipelines for pair in pairwise(nodes))

    def count_unmeasured(self, pipeline: Sequence[int]) -> int:
        """Return the number of neighbours in a pipeline that have not measured their link."""
        return sum(pair_of(*pair) not in self.pairs for pair in pairwise(pipeline))

    def lacking(self, nodes: Collection[int]) -> int:
        """Return how many more pairs of these nodes must be measured before a pipeline can be."""
        known = sum(pair in self.pairs for pair in combinations(sorted(nodes), 2))
        return max(len(nodes) - 1 - known, 0)

    def other_orders(self, pipeline: Sequence[int]) -> list[tuple[int, ...]]:
        """Return other orders of a pipeline that may be better, by what the search does not know.

        They have clearly less delay between neighbours, or fewer links that were not measured.
        """
        if not self.pairs or not 2 < len(pipeline) <= REORDERED:
            return []
        orders = [
            order
            for order in permutations(pipeline)
            if not any(self.fails(*pair) for pair in pairwise(order))
        ]
        now = self._delays(pipeline)
        delays = [(self._delays(order), order) for order in orders]
        nearer = [(d, o) for d, o in delays if d is not None and now is not None and d < NEARER * now]
        least = self.count_unmeasured(pipeline)
        unmeasured = [(self.count_unmeasured(order), order) for order in orders]
        known = [(count, order) for count, order in unmeasured if count < least]
        found = [order for some in (nearer, known) for _, order in sorted(some)[:ORDERS]]
        return list(dict.fromkeys(found))

    def _delays(self, pipeline: Sequence[int]) -> float | None:
        """Return the sum of the delays between neighbours; None if one is not known."""
        found = [self.delay(*pair) for pair in pairwise(pipeline)]
        known = [delay for delay in found if delay is not None]
        return sum(known) if len(known) == len(found) else None


UNMEASURED = LinkFigures()


def pair_of(one: int, other: int) -> NodePair:
    """Return two nodes as a pair."""
    return (one, other) if one < other else (other, one)


def measured_bandwidth(stated: Mapping[int, float], figures: LinkFigures) -> dict[int, float]:
    """Return the Mbit/s of each node for links that were not measured; ``stated`` are the nodes' own.

    A node is as fast as the best of its measured links. A link that the statement of its other end
    explains does not show that the node is slower than it states.
    """
    best: dict[int, float] = {}
    for (one, other), link in figures.pairs.items():
        for node, peer in ((one, other), (other, one)):
            if node in stated and peer in stated:
                shown = max(link.rate, stated[node]) if stated[peer] <= link.rate else link.rate
                best[node] = max(best.get(node, 0.0), shown)
    return {node: best.get(node, rate) for node, rate in stated.items()}
