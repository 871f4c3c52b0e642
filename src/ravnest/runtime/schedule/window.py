"""Choice of the window: enough micro-batches in flight to keep the slowest stage or link busy.

Each further micro-batch makes gradients staler and needs memory for activations and for a version of
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
"""Share of the best rate that the window must reach.

Measured costs include everything that a node does besides computing, which already takes a few
percent of the rate.
"""

MARGIN = 0.2
"""Share added to the window that a replay of measured costs needs.

A replay knows how costs vary, but only the usual delay of links: sometimes a thread wakes up late and
the next stage waits. Measured with 8 stages: 97% of the slowest stage's rate, 94% without the margin.
"""

MAX_TRIALS = 8
"""Maximum number of simulations in the search for a window."""


@dataclass(frozen=True)
class WindowChoice:
    """A window, the predicted rate and the reason for the choice."""

    window: int
    predicted_rate: float
    """Micro-batches per second."""
    slowest_rate: float
    """Rate of the slowest stage or link if it never waited."""
    reason: str
    activation_limits: tuple[int, ...]
    """Number of micro-batches for which each stage needs to keep activations."""


def choose_window(
    costs: Sequence[Costs],
    links: Sequence[LinkCost],
    *,
    update_frequency: int,
    schedule: Schedule,
    max_window: int,
    overhead: float = 0.0,
    margin: float = 0.0,
    pause: Callable[[], None] | None = None,
) -> WindowChoice:
    """Return the smallest window predicted to reach 99% of the slowest stage's or link's rate.

    The window is at most ``max_window``. In ``async`` the share ``margin`` is added to it for delays
    that cannot be predicted. ``overhead`` is the part of a round trip that the costs do not explain
    (see ``estimate_overhead``). ``pause`` is described at ``steady_rate``.

    In ``sync`` the flush at each update costs time with any window: there the target is relative to
    the rate with the largest useful window, that of a whole update.
    """
    assert max_window >= 1, f"a window of at most {max_window}"
    trials = _Trials(tuple(costs), _add_delay(links, overhead), update_frequency, schedule, pause)
    if trials.slowest_time == 0:
        window = min(max_window, len(costs))
        reason = f"{window} in flight: no stage takes any time"
        return WindowChoice(window, math.inf, math.inf, reason, (window,) * len(costs))
    if schedule == "sync":
        return _choose_sync(trials, max_window)
    return _choose_async(trials, max_window, margin)


def estimate_overhead(
    previous: float,
    round_trips: Sequence[float],
    window: int,
    costs: Sequence[Costs],
    links: Sequence[LinkCost],
    *,
    update_frequency: int,
    pause: Callable[[], None] | None = None,
) -> float:
    """Return the seconds of a round trip that costs and link delays do not explain.

    Thread wake-ups, the operating system and other processes are not measured, but they keep
    micro-batches in flight longer. Without any overhead, a round trip with ``window`` micro-batches in
    flight takes ``window`` divided by the predicted rate; the difference to the measured round trips
    is added to ``previous``, the estimate so far. A full pipeline hides its overhead, so the previous
    estimate then stays.
    """
    trials = _Trials(tuple(costs), _add_delay(links, previous), update_frequency, "async", pause)
    expected = window / trials.rate(window)
    return max(0.0, previous + statistics.fmean(round_trips) - expected)


def _add_delay(links: Sequence[LinkCost], seconds: float) -> tuple[LinkCost, ...]:
    """Return the links with ``seconds`` more delay in total, spread over all links and directions."""
    each = seconds / (2 * max(len(links), 1))
    return tuple(
        replace(link, forward=link.forward + each, backward=link.backward + each) for link in links
    )


def stage_activation_limits(
    costs: Sequence[Costs], links: Sequence[LinkCost], window: int, schedule: Schedule
) -> tuple[int, ...]:
    """Return the number of micro-batches for which each stage needs to keep activations.

    A stage keeps the activations of a micro-batch while the following stages process it: its share of
    the window, plus one for uneven arrivals. Without the limit, all stages would keep the whole window
    at the start, before the first gradients return. In ``sync`` every update is such a start, and
    delaying forwards there would cost time.
    """
    if schedule == "sync":
        return (*[window] * (len(costs) - 1), 1)
    trips = [mean.forward + mean.backward for mean in map(mean_cost, costs)]
    hops = [*(link.forward + link.backward for link in links), 0.0]
    total = sum(trips) + sum(hops)
    limits = [
        min(window, 1 + math.ceil(window * (sum(trips[stage:]) + sum(hops[stage:])) / total - 1e-6))
        for stage in range(len(costs) - 1)
    ]
    return (*limits, 1)  # the Leaf runs the backward right after the forward


def mean_cost(costs: Costs) -> StageCost:
    """Return the mean cost of a stage per micro-batch, which determines its rate."""
    each = each_cost(costs)
    return StageCost(
        statistics.fmean(cost.forward for cost in each),
        statistics.fmean(cost.backward for cost in each),
        statistics.fmean(cost.step for cost in each),
    )


class _Trials:
    """Simulations of one pipeline with several windows."""

    def __init__(
        self,
        costs: tuple[Costs, ...],
        links: tuple[LinkCost, ...],
        update_frequency: int,
        schedule: Schedule,
        pause: Callable[[], None] | None,
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
        self._pause = pause
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
        # A queue in front of the slowest stage at the start can make the rate slightly too high.
        return min(self.slowest_rate, steady_rate(scenario, pause=self._pause))

    def lower_bound(self, rate: float) -> int:
        """Return a lower bound of the window for ``rate``: W >= rate x round trip (Little's law)."""
        # The subtraction compensates rounding errors: 6.000000001 means 6.
        return max(1, math.ceil(rate * self.round_trip - 1e-6))

    def choice(self, window: int, rate: float, reason: str) -> WindowChoice:
        limits = stage_activation_limits(self.costs, self.links, window, self.schedule)
        return WindowChoice(window, rate, self.slowest_rate, reason, limits)


def _choose_async(trials: _Trials, max_window: int, margin: float) -> WindowChoice:
    goal = TARGET * trials.slowest_rate
    bound = window = trials.lower_bound(goal)
    window = min(window, max_window)
    rate = trials.rate(window)
    for _ in range(MAX_TRIALS - 1):
        if rate >= goal or window == max_window:
            break
        # The rate grows at most in proportion to the window, so smaller windows cannot suffice.
        window = min(max_window, max(window + 1, math.ceil(window * goal / rate - 1e-6)))
        rate = trials.rate(window)
    added = min(max_window - window, math.ceil(margin * window))
    if added > 0:
        window += added
        rate = trials.rate(window)
    reached = (
        f"{rate / trials.slowest_rate:.0%} of the {trials.slowest_rate:.3g} micro-batches/s"
        f" of the slowest part ({trials.slowest})"
    )
    if rate < goal and window == max_window:
        need = f"{TARGET:.0%} would need at least {max(bound, max_window + 1)}"
        reason = f"memory allows {max_window} in flight, which reach {reached}; {need}"
    else:
        reason = f"{window} in flight reach {reached}"
    return trials.choice(window, rate, reason)


def _choose_sync(trials: _Trials, max_window: int) -> WindowChoice:
    most = min(max_window, trials.update_frequency)
    best = rate = trials.rate(most)
    low, window = min(most, trials.lower_bound(TARGET * best)), most
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
    if max_window < trials.update_frequency:
        reason += f"; memory allows {max_window} in flight"
    return trials.choice(window, rate, reason)
