"""Which nodes form a cluster, and in which order: exact for small pools, genetic for large ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from ravnest.plan.candidate_cuts import chosen_cuts
from ravnest.plan.cost import ModelCosts, NodeCapacity
from ravnest.plan.cuts import best_cuts
from ravnest.plan.genetic import evolved
from ravnest.plan.grouping import BREVITY, Grouping, Pool, best_grouping, expected_length
from ravnest.plan.local_search import polished
from ravnest.plan.pipeline_order import PipelineOrders
from ravnest.plan.ranges import IntArray

EXACT_NODES = 10
"""Pools of at most so many nodes are searched completely."""
EXACT_EFFORT = 100_000_000
"""Effort that chooses how many cuts the complete search looks at."""
MOST_CUTS = 1000
"""Cuts that the complete search looks at before it finds that nothing fits."""
LARGE_CUTS, MOST_LARGE_CUTS, CUTS_PER_STAGE = 96, 200, 12
"""Cuts that the search for a large pool looks at: more for long pipelines."""
LARGE_EFFORT = 450_000_000
"""Effort that a large pool may take; a fifth of it breeds, the rest polishes."""
POLISHED = 5
"""So many of the last generation are polished, one after another, as far as the effort goes."""
EXACT_LENGTH = 5
"""Pipelines of a large pool up to this long get their order by a complete search."""

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
    """The best pipelines, and what they cost: a single one averages with nobody, and needs less memory.

    ``several`` are the costs where there are others. As ``find_pipelines`` for the rest.
    """

    def found(costs: ModelCosts, count: int | None) -> list[tuple[ModelCosts, tuple[Pipeline, ...]]]:
        pipelines = find_pipelines(costs, machines, count, seed, exact_nodes=exact_nodes)
        return [] if pipelines is None else [(costs, pipelines)]

    candidates = found(several, clusters) if clusters != 1 else []
    # Of many nodes a single pipeline is the best only where nothing else fits.
    small = len(machines) <= EXACT_NODES
    if clusters == 1 or (clusters is None and (small or not candidates)):
        candidates = [*found(several.alone(), 1), *candidates]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    return max(candidates, key=lambda one: _worth(one[0], one[1], machines))


def _worth(
    costs: ModelCosts, pipelines: Sequence[Pipeline], machines: Sequence[NodeCapacity]
) -> tuple[int, float]:
    """The fewer clusters of one node the better, then the more samples a second, then shorter ones."""
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
    """Every node in one of the pipelines, for the most samples a second; None where nothing fits.

    A cluster of one node is made only where no grouping without it fits, or where the number of
    clusters is given. Pure: the same arguments give the same pipelines. Pools of more than
    ``exact_nodes`` nodes are left to the genetic search.
    """
    small = len(machines) <= exact_nodes
    count = _exact_cuts(len(machines)) if small else _large_cuts(costs, machines, clusters)
    for cuts in _finer_and_finer(costs, count, MOST_CUTS if small else 2 * count):
        exact_length = exact_nodes if small else EXACT_LENGTH
        pool = Pool.of(machines, clusters, PipelineOrders(costs, machines, cuts, exact_length))
        grouping = _exact(pool) if small else _genetic(pool, seed)
        if grouping is not None:
            return _pipelines(pool, grouping)
    return None


def _finer_and_finer(costs: ModelCosts, count: int, most: int) -> Iterator[IntArray]:
    """Cuts to look at. Where RAM is scarce the only one that fits may not be among the first."""
    yield chosen_cuts(costs, count)
    while count <= min(costs.units, most // 2):
        count *= 2
        yield chosen_cuts(costs, count)


def _exact_cuts(nodes: int) -> int:
    tails = nodes * 2 ** (nodes - 1)
    return max(64, int((EXACT_EFFORT / tails) ** 0.5))


def _large_cuts(costs: ModelCosts, machines: Sequence[NodeCapacity], clusters: int | None) -> int:
    """Several cuts for each stage of the pipelines to be expected."""
    length = expected_length(costs, machines)
    if clusters is not None:
        length = max(length, -(-len(machines) // clusters))
    return max(LARGE_CUTS, min(MOST_LARGE_CUTS, CUTS_PER_STAGE * length))


def _exact(pool: Pool) -> Grouping | None:
    return best_grouping(range(len(pool.machines)), pool.clusters, pool.score)


def _genetic(pool: Pool, seed: int) -> Grouping | None:
    rng = Random(seed)  # noqa: S311 - a reproducible search, nothing secret
    best = evolved(pool, rng, LARGE_EFFORT // 5)[:POLISHED]
    grouping = max((polished(pool, one, rng, LARGE_EFFORT) for one in best), key=pool.total)
    fits = all(pool.order(cluster) is not None for cluster in grouping)
    return grouping if fits else None


def _pipelines(pool: Pool, grouping: Grouping) -> tuple[Pipeline, ...]:
    """Fix the order of each cluster; equal machines take their places by ascending id."""
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
