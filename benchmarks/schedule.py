"""What the schedule predicts: windows, and why backwards and forwards take turns.

Pipelines are drawn at random: 3, 5 or 8 stages of 15 to 36 ms a micro-batch, links of 1 to 40 ms.
For each the smallest window is sought that reaches 98% of the slowest stage's rate, with the
machine as it is and with one that always prefers backwards. Run as a script it prints its report.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from ravnest.runtime.schedule.machine import ScheduleMachine
from ravnest.runtime.schedule.simulator import LinkCost, Scenario, StageCost, simulate
from ravnest.runtime.schedule.window import choose_window

PIPELINES = 40
LONGEST = 60

Pipeline = tuple[tuple[StageCost, ...], tuple[LinkCost, ...]]


def measure() -> str:
    """The report, as Markdown."""
    pipelines = _pipelines(random.Random(3))
    turns = [_least_window(pipeline) for pipeline in pipelines]
    first = [
        _backwards_first(lambda pipeline=pipeline: _least_window(pipeline)) for pipeline in pipelines
    ]
    ratios = [b / a for a, b in zip(turns, first, strict=True)]
    worst = max(range(PIPELINES), key=ratios.__getitem__)
    return "\n".join(
        [
            f"Over {PIPELINES} pipelines backwards first needs {statistics.mean(ratios):.2f} times the "
            f"window on average, at worst {first[worst]} where taking turns needs {turns[worst]}; it "
            f"needs a smaller one in {sum(ratio < 1 for ratio in ratios)}.",
            "",
            _speed(),
        ]
    )


def _pipelines(draw: random.Random) -> list[Pipeline]:
    found: list[Pipeline] = []
    for _ in range(PIPELINES):
        stages = draw.choice((3, 5, 8))
        forwards = [draw.uniform(0.005, 0.012) for _ in range(stages)]
        delays = [draw.uniform(0.001, 0.04) for _ in range(stages - 1)]
        costs = tuple(StageCost(forward, 2 * forward) for forward in forwards)
        found.append((costs, tuple(LinkCost(delay, delay) for delay in delays)))
    return found


def _least_window(pipeline: Pipeline) -> int:
    costs, links = pipeline
    slowest = max(cost.forward + cost.backward for cost in costs)
    for window in range(1, LONGEST):
        scenario = Scenario(costs, links, window, microbatches=15 * window)
        if simulate(scenario).rate * slowest >= 0.98:
            return window
    return LONGEST


def _backwards_first(call: Callable[[], int]) -> int:
    """Call with machines that run every backward that waits before a forward."""

    def start_pass(self: ScheduleMachine) -> None:
        self._turn_of_forward = False
        original(self)

    original = ScheduleMachine._start_pass
    ScheduleMachine._start_pass = start_pass  # type: ignore[method-assign]
    try:
        return call()
    finally:
        ScheduleMachine._start_pass = original  # type: ignore[method-assign]


def _speed() -> str:
    costs, links = (StageCost(0.01, 0.02),) * 8, (LinkCost(0.02, 0.02),) * 7
    began = time.process_time()
    events = simulate(Scenario(costs, links, window=21, microbatches=1000)).events
    rate = events / (time.process_time() - began)
    began = time.process_time()
    choice = choose_window(costs, links, update_frequency=1, schedule="async", max_window=64)
    spent = time.process_time() - began
    return (
        f"The simulator handles {rate / 1000:.0f} thousand events a second of processor time; the "
        f"window of 8 equal stages ({choice.window}) is chosen in {spent * 1000:.0f} ms."
    )


if __name__ == "__main__":
    print(measure())
