"""How many micro-batches to keep under way: enough to keep the slowest stage or link busy, no more.

Each one more in flight makes gradients staler and takes memory for activations and a version of
the weights.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ravnest.runtime.schedule.machine import Schedule
from ravnest.runtime.schedule.simulator import (
    Costs,
    LinkCost,
    Scenario,
    StageCost,
    each_cost,
    steady_rate,
)

TARGET = 0.99
"""Share of the best rate that is good enough. The best rate is that of costs as they are measured, with
all that a node does beside computing, which takes another share of some hundredths."""

SPARE = 0.2
"""What is kept under way beyond what a replay of measured costs needs, as a share of that. A replay
knows how costs vary, and the usual delay of links only: now and then a thread wakes up late, and
whoever it should have fed waits. Measured, 8 stages: 97% of the slowest one's rate, 94% without."""

TRIALS = 8
"""Simulations after which the window found so far is taken."""


@dataclass(frozen=True)
class WindowChoice:
    """A window, what it is predicted to reach, and why it was chosen."""

    window: int
    predicted_rate: float
    """Micro-batches a second."""
    slowest_rate: float
    """What the slowest stage or link could do if it never waited."""
    reason: str
    holds: tuple[int, ...]
    """Of how many micro-batches each stage needs to keep activations; see ``stage_holds``."""


def choose_window(
    costs: Sequence[Costs],
    links: Sequence[LinkCost],
    *,
    update_frequency: int,
    schedule: Schedule,
    cap: int,
    unexplained: float = 0.0,
    spare: float = 0.0,
    breathe: Callable[[], None] | None = None,
) -> WindowChoice:
    """The smallest window predicted to reach 99% of the slowest part's rate, at most ``cap``.

    ``spare``: in ``async``, this share of it is added for what nobody can predict. ``unexplained`` is
    what a round trip was found to take beyond the costs (``unexplained_after``); ``breathe`` is as in
    ``steady_rate``.

    In ``sync`` the flush at each update costs time whatever the window: there the measure is the
    rate at the largest window of use, that of a whole update.
    """
    assert cap >= 1, f"a window of at most {cap}"
    trials = _Trials(tuple(costs), _slower(links, unexplained), update_frequency, schedule, breathe)
    if trials.slowest_time == 0:
        window = min(cap, len(costs))
        reason = f"{window} in flight: no stage takes any time"
        return WindowChoice(window, math.inf, math.inf, reason, (window,) * len(costs))
    return _choose_sync(trials, cap) if schedule == "sync" else _choose_async(trials, cap, spare)


def unexplained_after(
    before: float,
    round_trips: Sequence[float],
    window: int,
    costs: Sequence[Costs],
    links: Sequence[LinkCost],
    *,
    update_frequency: int,
    breathe: Callable[[], None] | None = None,
) -> float:
    """Seconds of a round trip that costs and delays do not explain; ``before``: as found earlier.

    Waking threads, the operating system, other processes: nobody measures all that, but it keeps
    micro-batches under way. With ``window`` of them under way and nothing left to explain, a round
    trip takes ``window`` times as long as one takes to come back. A pipeline that is full says
    nothing about what it hides, so that an earlier finding stands.
    """
    trials = _Trials(tuple(costs), _slower(links, before), update_frequency, "async", breathe)
    expected = window / trials.rate(window)
    return max(0.0, before + statistics.fmean(round_trips) - expected)


def _slower(links: Sequence[LinkCost], seconds: float) -> tuple[LinkCost, ...]:
    """Links that take so much longer, all together, there and back."""
    each = seconds / (2 * max(len(links), 1))
    return tuple(
        replace(link, forward=link.forward + each, backward=link.backward + each) for link in links
    )


def stage_holds(
    costs: Sequence[Costs], links: Sequence[LinkCost], window: int, schedule: Schedule
) -> tuple[int, ...]:
    """Of how many micro-batches each stage needs to keep activations for the window's rate.

    A stage keeps a micro-batch while that is at the stages behind: its share of the window, and one
    more for what comes unevenly. Without this limit all stages would at the start, before the first
    gradients return, keep the whole window. In ``sync`` every update is such a start, and to hold
    forwards back there would cost time.
    """
    if schedule == "sync":
        return (*[window] * (len(costs) - 1), 1)
    trips = [mean.forward + mean.backward for mean in map(mean_cost, costs)]
    hops = [*(link.forward + link.backward for link in links), 0.0]
    total = sum(trips) + sum(hops)
    holds = [
        min(window, 1 + math.ceil(window * (sum(trips[stage:]) + sum(hops[stage:])) / total - 1e-6))
        for stage in range(len(costs) - 1)
    ]
    return (*holds, 1)  # the Leaf turns round at once


def mean_cost(costs: Costs) -> StageCost:
    """What a stage computes for a micro-batch on average: its rate follows that."""
    each = each_cost(costs)
    return StageCost(
        statistics.fmean(cost.forward for cost in each),
        statistics.fmean(cost.backward for cost in each),
        statistics.fmean(cost.step for cost in each),
    )


class _Trials:
    """One pipeline, tried with several windows."""

    def __init__(
        self,
        costs: tuple[Costs, ...],
        links: tuple[LinkCost, ...],
        update_frequency: int,
        schedule: Schedule,
        breathe: Callable[[], None] | None,
    ) -> None:
        means = [mean_cost(cost) for cost in costs]
        times = {
            f"stage {index}": mean.forward + mean.backward + mean.step / update_frequency
            for index, mean in enumerate(means)
        }
        times |= {
            f"link from stage {index} to {index + 1}": max(link.forward_busy, link.backward_busy)
            for index, link in enumerate(links)
        }
        self.costs = costs
        self.links = links
        self.update_frequency = update_frequency
        self.schedule: Schedule = schedule
        self._breathe = breathe
        self.slowest = max(times, key=times.__getitem__)
        self.slowest_time = times[self.slowest]
        self.round_trip = sum(mean.forward + mean.backward for mean in means) + sum(
            link.forward + link.backward for link in links
        )

    @property
    def slowest_rate(self) -> float:
        return 1 / self.slowest_time

    def rate(self, window: int) -> float:
        scenario = Scenario(self.costs, self.links, window, self.update_frequency, self.schedule)
        # What waits before the slowest stage at first may come out a little faster.
        return min(self.slowest_rate, steady_rate(scenario, breathe=self._breathe))

    def least(self, rate: float) -> int:
        """No smaller window reaches the rate: a place is taken for a round trip at least."""
        # A hair less, so that 6.000000001 means 6.
        return max(1, math.ceil(rate * self.round_trip - 1e-6))

    def choice(self, window: int, rate: float, reason: str) -> WindowChoice:
        holds = stage_holds(self.costs, self.links, window, self.schedule)
        return WindowChoice(window, rate, self.slowest_rate, reason, holds)


def _choose_async(trials: _Trials, cap: int, spare: float) -> WindowChoice:
    goal = TARGET * trials.slowest_rate
    least = window = trials.least(goal)
    window = min(window, cap)
    rate = trials.rate(window)
    for _ in range(TRIALS - 1):
        if rate >= goal or window == cap:
            break
        # The rate grows at most in proportion to the window: smaller ones need not be tried.
        window = min(cap, max(window + 1, math.ceil(window * goal / rate - 1e-6)))
        rate = trials.rate(window)
    added = min(cap - window, math.ceil(spare * window))
    if added > 0:
        window += added
        rate = trials.rate(window)
    reached = (
        f"{rate / trials.slowest_rate:.0%} of the {trials.slowest_rate:.3g} micro-batches/s"
        f" of the slowest part ({trials.slowest})"
    )
    if rate < goal and window == cap:
        need = f"at least {max(least, cap + 1)}"
        reason = f"memory allows {cap} in flight, which reach {reached}; {TARGET:.0%} would need {need}"
    else:
        reason = f"{window} in flight reach {reached}"
    return trials.choice(window, rate, reason)


def _choose_sync(trials: _Trials, cap: int) -> WindowChoice:
    most = min(cap, trials.update_frequency)
    best = rate = trials.rate(most)
    low, window = min(most, trials.least(TARGET * best)), most
    while low < window:
        middle = (low + window) // 2
        tried = trials.rate(middle)
        if tried >= TARGET * best:
            window, rate = middle, tried
        else:
            low = middle + 1
    reason = (
        f"{window} in flight reach {rate / trials.slowest_rate:.0%} of the {trials.slowest_rate:.3g}"
        f" micro-batches/s of the slowest part ({trials.slowest}); the flush at each update of"
        f" {trials.update_frequency} costs the rest"
    )
    if cap < trials.update_frequency:
        reason += f"; memory allows {cap} in flight"
    return trials.choice(window, rate, reason)
