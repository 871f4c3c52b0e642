"""Search for clusters and their pipeline orders: exact for small pools, genetic for large ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from ravnest.plan.candidate_cuts import candidate_cuts
from ravnest.plan.cost import ModelCosts, NodeCapacity
from ravnest.plan.genetic import evolve
from ravnest.plan.grouping import (
    Grouping,
    NodePool,
    best_grouping,
    best_groupings,
    expected_length,
)
from ravnest.plan.local_search import improve
from ravnest.plan.pipeline_order import OrderSearch
from ravnest.plan.ranges import IntArray

EXACT_NODES = 10
"""Largest pool that is searched exhaustively."""
EXACT_EFFORT = 100_000_000
"""Effort of the exhaustive search, which determines its number of candidate cuts."""
MOST_CUTS = 1000
"""Most candidate cuts of the exhaustive search before it decides that nothing fits."""
LARGE_CUTS, MOST_LARGE_CUTS, CUTS_PER_STAGE = 96, 200, 12
"""Candidate cuts of the search in a large pool: more for longer pipelines."""
LARGE_EFFORT = 450_000_000
"""Effort limit for a large pool: a fifth for the genetic search, the rest for the local search."""
FEWER_SHARE = 4
"""Divisor of that limit for each smaller number of clusters that is tried."""
IMPROVED = 5
"""Groupings of the last generation that the local search improves, within the effort limit."""
EXACT_LENGTH = 5
"""Longest pipeline of a large pool whose order is searched exhaustively."""

Pipeline = tuple[int, ...]
"""Nodes of a cluster in pipeline order, Root first, as indices into the pool."""


def find_clusters(
    several: ModelCosts,
    machines: Sequence[NodeCapacity],
    clusters: int | None,
    seed: int,
    *,
    exact_nodes: int = EXACT_NODES,
) -> Iterator[tuple[ModelCosts, tuple[Pipeline, ...]]]:
    """Yield the best pipelines and their costs for one number of clusters after the other, most first.

    The first has the number with the most samples per second; nothing if nothing fits. ``several`` are
    the costs with several clusters; a single cluster does not average and needs less memory. With
    ``clusters`` there is only that number. The other arguments are those of ``find_pipelines``.
    """
    if clusters != 1:
        for pipelines in _fewer_and_fewer(several, machines, clusters, seed, exact_nodes):
            if len(pipelines) > 1:
                yield several, pipelines
    if clusters is None or clusters == 1:
        alone = find_pipelines(several.alone(), machines, 1, seed, exact_nodes=exact_nodes)
        if alone is not None:
            yield several.alone(), alone


def _fewer_and_fewer(
    costs: ModelCosts,
    machines: Sequence[NodeCapacity],
    clusters: int | None,
    seed: int,
    exact_nodes: int,
) -> Iterator[tuple[Pipeline, ...]]:
    """Yield the pipelines of each number of clusters; in a large pool, of numbers that are halved."""
    found = _search(costs, machines, clusters, seed, exact_nodes)
    if found is None:
        return
    pool, grouping = found
    yield _pipelines(pool, grouping)
    if clusters is not None:
        return
    if len(machines) <= exact_nodes:
        counts = range(len(grouping) - 1, 1, -1)
        nodes = range(len(machines))
        yield from (_pipelines(pool, g) for g in best_groupings(nodes, counts, pool.score) if g)
        return
    count = len(grouping) // 2
    while count > 1:
        fewer = _search(costs, machines, count, seed, exact_nodes, LARGE_EFFORT // FEWER_SHARE)
        if fewer is None:
            return
        yield _pipelines(*fewer)
        count //= 2


def find_pipelines(
    costs: ModelCosts,
    machines: Sequence[NodeCapacity],
    clusters: int | None,
    seed: int,
    *,
    exact_nodes: int = EXACT_NODES,
) -> tuple[Pipeline, ...] | None:
    """Return pipelines that use every node, for the most samples per second; None if nothing fits.

    A one-node cluster is made only if no grouping without it fits, or if ``clusters`` is given.
    Pure: the same arguments give the same pipelines. Pools of more than ``exact_nodes`` nodes use the
    genetic search.
    """
    found = _search(costs, machines, clusters, seed, exact_nodes)
    return None if found is None else _pipelines(*found)


def _search(
    costs: ModelCosts,
    machines: Sequence[NodeCapacity],
    clusters: int | None,
    seed: int,
    exact_nodes: int,
    effort: int | None = None,
) -> tuple[NodePool, Grouping] | None:
    """Return the best grouping with its pool; None if nothing fits."""
    small = len(machines) <= exact_nodes
    count = _exact_cuts(len(machines)) if small else _large_cuts(costs, machines, clusters)
    for cuts in _finer_cuts(costs, count, MOST_CUTS if small else 2 * count):
        exact_length = exact_nodes if small else EXACT_LENGTH
        pool = NodePool.of(machines, clusters, OrderSearch(costs, machines, cuts, exact_length))
        grouping = _exact(pool) if small else _genetic(pool, seed, effort or LARGE_EFFORT)
        if grouping is not None:
            return pool, grouping
    return None


def _finer_cuts(costs: ModelCosts, count: int, most: int) -> Iterator[IntArray]:
    """Yield more and more candidate cuts: if RAM is scarce, the first ones may miss the only fit."""
    yield candidate_cuts(costs, count)
    while count <= min(costs.units, most // 2):
        count *= 2
        yield candidate_cuts(costs, count)


def _exact_cuts(nodes: int) -> int:
    tails = nodes * 2 ** (nodes - 1)
    return max(64, int((EXACT_EFFORT / tails) ** 0.5))


def _large_cuts(costs: ModelCosts, machines: Sequence[NodeCapacity], clusters: int | None) -> int:
    """Return a number of cuts that gives each stage of the expected pipelines several."""
    length = expected_length(costs, machines)
    if clusters is not None:
        length = max(length, -(-len(machines) // clusters))
    return max(LARGE_CUTS, min(MOST_LARGE_CUTS, CUTS_PER_STAGE * length))


def _exact(pool: NodePool) -> Grouping | None:
    return best_grouping(range(len(pool.machines)), pool.clusters, pool.score)


def _genetic(pool: NodePool, seed: int, effort: int) -> Grouping | None:
    rng = Random(seed)  # noqa: S311 - a reproducible search, nothing secret
    best = evolve(pool, rng, effort // 5)[:IMPROVED]
    grouping = max((improve(pool, one, rng, effort) for one in best), key=pool.total)
    fits = all(pool.order(cluster) is not None for cluster in grouping)
    return grouping if fits else None


def _pipelines(pool: NodePool, grouping: Grouping) -> tuple[Pipeline, ...]:
    """Determine the order of each cluster; equal machines are placed by ascending id."""
    waiting: dict[int, list[int]] = {}
    for node in reversed(range(len(pool.machines))):
        waiting.setdefault(pool.kinds[node], []).append(node)
    result = []
    for cluster in sorted(grouping):
        order = pool.orders.refined(tuple(pool.kinds[node] for node in cluster))
        if order is None:
            raise AssertionError(f"cluster {cluster} of the result does not fit")
        result.append(tuple(waiting[kind].pop() for kind in order.kinds))
    return tuple(sorted(result, key=min))
