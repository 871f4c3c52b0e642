"""Optimal cut points of a model for machines in a given order.

The best cuts minimise the time of the slowest stage or link, with every stage within its machine's
RAM. Among equally fast cuts the one with the least sum of the fourth powers of all times is taken: it
also balances the faster stages, so the plan stays good if the estimates are wrong.

There are four steps. A bisection that cuts greedily finds good cuts. Dynamic programming over a few
hundred candidate cuts finds better ones where a greedy stage reaches a cut with a slow link. Dynamic
programming over all cuts finds the best ones or proves that there are no better ones. A last dynamic
program balances them. The first two steps only make the third fast, which can skip every stage that is
slower than the best known cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ravnest.plan.candidate_cuts import candidate_cuts
from ravnest.plan.cost import ModelCosts, NodeCapacity
from ravnest.plan.memory import FloatArray
from ravnest.plan.ranges import IntArray

GRID_CELLS = 400_000
"""Stages that are evaluated at once; bounds the memory of the search."""
COARSE_CUTS = 300
"""Candidate cuts of the second and of the balancing step."""
ROUNDING = 1e-9
"""Relative slack for bounds on sums of work, which are rounded."""


@dataclass(frozen=True)
class PipelineCuts:
    """Cut points of a pipeline: stage k holds the units ``bounds[k]`` to ``bounds[k + 1] - 1``."""

    bounds: tuple[int, ...]
    seconds: float
    """Time of the slowest stage or link for one micro-batch."""


def best_cuts(costs: ModelCosts, order: Sequence[NodeCapacity]) -> PipelineCuts | None:
    """Return the optimal cuts for machines in this order; None if no cuts fit their RAM."""
    if len(order) > costs.units:
        return None
    everywhere = np.arange(costs.units + 1)
    coarse = candidate_cuts(costs, COARSE_CUTS)
    pipeline = _Pipeline(costs, tuple(order))
    best = greedy_cuts(costs, order)
    for cuts in (coarse, everywhere):
        limit = np.inf if best is None else float(np.nextafter(best.seconds, 0))
        best = pipeline.solve(cuts, limit, np.maximum) or best
    if best is None:
        return None
    near = np.array(sorted({*coarse.tolist(), *best.bounds}))
    return pipeline.solve(near, best.seconds, _balancing(best.seconds)) or best


def greedy_cuts(
    costs: ModelCosts, order: Sequence[NodeCapacity], rounds: int = 16
) -> PipelineCuts | None:
    """Return good cuts quickly: bisect the time and give each stage, Leaf first, as much as it can take.

    May miss the optimum, and may find nothing if RAM is very scarce: a smaller stage is sometimes
    better, because the traffic over a cut does not grow with the stage.
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
"""Function that combines the times of new stages or links with the value of the stages behind them."""


def _balancing(slowest: float) -> _Rule:
    scale = slowest or 1.0

    def rule(seconds: FloatArray, behind: FloatArray) -> FloatArray:
        return np.asarray((seconds / scale) ** 4 + behind)

    return rule


@dataclass(frozen=True)
class _Pipeline:
    """Machines in pipeline order, Root first, with the costs of the model to cut."""

    costs: ModelCosts
    order: tuple[NodeCapacity, ...]

    def cuts(self, bounds: Sequence[int]) -> PipelineCuts:
        """Return the cuts at these bounds with their time."""
        costs, order = self.costs, self.order
        stages = (
            costs.stage_seconds(bounds[k], bounds[k + 1], machine, len(order) - k)
            for k, machine in enumerate(order)
        )
        links = (costs.link_seconds(bounds[k], order[k - 1], order[k]) for k in range(1, len(order)))
        return PipelineCuts(tuple(bounds), max((*stages, *links)))

    def link(self, boundary: int, cuts: IntArray) -> FloatArray:
        """Return the seconds of the link before stage ``boundary`` for each cut; 0 before the Root."""
        if boundary == 0:
            return np.zeros(len(cuts))
        one, other = self.order[boundary - 1 : boundary + 1]
        return self.costs.link_grid(cuts, one, other)

    def linked(self, boundary: int, cuts: IntArray, limit: float) -> IntArray:
        """Return the cuts at which the link before stage ``boundary`` exists and is within ``limit``."""
        seconds = self.link(boundary, cuts)
        return cuts[np.isfinite(seconds) & (seconds <= limit)]

    def fill(self, limit: float) -> PipelineCuts | None:
        """Give each stage, Leaf first, the most units that ``limit`` and its RAM allow."""
        prefix = self.costs.work.prefix
        bounds = [self.costs.units]
        for k in reversed(range(len(self.order))):
            machine, stop = self.order[k], bounds[-1]
            low = max(k, int(np.searchsorted(prefix, prefix[stop] - limit * machine.flops)))
            starts = np.arange(low, stop) if k else np.arange(low, min(stop, 1))
            starts = self.linked(k, starts, limit)
            start = self.first_that_fits(k, starts, stop, limit)
            if start is None:
                return None
            bounds.append(start)
        return self.cuts(bounds[::-1])

    def first_that_fits(self, k: int, starts: IntArray, stop: int, limit: float) -> int | None:
        """Return the first start with which stage ``k`` fits; checks a few starts before all others."""
        stops = np.array([stop])
        for piece in (starts[:16], starts[16:]):
            if len(piece):
                seconds = self.seconds(k, piece, stops)[:, 0]
                fits = np.isfinite(seconds) & (seconds <= limit)
                if fits.any():
                    return int(piece[np.argmax(fits)])
        return None

    def solve(self, cuts: IntArray, limit: float, rule: _Rule) -> PipelineCuts | None:
        """Run a dynamic program from the Leaf to the Root over the given cuts.

        Returns the cuts of least value under ``rule`` with no stage or link slower than ``limit``; None
        if there are none.
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
        """Return the cuts that each boundary may take; a window is empty if nothing fits.

        The bounds are how far the stages before and behind can reach at most. They follow from the work
        and the inner memory, which grow with a stage.
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
            windows.append(self.linked(k, window, limit))
        return [*windows, np.array([units])]

    def furthest(self, k: int, start: int, limit: float) -> int:
        """Return the last stop that stage ``k`` can have from this start, by work and inner memory."""
        prefix, machine = self.costs.work.prefix, self.order[k]
        reach = (prefix[start] + limit * machine.flops) * (1 + ROUNDING)
        stops = np.arange(start + 1, int(np.searchsorted(prefix, reach, side="right")))
        if not len(stops):
            return start
        memory = self.costs.inner_memory_grid(np.array([start]), stops, len(self.order) - k)[0]
        return start + int(np.searchsorted(memory, machine.ram, side="right"))

    def earliest(self, k: int, stop: int, limit: float) -> int:
        """Return the first start that stage ``k`` can have with this stop."""
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
        """Return, for each start of stage ``k``, the best value from stage ``k`` on and its stop."""
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
        """Return the value of each start with each stop; infinite if the stage does not fit."""
        behind, limit = known
        seconds = self.seconds(k, starts, stops)
        value = rule(seconds, behind[None, :])
        value[seconds > limit] = np.inf
        return value

    def seconds(self, k: int, starts: IntArray, stops: IntArray) -> FloatArray:
        """Return the time of stage ``k`` for each start with each stop; infinite if it does not fit."""
        machine, behind = self.order[k], len(self.order) - k
        needs = self.costs.memory_grid(starts, stops, behind)
        work = self.costs.work.grid(starts, stops)
        return self.costs.seconds_grid(work, needs, machine, behind)
