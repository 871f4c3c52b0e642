"""Score of a grouping of nodes into clusters, and the exact best grouping of a small pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ravnest.plan.cost import ModelCosts, NodeCapacity
from ravnest.plan.pipeline_order import Kinds, OrderSearch, PipelineOrder

Cluster = tuple[int, ...]
"""Nodes of a cluster, ascending, as indices into the pool."""
Grouping = tuple[Cluster, ...]

SIMILARITY = 1e-3
"""Share of its rate that a cluster loses in the score for each factor e by which its nodes differ, at
most ten times this value. Decides between groupings that are nearly equal."""
BREVITY = 1e-4
"""Share of its rate that a cluster loses in the score for each stage above two: a longer pipeline trains
on older weights."""
UNMEASURED_LINK = 1e-3
"""Share of its rate that a cluster loses in the score for each link between measured nodes that is not
measured itself: small differences between figures are no reason to measure other pairs."""

IDEAL = 0.005
"""Relative distance to the rate without any waiting below which a grouping is good enough."""


class GroupingScore(NamedTuple):
    """Quality of a grouping; greater is better."""

    placed: int
    """Nodes in clusters that fit, minus all other nodes."""
    paired: int
    """Minus the number of one-node clusters, if each cluster should have a Root and a Leaf."""
    worth: float
    """Samples per second, reduced a little for unequal nodes and long pipelines."""

    def plus(self, other: GroupingScore) -> GroupingScore:
        """Return the score of two groups of clusters together."""
        return GroupingScore(
            self.placed + other.placed, self.paired + other.paired, self.worth + other.worth
        )


NOTHING = GroupingScore(0, 0, 0.0)


@dataclass(frozen=True)
class NodePool:
    """The nodes to group, with the scores of their clusters."""

    machines: tuple[NodeCapacity, ...]
    kinds: Kinds
    """For each node, the index of its machine among the distinct machines."""
    orders: OrderSearch
    clusters: int | None
    """Number of clusters to make; None leaves it to the search."""

    @classmethod
    def of(cls, machines: Sequence[NodeCapacity], clusters: int | None, orders: OrderSearch) -> NodePool:
        """Map each node to its machine among the distinct machines of ``orders``."""
        number = {machine: index for index, machine in enumerate(orders.kinds)}
        return cls(tuple(machines), tuple(number[m] for m in machines), orders, clusters)

    def order(self, cluster: Sequence[int]) -> PipelineOrder | None:
        """Return the best order of a cluster's machines; None if they cannot hold the model."""
        return self.orders.best(tuple(self.kinds[node] for node in cluster))

    def score(self, cluster: Sequence[int]) -> GroupingScore:
        """Return the score of one cluster."""
        single = -1 if len(cluster) == 1 and self.clusters is None else 0
        order = self.order(cluster)
        if order is None:
            return GroupingScore(-len(cluster), single, 0.0)
        rate = self.orders.costs.batch_size / max(order.seconds, 1e-9)
        return GroupingScore(len(cluster), single, rate * (1 - self._penalty(cluster)))

    def total(self, grouping: Sequence[Cluster]) -> GroupingScore:
        """Return the score of several clusters."""
        result = NOTHING
        for cluster in grouping:
            result = result.plus(self.score(cluster))
        return result

    def is_ideal(self, score: GroupingScore) -> bool:
        """Return True if no search can gain much: all nodes are placed and almost never wait."""
        costs = self.orders.costs
        work = float(costs.work.prefix[-1])
        bound = costs.batch_size * sum(machine.flops for machine in self.machines)
        everyone = score.placed == len(self.machines) and score.paired == 0
        return everyone and score.worth * work >= (1 - IDEAL) * bound

    def _penalty(self, cluster: Sequence[int]) -> float:
        machines = [self.machines[node] for node in cluster]
        spread = 0.0
        for values in zip(*((m.ram, m.bandwidth, m.flops) for m in machines), strict=True):
            spread += math.log(max(values) / min(values)) / 3
        penalty = SIMILARITY * min(spread, 10.0) + BREVITY * max(0, len(cluster) - 2)
        measured = {machine.node for machine in machines if machine.node is not None}
        return penalty + UNMEASURED_LINK * self.orders.costs.links.lacking(measured)


def expected_length(costs: ModelCosts, machines: Sequence[NodeCapacity]) -> int:
    """Return about how many of these machines are needed to hold the model, at least two."""
    ram = sum(machine.ram for machine in machines) / len(machines)
    length = 2
    while length < len(machines):
        if length * ram >= costs.least_memory(0, costs.units, (length + 1) // 2):
            break
        length += 1
    return length


def best_grouping(
    nodes: Sequence[int], clusters: int | None, score: Callable[[Cluster], GroupingScore]
) -> Grouping | None:
    """Return the best grouping of a few nodes in which all clusters fit; None if there is none.

    Tries every subset as the cluster of its lowest node: 3^n steps for n nodes.
    """
    return _Subsets(tuple(sorted(nodes)), score).grouping(clusters)


def best_groupings(
    nodes: Sequence[int], counts: Sequence[int], score: Callable[[Cluster], GroupingScore]
) -> Iterator[Grouping | None]:
    """Yield the best grouping for each of these numbers of clusters, as ``best_grouping`` does."""
    subsets = _Subsets(tuple(sorted(nodes)), score)
    return map(subsets.grouping, counts)


class _Subsets:
    """Sets of nodes as bits of an integer, each scored once."""

    def __init__(self, nodes: Cluster, score: Callable[[Cluster], GroupingScore]) -> None:
        self.nodes = nodes
        self.everyone = (1 << len(nodes)) - 1
        self._score = score
        self._scores: dict[int, GroupingScore] = {}
        self._best: dict[tuple[int, int | None], tuple[GroupingScore, int] | None] = {}

    def grouping(self, count: int | None) -> Grouping | None:
        """Return the best grouping of all nodes into ``count`` clusters."""
        left = self.everyone
        result: list[Cluster] = []
        while left:
            found = self.best(left, count)
            if found is None:
                return None
            result.append(self.members(found[1]))
            left, count = left ^ found[1], None if count is None else count - 1
        return tuple(result)

    def members(self, chosen: int) -> Cluster:
        return tuple(node for bit, node in enumerate(self.nodes) if chosen >> bit & 1)

    def score(self, chosen: int) -> GroupingScore:
        if chosen not in self._scores:
            self._scores[chosen] = self._score(self.members(chosen))
        return self._scores[chosen]

    def best(self, left: int, count: int | None) -> tuple[GroupingScore, int] | None:
        """Return the best score of the nodes ``left`` in ``count`` clusters, and its first cluster."""
        if (left, count) not in self._best:
            self._best[left, count] = self._find_best(left, count)
        return self._best[left, count]

    def _find_best(self, left: int, count: int | None) -> tuple[GroupingScore, int] | None:
        if left == 0 or count == 0:
            return (NOTHING, 0) if left == 0 and not count else None
        best: tuple[GroupingScore, int] | None = None
        for chosen in _subsets_with_lowest(left):
            if self.score(chosen).placed > 0:
                rest = self.best(left ^ chosen, None if count is None else count - 1)
                if rest is not None:
                    total = self.score(chosen).plus(rest[0])
                    if best is None or total > best[0]:
                        best = (total, chosen)
        return best


def _subsets_with_lowest(of: int) -> Iterator[int]:
    lowest = of & -of
    others = chosen = of ^ lowest
    while chosen:
        yield chosen | lowest
        chosen = (chosen - 1) & others
    yield lowest
