"""Search for clusters and their pipeline orders: exact for small pools, genetic for large ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from ravnest.plan.candidate_cuts import candidate_cuts
from ravnest.plan.cost import ModelCosts, NodeCapacity
from ravnest.plan.cuts import best_cuts
from ravnest.plan.genetic import evolve
from ravnest.plan.grouping import BREVITY, Grouping, NodePool, best_grouping, expected_length
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
) -> tuple[ModelCosts, tuple[Pipeline, ...]] | None:
    """Return the best pipelines and their costs; None if nothing fits.

    ``several`` are the costs with several clusters; a single cluster does not average and needs less
    memory. The other arguments are those of ``find_pipelines``.
    """

    def found(costs: ModelCosts, count: int | None) -> list[tuple[ModelCosts, tuple[Pipeline, ...]]]:
        pipelines = find_pipelines(costs, machines, count, seed, exact_nodes=exact_nodes)
        return [] if pipelines is None else [(costs, pipelines)]

    candidates = found(several, clusters) if clusters != 1 else []
    # In a large pool a single pipeline is the best only if nothing else fits.
    small = len(machines) <= EXACT_NODES
    if clusters == 1 or (clusters is None and (small or not candidates)):
        candidates = [*found(several.alone(), 1), *candidates]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    return max(candidates, key=lambda one: _worth(one[0], one[1], machines))


def _worth(
    costs: ModelCosts, pipelines: Sequence[Pipeline], machines: Sequence[NodeCapacity]
) -> tuple[int, float]:
    """Return the rank: fewer one-node clusters, then more samples per second and shorter pipelines."""
    singles, rate = 0, 0.0
    for pipeline in pipelines:
        cuts = best_cuts(costs, [machines[node] for node in pipeline])
        assert cuts is not None, f"{pipeline} fitted in the search and does not fit now"
        singles += len(pipeline) == 1
        rate += (1 - BREVITY * max(0, len(pipeline) - 2)) / max(cuts.seconds, 1e-9)
    return -singles, rate


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
    small = len(machines) <= exact_nodes
    count = _exact_cuts(len(machines)) if small else _large_cuts(costs, machines, clusters)
    for cuts in _finer_cuts(costs, count, MOST_CUTS if small else 2 * count):
        exact_length = exact_nodes if small else EXACT_LENGTH
        pool = NodePool.of(machines, clusters, OrderSearch(costs, machines, cuts, exact_length))
        grouping = _exact(pool) if small else _genetic(pool, seed)
        if grouping is not None:
            return _pipelines(pool, grouping)
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


def _genetic(pool: NodePool, seed: int) -> Grouping | None:
    rng = Random(seed)  # noqa: S311 - a reproducible search, nothing secret
    best = evolve(pool, rng, LARGE_EFFORT // 5)[:IMPROVED]
    grouping = max((improve(pool, one, rng, LARGE_EFFORT) for one in best), key=pool.total)
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
