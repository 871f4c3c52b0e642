"""Local search: better clusters from good ones.

Two or three clusters at a time give up their nodes. Few nodes are grouped anew exactly; of many,
single nodes move or change places, and clusters join or part.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from ravnest.plan.grouping import Cluster, Grouping, Pool, best_grouping

EXACT_NODES = 6
"""As many nodes are grouped anew exactly."""
TRIES = 48
"""Of more nodes, so many divided by the number of nodes are tried in other places."""
PATIENCE = 3
"""Sweeps in a row without any gain before it stops."""
NEIGHBOURS = 4
"""Clusters look among so many on either side, in order of bandwidth, for others to mix with."""


def polished(pool: Pool, grouping: Grouping, rng: Random, budget: int) -> Grouping:
    """A grouping that is at least as good; stops when little helps or the budget is spent."""
    clusters = list(grouping)
    score, stale = pool.total(clusters), 0
    while stale < PATIENCE and pool.orders.effort < budget and not pool.is_ideal(score):
        clusters = _sweep(pool, clusters, rng, budget)
        before, score = score, pool.total(clusters)
        stale = 0 if score > before else stale + 1
    return tuple(clusters)


def _sweep(pool: Pool, clusters: list[Cluster], rng: Random, budget: int) -> list[Cluster]:
    """Each cluster once in the middle of a change."""
    clusters = sorted(clusters, key=lambda cluster: _bandwidth(pool, cluster))
    for position in rng.sample(range(len(clusters)), len(clusters)):
        if pool.orders.effort >= budget:
            break
        if position >= len(clusters):  # earlier changes left fewer clusters
            continue
        chosen = _together(clusters, position, rng)
        old = [clusters[index] for index in chosen]
        new = _regrouped(pool, old, rng, budget)
        if pool.total(new) > pool.total(old):
            kept = [cluster for index, cluster in enumerate(clusters) if index not in chosen]
            clusters = sorted([*kept, *new], key=lambda cluster: _bandwidth(pool, cluster))
    return clusters


def _bandwidth(pool: Pool, cluster: Cluster) -> tuple[float, Cluster]:
    """The slowest link is what a cluster's company matters for most."""
    return min(pool.machines[node].bandwidth for node in cluster), cluster


def _together(clusters: list[Cluster], position: int, rng: Random) -> set[int]:
    """A cluster with others near it, as many as can be grouped anew exactly, but two at least."""
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


def _regrouped(pool: Pool, old: list[Cluster], rng: Random, budget: int) -> list[Cluster]:
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


def _changes(pool: Pool, old: list[Cluster], rng: Random) -> Iterator[list[Cluster]]:
    if len(old) > 1:
        for _ in range(max(2, TRIES // len(old[0] + old[1]))):
            yield _swapped(pool, old, rng)
            yield _moved(old, rng)
    if pool.clusters is None:
        if len(old) > 1:
            yield [*old[2:], tuple(sorted(old[0] + old[1]))]
        if len(old[0]) >= 4:
            yield [*old[1:], *halves(pool, old[0], rng)]


def _swapped(pool: Pool, old: list[Cluster], rng: Random) -> list[Cluster]:
    """Two nodes change places; every other time two with about the same RAM, so that it fits."""
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
    parts = [tuple(sorted(first)), tuple(sorted((*target, node)))]
    return [*old[2:], *filter(None, parts)]


def halves(pool: Pool, cluster: Cluster, rng: Random) -> tuple[Cluster, Cluster]:
    """A cluster parted in two: alike nodes together, or both halves alike."""
    key = rng.choice(("ram", "bandwidth", "flops"))
    ranked = sorted(cluster, key=lambda node: (getattr(pool.machines[node], key), node))
    if rng.random() < 0.5:
        middle = len(ranked) // 2
        first, second = ranked[:middle], ranked[middle:]
    else:
        first, second = ranked[::2], ranked[1::2]
    return tuple(sorted(first)), tuple(sorted(second))
