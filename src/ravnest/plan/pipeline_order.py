"""Search for the best order of a set of machines in a pipeline, and its speed.

The search works on candidate cuts, from the Leaf backwards. A **tail** is the last stages of a
pipeline. Its vector holds, for each cut, the time of the slowest stage or link if the tail starts at
that cut (infinite if it does not fit). A machine in front of a tail gives the next longer tail. The
number of micro-batches that a stage has in flight depends only on the length of its tail, so all
clusters share the cached tails.

Up to ``exact_length`` machines, all orders are compared: for each set of machines, the best tail that
starts with each of them is cached. For longer pipelines the best of a few heuristic orders is taken
while clusters are compared; ``refined`` then runs a beam search over the tails of each length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ravnest.plan.cost import ModelCosts, NodeCapacity
from ravnest.plan.cuts import greedy_cuts
from ravnest.plan.memory import FloatArray, MemoryRange
from ravnest.plan.ranges import IntArray

Kinds = tuple[int, ...]
"""Machines of a pipeline as indices into the list of distinct machines."""

CACHE_BYTES = 64_000_000
"""Size limit of each cached table."""
BEAM_WIDTH = 6
"""Tails of each length that the beam search keeps."""
BEAM_CHOICES = 8
"""Machines that the beam search tries in front of a tail."""
GRID_LENGTH = 32
"""Longest pipeline that is searched on candidate cuts; longer ones are cut greedily, on all cuts."""
GREEDY_ROUNDS = 10
"""Bisection steps of a greedy cut during the search."""
CALL_EFFORT = 3_000
"""Fixed effort of any step, in grid cells."""
GREEDY_EFFORT = 14_000
"""Effort of one stage of a greedy cut, in grid cells."""
STAGE_EFFORT, MEMORY_EFFORT = 4, 30
"""Effort to create each cell of these tables."""


@dataclass(frozen=True)
class PipelineOrder:
    """Machines in pipeline order, Root first, and the time of the slowest stage or link."""

    kinds: Kinds
    seconds: float


class OrderSearch:
    """Search for the fastest pipeline order of any set of a pool's machines, with cached results."""

    def __init__(
        self, costs: ModelCosts, machines: Iterable[NodeCapacity], cuts: IntArray, exact_length: int
    ) -> None:
        self.costs = costs
        # Most RAM first: among equal orders the first is taken, and the Root has most in flight.
        self.kinds = sorted(
            set(machines),
            key=lambda m: (-m.ram, -m.bandwidth, -m.flops, -1 if m.node is None else m.node),
        )
        self.cuts = cuts
        self.exact_length = exact_length
        self.effort = 0
        """Approximate number of grid cells evaluated so far; does not depend on the computer's speed."""
        self._needed = costs.smallest_total
        self._work = costs.work.grid(cuts, cuts)
        self._leaf_memory = costs.memory_grid(cuts, cuts[-1:], behind=1)
        grids = max(4, CACHE_BYTES // (16 * len(cuts) ** 2))
        vectors = max(4, CACHE_BYTES // (8 * len(cuts)))
        self._stem_memory = lru_cache(grids)(self._stem_memory_of)
        self._root_memory = lru_cache(vectors)(self._root_memory_of)
        self._stage = lru_cache(grids)(self._stage_of)
        self._root = lru_cache(vectors)(self._root_of)
        self._leaf = lru_cache(vectors)(self._leaf_of)
        self._tail = lru_cache(vectors)(self._tail_of)
        self._link = lru_cache(vectors)(self._link_of)
        self._best: dict[Kinds, PipelineOrder | None] = {}

    def best(self, kinds: Kinds) -> PipelineOrder | None:
        """Return the fastest order found for these machines; None if no order fits their RAM."""
        kinds = tuple(sorted(kinds))
        if kinds not in self._best:
            self._best[kinds] = self._search(kinds)
        return self._best[kinds]

    def refined(self, kinds: Kinds) -> PipelineOrder | None:
        """Return the same as ``best``, with more effort for longer pipelines."""
        best = self.best(kinds)
        if len(kinds) <= self.exact_length:
            return best
        if self._fine_enough(kinds):
            return _fastest((best, self._beam(tuple(sorted(kinds)))))
        return _fastest((best, *map(self._greedy, self._sorted_orders(kinds))))

    def _search(self, kinds: Kinds) -> PipelineOrder | None:
        count = len(kinds)
        self.effort += CALL_EFFORT * count
        if count > self.costs.units or sum(self.kinds[k].ram for k in kinds) < self._needed:
            return None
        if count <= self.exact_length and count < len(self.cuts):
            return self._exact(kinds)
        orders = self._sorted_orders(kinds)
        if self._fine_enough(kinds):
            return _fastest(map(self._chain, orders))
        return next(filter(None, map(self._greedy, orders)), None)

    def _fine_enough(self, kinds: Kinds) -> bool:
        """Return True if the candidate cuts suffice for a pipeline of this length."""
        return 3 * len(kinds) <= len(self.cuts) and len(kinds) <= GRID_LENGTH

    # Exact search: every order of a small set.

    def _exact(self, kinds: Kinds) -> PipelineOrder | None:
        """Find the time of the best pipeline, then its machines one by one from the Root."""
        if len(kinds) == 1:
            seconds = float(self._leaf(kinds[0])[0])
            return PipelineOrder(kinds, seconds) if np.isfinite(seconds) else None
        found = [(*self._front(kind, _without(kinds, kind)), kind) for kind in sorted(set(kinds))]
        seconds, cut, kind = min(found)
        if not np.isfinite(seconds):
            return None
        chain, rest = [kind], _without(kinds, kind)
        while len(rest) > 1:
            found = [(*self._next(chain[-1], kind, rest, cut), kind) for kind in sorted(set(rest))]
            _, cut, kind = min(found)
            chain.append(kind)
            rest = _without(rest, kind)
        return PipelineOrder((*chain, *rest), seconds)

    def _front(self, kind: int, rest: Kinds) -> tuple[float, int]:
        """Return the time of the best pipeline with ``kind`` as Root, and its first cut."""
        values = np.maximum(self._root(kind, len(rest) + 1), self._behind(kind, rest))
        cut = int(np.argmin(values))
        return float(values[cut]), cut

    def _next(self, before: int, kind: int, kinds: Kinds, cut: int) -> tuple[float, int]:
        """Return time and next cut of the best tail of ``kinds`` at ``cut`` with ``kind`` first."""
        rest = _without(kinds, kind)
        values = np.maximum(self._stage(kind, len(kinds))[cut], self._behind(kind, rest))
        stop = int(np.argmin(values))
        return max(float(values[stop]), float(self._link(before, kind)[cut])), stop

    def _behind(self, kind: int, rest: Kinds) -> FloatArray:
        """Return, for each cut, the best tail of ``rest`` including the link from ``kind`` to it."""
        tails = [
            np.maximum(self._link(kind, first), self._tail(rest, first)) for first in sorted(set(rest))
        ]
        return tails[0] if len(tails) == 1 else np.minimum.reduce(tails)

    def _tail_of(self, kinds: Kinds, first: int) -> FloatArray:
        """Return the vector of the best tail of exactly these machines that starts with ``first``."""
        rest = _without(kinds, first)
        if not rest:
            return self._leaf(first)
        return self._extended(first, len(kinds), self._behind(first, rest))

    def _extended(self, kind: int, in_flight: int, behind: FloatArray) -> FloatArray:
        """Return the vector of a tail with ``kind`` in front; ``behind`` includes the link."""
        reachable = np.flatnonzero(np.isfinite(behind))
        if not len(reachable):
            return behind
        low, high = int(reachable[0]), int(reachable[-1]) + 1
        stage = self._stage(kind, in_flight)[:high, low:high]
        self.effort += CALL_EFFORT + stage.size
        result = np.full(len(behind), np.inf)
        result[:high] = np.maximum(stage, behind[low:high]).min(axis=1)
        return result

    # Beam search: the best tails of each length.

    def _beam(self, kinds: Kinds) -> PipelineOrder | None:
        states = [self._leaf_tail(kind, _without(kinds, kind)) for kind in sorted(set(kinds))]
        for in_flight in range(2, len(kinds)):
            longer: dict[tuple[Kinds, int], tuple[float, _Tail]] = {}
            for state in self._best_tails(states, in_flight):
                for kind in _spread(state.rest):
                    tail = self._prepend(kind, state)
                    key = (tail.rest, kind)
                    score = self._lower_bound(tail, in_flight + 1)
                    if np.isfinite(score) and (key not in longer or score < longer[key][0]):
                        longer[key] = (score, tail)
            states = [tail for _, tail in longer.values()]
        return self._finish(states)

    def _best_tails(self, states: list[_Tail], in_flight: int) -> list[_Tail]:
        scored = [(self._lower_bound(state, in_flight), state.chain, state) for state in states]
        scored.sort(key=lambda item: item[:2])
        return [state for score, _, state in scored[:BEAM_WIDTH] if np.isfinite(score)]

    def _lower_bound(self, tail: _Tail, in_flight: int) -> float:
        """Return a lower bound for pipelines with this tail: the rest shares its work ideally."""
        self.effort += CALL_EFFORT
        bound = np.maximum(tail.vector, self._work[0] / tail.flops)
        fits = self._root_memory(in_flight).least[0] <= tail.ram
        return float(np.minimum.reduce(bound, where=fits, initial=np.inf))

    def _prepend(self, kind: int, tail: _Tail) -> _Tail:
        behind = np.maximum(self._link(kind, tail.chain[0]), tail.vector)
        vector = self._extended(kind, len(tail.chain) + 1, behind)
        machine, rest = self.kinds[kind], _without(tail.rest, kind)
        flops, ram = tail.flops - machine.flops, tail.ram - machine.ram
        return _Tail((kind, *tail.chain), rest, flops, ram, vector)

    def _leaf_tail(self, kind: int, rest: Kinds) -> _Tail:
        flops = sum(self.kinds[other].flops for other in rest)
        ram = sum(self.kinds[other].ram for other in rest)
        return _Tail((kind,), rest, flops, ram, self._leaf(kind))

    def _finish(self, states: Sequence[_Tail]) -> PipelineOrder | None:
        """Put the last machine in front of each tail as Root; return the fastest pipeline that fits."""
        best: PipelineOrder | None = None
        for state in states:
            (kind,) = state.rest
            behind = np.maximum(self._link(kind, state.chain[0]), state.vector)
            stage = self._root(kind, len(state.chain) + 1)
            seconds = float(np.maximum(stage, behind).min())
            if np.isfinite(seconds) and (best is None or seconds < best.seconds):
                best = PipelineOrder((kind, *state.chain), seconds)
        return best

    # Heuristic orders.

    def _sorted_orders(self, kinds: Kinds) -> Iterator[Kinds]:
        """Yield orders by RAM per speed, by RAM and by bandwidth; the Root has the most in flight."""
        machines = self.kinds
        yield tuple(sorted(kinds, key=lambda k: (-machines[k].ram / machines[k].flops, k)))
        yield tuple(sorted(kinds, key=lambda k: (-machines[k].ram, k)))
        yield tuple(sorted(kinds, key=lambda k: (-machines[k].bandwidth, k)))

    def _chain(self, order: Kinds) -> PipelineOrder | None:
        tail = self._leaf_tail(order[-1], order[:-1])
        for kind in reversed(order[1:-1]):
            tail = self._prepend(kind, tail)
        return self._finish([tail])

    def _greedy(self, order: Kinds) -> PipelineOrder | None:
        self.effort += GREEDY_ROUNDS * GREEDY_EFFORT * len(order)
        cuts = greedy_cuts(self.costs, [self.kinds[kind] for kind in order], GREEDY_ROUNDS)
        return None if cuts is None else PipelineOrder(order, cuts.seconds)

    # Cached tables.

    def _stem_memory_of(self, in_flight: int) -> MemoryRange[FloatArray]:
        self.effort += MEMORY_EFFORT * len(self.cuts) ** 2
        return self.costs.memory_grid(self.cuts, self.cuts, in_flight)

    def _root_memory_of(self, in_flight: int) -> MemoryRange[FloatArray]:
        return self.costs.memory_grid(self.cuts[:1], self.cuts, in_flight)

    def _stage_of(self, kind: int, in_flight: int) -> FloatArray:
        self.effort += STAGE_EFFORT * len(self.cuts) ** 2
        return self._seconds(kind, self._work, self._stem_memory(in_flight), in_flight)

    def _root_of(self, kind: int, in_flight: int) -> FloatArray:
        seconds = self._seconds(kind, self._work[:1], self._root_memory(in_flight), in_flight)
        return np.asarray(seconds[0])

    def _leaf_of(self, kind: int) -> FloatArray:
        return self._seconds(kind, self._work[:, -1:], self._leaf_memory, 1)[:, 0]

    def _seconds(
        self, kind: int, work: FloatArray, needs: MemoryRange[FloatArray], behind: int
    ) -> FloatArray:
        """Return the times of stages on a machine; infinite for those that do not fit."""
        return self.costs.seconds_grid(work, needs, self.kinds[kind], behind)

    def _link_of(self, one: int, other: int) -> FloatArray:
        return self.costs.link_grid(self.cuts, self.kinds[one], self.kinds[other])


@dataclass(frozen=True)
class _Tail:
    """Last stages of a pipeline, during the beam search."""

    chain: Kinds
    """Machines of the tail, nearest to the Root first."""
    rest: Kinds
    """Machines that still go in front."""
    flops: float
    """Speed of the rest together."""
    ram: float
    """RAM of the rest together."""
    vector: FloatArray
    """For each cut, the time of the slowest stage or link if the tail starts there."""


def _fastest(orders: Iterable[PipelineOrder | None]) -> PipelineOrder | None:
    return min(filter(None, orders), key=lambda order: order.seconds, default=None)


def _without(kinds: Kinds, kind: int) -> Kinds:
    at = kinds.index(kind)
    return kinds[:at] + kinds[at + 1 :]


def _spread(kinds: Kinds) -> list[int]:
    """Return the distinct machines, or an even selection if there are many."""
    distinct = sorted(set(kinds))
    if len(distinct) <= BEAM_CHOICES:
        return distinct
    step = (len(distinct) - 1) / (BEAM_CHOICES - 1)
    return [distinct[round(index * step)] for index in range(BEAM_CHOICES)]
