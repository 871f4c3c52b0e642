"""Genetic search for the clusters of a large pool.

An individual is a grouping of the nodes into clusters. Its genes are whole clusters: a child takes some
clusters from one parent, then from the other parent those that do not overlap with them. The remaining
nodes are placed where they help most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random

from ravnest.plan.grouping import Cluster, Grouping, GroupingScore, NodePool, expected_length
from ravnest.plan.local_search import halves

POPULATION = 24
CHILDREN = 240
COUNT_STEP = 0.85
"""Ratio between successive numbers of clusters that the first generation tries."""
BAND = 5
"""Clusters per band in a third of the first generation; similar nodes are dealt within a band."""
INSERT_TRIES = 6
"""Clusters that are tried for each remaining node."""


def evolve(pool: NodePool, rng: Random, budget: int) -> list[Grouping]:
    """Return the last generation, best first; some of its clusters may not fit if RAM is scarce."""
    population = _ranked(pool, _founders(pool, rng, budget))[:POPULATION]
    for _ in range(CHILDREN):
        if pool.orders.effort >= budget or pool.is_ideal(population[0][0]):
            break
        one, other = _parent(population, rng), _parent(population, rng)
        child = _mutated(pool, _child(pool, one, other, rng), rng)
        score = pool.total(child)
        if score > population[-1][0] and all(child != grouping for _, grouping in population):
            population[-1] = (score, child)
            population.sort(key=lambda item: item[0], reverse=True)
    return [grouping for _, grouping in population]


def _ranked(pool: NodePool, groupings: Iterator[Grouping]) -> list[tuple[GroupingScore, Grouping]]:
    different = list(dict.fromkeys(groupings))
    scored = [(pool.total(grouping), grouping) for grouping in different]
    return sorted(scored, key=lambda item: item[0], reverse=True)


def _parent(population: Sequence[tuple[GroupingScore, Grouping]], rng: Random) -> Grouping:
    """Return the better of two random individuals; the population is sorted, best first."""
    return population[min(rng.randrange(len(population)), rng.randrange(len(population)))][1]


# First generation: similar nodes together, or all clusters similar.


def _founders(pool: NodePool, rng: Random, budget: int) -> Iterator[Grouping]:
    """Yield at least one grouping, and more while the budget lasts; the caller scores each one."""
    rankings = list(_rankings(pool, rng))
    for ranked in rankings:
        yield from _chunked(pool, ranked, budget)
        if pool.orders.effort >= budget:
            return
    if pool.clusters is None:
        for ranked in rankings:
            yield _filled(pool, ranked, rng)
            if pool.orders.effort >= budget:
                return


def _chunked(pool: NodePool, ranked: list[int], budget: int) -> Iterator[Grouping]:
    """Yield groupings from many clusters to few, while the score improves."""
    best, worse = None, 0
    for count in _cluster_counts(pool):
        founders = [_banded(pool, ranked, count, width) for width in (1, BAND, count)]
        yield from founders
        score = max(pool.total(founder) for founder in founders)
        worse = worse + 1 if best is not None and score < best else 0
        best = score if best is None else max(best, score)
        if worse == 2 or (best.placed == len(ranked) and pool.orders.effort >= budget):
            return


def _rankings(pool: NodePool, rng: Random) -> Iterator[list[int]]:
    nodes = range(len(pool.machines))
    for keys in (("bandwidth", "flops"), ("flops", "ram"), ("ram", "bandwidth")):
        yield sorted(nodes, key=lambda node: ([getattr(pool.machines[node], key) for key in keys], node))
    yield rng.sample(nodes, len(nodes))


def _cluster_counts(pool: NodePool) -> list[int]:
    if pool.clusters is not None:
        return [pool.clusters]
    most = round(1.3 * len(pool.machines) / expected_length(pool.orders.costs, pool.machines))
    counts = [max(1, min(len(pool.machines) // 2, most))]
    while counts[-1] > 1:
        counts.append(min(counts[-1] - 1, round(counts[-1] * COUNT_STEP)))
    return counts


def _banded(pool: NodePool, ranked: list[int], count: int, width: int) -> Grouping:
    """Put similar nodes into bands of ``width`` clusters, and divide the RAM evenly within each band.

    Width 1 puts similar nodes together; a single band makes all clusters similar.
    """
    clusters: list[list[int]] = []
    for first in range(0, count, width):
        last = min(first + width, count)
        edges = [round(edge * len(ranked) / count) for edge in (first, last)]
        band = sorted(ranked[slice(*edges)], key=lambda node: (-pool.machines[node].ram, node))
        places = last - first
        dealt: list[list[int]] = [[] for _ in range(places)]
        for turn, node in enumerate(band):
            place = turn % places
            dealt[place if turn // places % 2 == 0 else places - 1 - place].append(node)
        clusters += dealt
    return _grouping(clusters)


def _filled(pool: NodePool, ranked: Sequence[int], rng: Random) -> Grouping:
    """Close each cluster as soon as it can hold the model."""
    done: list[Cluster] = []
    growing: list[int] = []
    for node in ranked:
        growing.append(node)
        if (len(growing) >= 2 or pool.orders.costs.units == 1) and pool.order(growing) is not None:
            done.append(tuple(sorted(growing)))
            growing = []
    if not done:
        return _grouping([growing])
    return _placed(pool, done, growing, rng)


# Crossover and mutation.


def _child(pool: NodePool, one: Grouping, other: Grouping, rng: Random) -> Grouping:
    fitting = [cluster for cluster in one if pool.order(cluster) is not None]
    kept = rng.sample(fitting, rng.randint(0, len(fitting)))
    used = {node for cluster in kept for node in cluster}
    for cluster in other:
        if used.isdisjoint(cluster) and pool.order(cluster) is not None:
            kept.append(cluster)
            used.update(cluster)
    left = [node for node in range(len(pool.machines)) if node not in used]
    if not kept:
        return one
    if pool.clusters is None:
        return _placed(pool, kept, left, rng)
    return _with_count(pool, kept, left, rng)


def _placed(pool: NodePool, clusters: list[Cluster], left: Sequence[int], rng: Random) -> Grouping:
    """Form new clusters of the remaining nodes if they can hold the model, else add them to others."""
    clusters = list(clusters)
    growing: list[int] = []
    for node in sorted(left, key=lambda node: (pool.machines[node].bandwidth, node)):
        growing.append(node)
        if len(growing) >= 2 and pool.order(growing) is not None:
            clusters.append(tuple(sorted(growing)))
            growing = []
    for node in growing:
        _insert(pool, clusters, node, rng)
    return _grouping(clusters)


def _insert(pool: NodePool, clusters: list[Cluster], node: int, rng: Random) -> None:
    """Add a node to the cluster that gains most, or loses least, among a few random ones."""
    tried = rng.sample(range(len(clusters)), min(INSERT_TRIES, len(clusters)))

    def gain(index: int) -> tuple[int, int, float, int]:
        before, after = pool.score(clusters[index]), pool.score((*clusters[index], node))
        placed, paired, worth = (new - old for new, old in zip(after, before, strict=True))
        return int(placed), int(paired), worth, index

    best = max(tried, key=gain)
    clusters[best] = tuple(sorted((*clusters[best], node)))


def _with_count(pool: NodePool, kept: list[Cluster], left: Sequence[int], rng: Random) -> Grouping:
    """Make the requested number of clusters: dissolve surplus ones, or divide the largest."""
    clusters = sorted(kept, key=lambda cluster: (pool.score(cluster), cluster), reverse=True)
    left = [*left, *(node for cluster in clusters[pool.clusters :] for node in cluster)]
    clusters = clusters[: pool.clusters]
    missing = (pool.clusters or 0) - len(clusters)
    seeds = [tuple(sorted(left[first::missing])) for first in range(missing)]
    if missing and all(seeds):
        return _grouping([*clusters, *seeds])
    for node in left:
        _insert(pool, clusters, node, rng)
    while len(clusters) < (pool.clusters or 0):
        largest = max(clusters, key=lambda cluster: (len(cluster), cluster))
        clusters.remove(largest)
        clusters.extend(halves(pool, largest, rng))
    return _grouping(clusters)


def _mutated(pool: NodePool, grouping: Grouping, rng: Random) -> Grouping:
    clusters = list(grouping)
    rng.shuffle(clusters)
    if len(clusters) < 2:
        return grouping
    draw = rng.random()
    first, second, *rest = clusters
    if draw < 0.4:
        one, other = rng.choice(first), rng.choice(second)
        return _grouping([*rest, {*first, other} - {one}, {*second, one} - {other}])
    if draw < 0.6 and len(first) > 1:
        node = rng.choice(first)
        return _grouping([*rest, {*first} - {node}, {*second, node}])
    if draw < 0.7 and pool.clusters is None:
        return _grouping([*rest, first + second])
    if draw < 0.8 and pool.clusters is None and len(first) >= 4:
        return _grouping([*rest, second, *halves(pool, first, rng)])
    return grouping


def _grouping(clusters: Iterable[Iterable[int]]) -> Grouping:
    """Return the canonical form, so that equal groupings are equal values."""
    return tuple(sorted(tuple(sorted(cluster)) for cluster in clusters))
