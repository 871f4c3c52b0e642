"""Local search, which improves a good grouping.

Each step takes the nodes of two or three clusters and regroups them: exactly if they are few, else by
moving or swapping single nodes and by merging or dividing clusters.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from ravnest.plan.grouping import Cluster, Grouping, NodePool, best_grouping

EXACT_NODES = 6
"""Most nodes that are regrouped exactly."""
TRIES = 48
"""Random moves tried per pair of clusters, divided by the node count."""
PATIENCE = 3
"""Sweeps without any gain after which the search stops."""
NEIGHBOURS = 4
"""Clusters on either side, in order of bandwidth, that a cluster can be regrouped with."""


def improve(pool: NodePool, grouping: Grouping, rng: Random, budget: int) -> Grouping:
    """Return a grouping that is at least as good; stop if sweeps gain nothing or the budget is spent."""
    clusters = list(grouping)
    score, stale = pool.total(clusters), 0
    while stale < PATIENCE and pool.orders.effort < budget and not pool.is_ideal(score):
        clusters = _sweep(pool, clusters, rng, budget)
        before, score = score, pool.total(clusters)
        stale = 0 if score > before else stale + 1
    return tuple(clusters)


def _sweep(pool: NodePool, clusters: list[Cluster], rng: Random, budget: int) -> list[Cluster]:
    """Try to regroup each cluster once with clusters near it."""
    clusters = sorted(clusters, key=lambda cluster: _bandwidth(pool, cluster))
    for position in rng.sample(range(len(clusters)), len(clusters)):
        if pool.orders.effort >= budget:
            break
        if position >= len(clusters):  # earlier changes left fewer clusters
            continue
        chosen = _chosen_clusters(clusters, position, rng)
        old = [clusters[index] for index in chosen]
        new = _regrouped(pool, old, rng, budget)
        if pool.total(new) > pool.total(old):
            kept = [cluster for index, cluster in enumerate(clusters) if index not in chosen]
            clusters = sorted([*kept, *new], key=lambda cluster: _bandwidth(pool, cluster))
    return clusters


def _bandwidth(pool: NodePool, cluster: Cluster) -> tuple[float, Cluster]:
    """Return the sort key of a cluster: its slowest bandwidth, which limits the nodes that suit it."""
    return min(pool.machines[node].bandwidth for node in cluster), cluster


def _chosen_clusters(clusters: list[Cluster], position: int, rng: Random) -> set[int]:
    """Return a cluster and others near it: as many as can be regrouped exactly, at least two."""
    near = [
        index
        for index in range(position - NEIGHBOURS, position + NEIGHBOURS + 1)
        if 0 <= index < len(clusters) and index != position
    ]
    far = rng.randrange(len(clusters))
    chosen = {position}
    count = len(clusters[position])
    for index in (*rng.sample(near, len(near)), far):
        if len(chosen) == 1 or count + len(clusters[index]) <= EXACT_NODES:
            count += 0 if index in chosen else len(clusters[index])
            chosen.add(index)
    return chosen


def _regrouped(pool: NodePool, old: list[Cluster], rng: Random, budget: int) -> list[Cluster]:
    nodes = sorted(node for cluster in old for node in cluster)
    if len(nodes) <= EXACT_NODES:
        count = None if pool.clusters is None else len(old)
        return list(best_grouping(nodes, count, pool.score) or old)
    best, best_score = old, pool.total(old)
    for change in _changes(pool, old, rng):
        score = pool.total(change)
        if score > best_score:
            best, best_score = change, score
        if pool.orders.effort >= budget:
            break
    return best


def _changes(pool: NodePool, old: list[Cluster], rng: Random) -> Iterator[list[Cluster]]:
    if len(old) > 1:
        for _ in range(max(2, TRIES // len(old[0] + old[1]))):
            yield _swapped(pool, old, rng)
            yield _moved(old, rng)
    if pool.clusters is None:
        if len(old) > 1:
            yield [*old[2:], tuple(sorted(old[0] + old[1]))]
        if len(old[0]) >= 4:
            yield [*old[1:], *halves(pool, old[0], rng)]


def _swapped(pool: NodePool, old: list[Cluster], rng: Random) -> list[Cluster]:
    """Swap two nodes; half of the time two with similar RAM, so that the result fits."""
    one, other = rng.choice(old[0]), rng.choice(old[1])
    if rng.random() < 0.5:
        ram = pool.machines[one].ram
        other = min(old[1], key=lambda node: (abs(pool.machines[node].ram - ram), node))
    first = {*old[0], other} - {one}
    second = {*old[1], one} - {other}
    return [*old[2:], tuple(sorted(first)), tuple(sorted(second))]


def _moved(old: list[Cluster], rng: Random) -> list[Cluster]:
    source, target = rng.sample(old[:2], 2)
    if len(source) == 1:
        source, target = target, source
    node = rng.choice(source)
    first = {*source} - {node}
    changed = [tuple(sorted(first)), tuple(sorted((*target, node)))]
    return [*old[2:], *filter(None, changed)]


def halves(pool: NodePool, cluster: Cluster, rng: Random) -> tuple[Cluster, Cluster]:
    """Divide a cluster in two: similar nodes together, or both halves similar."""
    key = rng.choice(("ram", "bandwidth", "flops"))
    ranked = sorted(cluster, key=lambda node: (getattr(pool.machines[node], key), node))
    if rng.random() < 0.5:
        middle = len(ranked) // 2
        first, second = ranked[:middle], ranked[middle:]
    else:
        first, second = ranked[::2], ranked[1::2]
    return tuple(sorted(first)), tuple(sorted(second))
