"""Where to cut the model for machines in a given order: the exact optimum.

The best cut has the shortest slowest part, stage or link, with every stage within its machine's
RAM. Of several such cuts the one with the least sum of the fourth powers of all times is taken:
where the slowest part is fixed the others are still balanced, which is what holds up when the
estimates are off.

Three steps: a bisection that cuts greedily finds a good cut, dynamic programming over all cuts
finds a better one or shows that there is none, and a second pass of it balances. The first only
makes the second fast: a part that is not faster than the best known cut need not be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ravnest.plan.candidate_cuts import chosen_cuts
from ravnest.plan.cost import ModelCosts, NodeCapacity, link_seconds_per_byte
from ravnest.plan.memory import FloatArray
from ravnest.plan.ranges import IntArray

GRID_CELLS = 400_000
"""Stages looked at in one go; bounds the memory of the search."""
COARSE_CUTS = 300
"""Cuts tried first where the greedy cut finds nothing, and all that the balancing looks at."""
ROUNDING = 1e-9
"""Sums of work are rounded; a bound on them is taken this much wider."""


@dataclass(frozen=True)
class Cuts:
    """A cut of the model: stage k holds the units ``bounds[k]`` to ``bounds[k + 1] - 1``."""

    bounds: tuple[int, ...]
    seconds: float
    """Time of the slowest stage or link for one micro-batch."""


def best_cuts(costs: ModelCosts, order: Sequence[NodeCapacity]) -> Cuts | None:
    """The optimum for machines in this order, or None where no cut fits their RAM."""
    if len(order) > costs.units:
        return None
    everywhere = np.arange(costs.units + 1)
    coarse = chosen_cuts(costs, COARSE_CUTS)
    pipeline = _Pipeline(costs, tuple(order))
    best = greedy_cuts(costs, order) or pipeline.solve(coarse, np.inf, np.maximum)
    limit = np.inf if best is None else float(np.nextafter(best.seconds, 0))
    best = pipeline.solve(everywhere, limit, np.maximum) or best
    if best is None:
        return None
    near = np.array(sorted({*coarse.tolist(), *best.bounds}))
    return pipeline.solve(near, best.seconds, _balancing(best.seconds)) or best


def greedy_cuts(costs: ModelCosts, order: Sequence[NodeCapacity], rounds: int = 30) -> Cuts | None:
    """A good cut, fast: bisects the time and gives each stage, Leaf first, all that it can take.

    May miss the optimum, and with very little RAM a cut that exists: taking less is now and then
    better, because what crosses a cut does not grow with the stage.
    """
    pipeline = _Pipeline(costs, tuple(order))
    best = pipeline.fill(np.inf) if len(order) <= costs.units else None
    if best is None:
        return None
    low = float(costs.work.prefix[-1]) / sum(machine.flops for machine in order)
    for _ in range(rounds):
        if best.seconds <= low * (1 + 1e-9):
            break
        middle = (low + best.seconds) / 2
        found = pipeline.fill(middle)
        if found is None:
            low = middle
        else:
            best = found
    return best


_Rule = Callable[[FloatArray, FloatArray], FloatArray]
"""Joins the times of new parts with the value of what lies behind them."""


def _balancing(slowest: float) -> _Rule:
    scale = slowest or 1.0

    def rule(seconds: FloatArray, behind: FloatArray) -> FloatArray:
        return np.asarray((seconds / scale) ** 4 + behind)

    return rule


@dataclass(frozen=True)
class _Pipeline:
    costs: ModelCosts
    order: tuple[NodeCapacity, ...]

    def cuts(self, bounds: Sequence[int]) -> Cuts:
        """A cut with its time."""
        costs, order = self.costs, self.order
        stages = (
            costs.compute_seconds(bounds[k], bounds[k + 1], machine) for k, machine in enumerate(order)
        )
        links = (costs.link_seconds(bounds[k], order[k - 1], order[k]) for k in range(1, len(order)))
        return Cuts(tuple(bounds), max((*stages, *links)))

    def link(self, boundary: int, cuts: IntArray) -> FloatArray:
        """Seconds of the link in front of stage ``boundary`` for each cut; none before the Root."""
        if boundary == 0:
            return np.zeros(len(cuts))
        one, other = self.order[boundary - 1 : boundary + 1]
        return self.costs.link_bytes[cuts] * link_seconds_per_byte(one, other)

    def fill(self, limit: float) -> Cuts | None:
        """Give each stage from the Leaf on the most units that ``limit`` and its RAM allow."""
        prefix = self.costs.work.prefix
        bounds = [self.costs.units]
        for k in reversed(range(len(self.order))):
            machine, stop = self.order[k], bounds[-1]
            low = max(k, int(np.searchsorted(prefix, prefix[stop] - limit * machine.flops)))
            starts = np.arange(low, stop) if k else np.arange(low, min(stop, 1))
            starts = starts[self.link(k, starts) <= limit]
            start = self.first_that_fits(starts, stop, machine.ram, len(self.order) - k)
            if start is None:
                return None
            bounds.append(start)
        return self.cuts(bounds[::-1])

    def first_that_fits(self, starts: IntArray, stop: int, ram: float, in_flight: int) -> int | None:
        """The first start whose stage fits the RAM; looks at few where many fit."""
        stops = np.array([stop])
        for piece in (starts[:16], starts[16:]):
            if len(piece):
                fits = self.costs.memory_grid(piece, stops, in_flight)[:, 0] <= ram
                if fits.any():
                    return int(piece[np.argmax(fits)])
        return None

    def solve(self, cuts: IntArray, limit: float, rule: _Rule) -> Cuts | None:
        """Dynamic programming from the Leaf to the Root over the given cuts.

        Least value under ``rule`` with no part slower than ``limit``; None where there is none.
        """
        candidates = self.windows(cuts, limit)
        if any(len(window) == 0 for window in candidates):
            return None
        value, choices = np.zeros(1), []
        for k in reversed(range(len(self.order))):
            value, choice = self.step(k, candidates[k], candidates[k + 1], (value, limit), rule)
            alive = np.isfinite(value)
            candidates[k], value = candidates[k][alive], value[alive]
            choices.append(choice[alive])
            if not len(value):
                return None
        bounds, at = [0], 0
        for choice in reversed(choices):
            bounds.append(int(choice[at]))
            at = int(np.searchsorted(candidates[len(bounds) - 1], bounds[-1]))
        return self.cuts(bounds)

    def windows(self, cuts: IntArray, limit: float) -> list[IntArray]:
        """For each boundary the cuts that it may take; some window is empty where nothing fits.

        Bounded by how far the stages in front can get at most, and those behind; both follow from
        the work and the inner memory, which only grow with a stage.
        """
        order, units = self.order, self.costs.units
        first, last = [units], [0]
        for k in range(len(order) - 1):
            last.append(min(self.furthest(k, last[-1], limit), units - (len(order) - k - 1)))
        for k in reversed(range(1, len(order))):
            first.append(max(self.earliest(k, first[-1], limit), k))
        windows = [np.array([0])]
        for k, (low, high) in enumerate(zip(first[:0:-1], last[1:], strict=True), start=1):
            window = cuts[(cuts >= low) & (cuts <= high)]
            windows.append(window[self.link(k, window) <= limit])
        return [*windows, np.array([units])]

    def furthest(self, k: int, start: int, limit: float) -> int:
        """The last stop that stage ``k`` can have from this start, by work and inner memory."""
        prefix, machine = self.costs.work.prefix, self.order[k]
        reach = (prefix[start] + limit * machine.flops) * (1 + ROUNDING)
        stops = np.arange(start + 1, int(np.searchsorted(prefix, reach, side="right")))
        if not len(stops):
            return start
        memory = self.costs.inner_memory_grid(np.array([start]), stops, len(self.order) - k)[0]
        return start + int(np.searchsorted(memory, machine.ram, side="right"))

    def earliest(self, k: int, stop: int, limit: float) -> int:
        """The first start that stage ``k`` can have to this stop."""
        prefix, machine = self.costs.work.prefix, self.order[k]
        reach = (prefix[stop] - limit * machine.flops) - ROUNDING * prefix[-1]
        starts = np.arange(int(np.searchsorted(prefix, reach)), stop)
        if not len(starts):
            return stop
        memory = self.costs.inner_memory_grid(starts, np.array([stop]), len(self.order) - k)[:, 0]
        return stop - int(np.searchsorted(memory[::-1], machine.ram, side="right"))

    def step(
        self,
        k: int,
        starts: IntArray,
        stops: IntArray,
        known: tuple[FloatArray, float],
        rule: _Rule,
    ) -> tuple[FloatArray, IntArray]:
        """Best value of the stages from ``k`` on for each start of stage ``k``, and its stop."""
        behind, limit = known
        value = np.full(len(starts), np.inf)
        choice = np.zeros(len(starts), dtype=np.int64)
        prefix, flops = self.costs.work.prefix, self.order[k].flops
        stop_work = prefix[stops]
        row = 0
        while row < len(starts):
            reach = (prefix[starts[row:]] + limit * flops) * (1 + ROUNDING)
            first = int(np.searchsorted(stops, starts[row], side="right"))
            band = int(np.searchsorted(stop_work, reach[0], side="right")) - first
            rows = max(1, min(len(starts) - row, max(band, 64), GRID_CELLS // max(1, 2 * band)))
            some = starts[row : row + rows]
            last = int(np.searchsorted(stop_work, reach[rows - 1], side="right"))
            if last > first:
                grid = self.grid(k, some, stops[first:last], (behind[first:last], limit), rule)
                best = np.argmin(grid, axis=1)
                value[row : row + rows] = grid[np.arange(rows), best]
                choice[row : row + rows] = stops[first + best]
            row += rows
        return np.asarray(rule(self.link(k, starts), value)), choice

    def grid(
        self,
        k: int,
        starts: IntArray,
        stops: IntArray,
        known: tuple[FloatArray, float],
        rule: _Rule,
    ) -> FloatArray:
        """Value of each start with each stop; infinite where the stage is too slow or too big."""
        behind, limit = known
        machine = self.order[k]
        seconds = self.costs.work.grid(starts, stops) / machine.flops
        memory = self.costs.memory_grid(starts, stops, len(self.order) - k)
        value = rule(seconds, behind[None, :])
        value[(seconds > limit) | (memory > machine.ram)] = np.inf
        return value
