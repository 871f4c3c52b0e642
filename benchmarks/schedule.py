"""Rates that the simulator predicts for the schedules, and the reason for alternating passes.

Stages take 10 ms each for a forward, the gradients of inputs and the gradients of weights. Rates are
relative to a stage that never waits. "Bound" is the best that any schedule without delayed gradients can
reach. Then pipelines are random: 3, 5 or 8 stages of 15 to 36 ms per
micro-batch, links of 1 to 40 ms, 4 micro-batches per stage in a batch; each is simulated with the real
schedule and with one that runs every waiting backward before a forward. Run as a script to print the
report.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from schedule_bound import least_cycle

from ravnest.runtime.schedule.machine import ScheduleMachine
from ravnest.runtime.schedule.simulator import LinkCost, Scenario, StageCost, simulate, steady_rate
from ravnest.types import Schedule

PIPELINES = 40
PER_STAGE = 4
COST = StageCost(0.010, 0.010, weights=0.010)
DELAYS = (0.0, 0.010, 0.020)

Pipeline = tuple[tuple[StageCost, ...], tuple[LinkCost, ...]]


def measure() -> str:
    """Return the report as Markdown."""
    return "\n\n".join([_table(), _order(), _speed()])


def _equal(stages: int, delay: float, count: int, schedule: Schedule, *, clip: bool) -> float:
    """Return the rate of equal stages, relative to a stage that never waits."""
    links = (LinkCost(delay, delay),) * (stages - 1)
    scenario = Scenario((COST,) * stages, links, count, count, schedule, clip=clip)
    return steady_rate(scenario) * COST.microbatch


def _table() -> str:
    lines = [
        "| stages | link, ms | micro-batches per batch | bound | sync | sync, clipping | async |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for stages, per_stage, delay in itertools.product((3, 8), (4, 5), DELAYS):
        count = per_stage * stages
        links = (LinkCost(delay, delay),) * (stages - 1)
        rates = [
            count * COST.microbatch / least_cycle((COST,) * stages, links, count),
            _equal(stages, delay, count, "sync", clip=False),
            _equal(stages, delay, count, "sync", clip=True),
            _equal(stages, delay, count, "async", clip=False),
        ]
        shown = " | ".join(f"{rate:.1%}" for rate in rates)
        lines.append(f"| {stages} | {1000 * delay:.0f} | {count} | {shown} |")
    return "\n".join(lines)


def _order() -> str:
    pipelines = _pipelines(random.Random(3))
    turns = [_rate(pipeline) for pipeline in pipelines]
    with _backwards_first():
        first = [_rate(pipeline) for pipeline in pipelines]
    shares = [
        rate * max(c.microbatch for c in costs)
        for rate, (costs, _) in zip(turns, pipelines, strict=True)
    ]
    bounds = [
        rate * least_cycle(costs, links, PER_STAGE * len(costs)) / (PER_STAGE * len(costs))
        for rate, (costs, links) in zip(turns, pipelines, strict=True)
    ]
    ratios = [b / a for a, b in zip(turns, first, strict=True)]
    return (
        f"Over {PIPELINES} random pipelines, `sync` reaches {statistics.mean(shares):.1%} of the "
        f"slowest stage's rate on average, at worst {min(shares):.1%}; of the bound it reaches "
        f"{statistics.mean(bounds):.1%} on average, at worst {min(bounds):.1%}. With backwards first "
        f"the rate is {statistics.mean(ratios):.3f}x that of alternating passes on average "
        f"(below 1: slower), between {min(ratios):.2f}x and {max(ratios):.2f}x; it is lower in "
        f"{sum(r < 0.999 for r in ratios)} and higher in {sum(r > 1.001 for r in ratios)} pipelines."
    )


def _pipelines(draw: random.Random) -> list[Pipeline]:
    found: list[Pipeline] = []
    for _ in range(PIPELINES):
        stages = draw.choice((3, 5, 8))
        forwards = [draw.uniform(0.005, 0.012) for _ in range(stages)]
        delays = [draw.uniform(0.001, 0.04) for _ in range(stages - 1)]
        costs = tuple(StageCost(forward, forward, weights=forward) for forward in forwards)
        found.append((costs, tuple(LinkCost(delay, delay) for delay in delays)))
    return found


def _rate(pipeline: Pipeline) -> float:
    costs, links = pipeline
    count = PER_STAGE * len(costs)
    return steady_rate(Scenario(costs, links, count, count, "sync"))


@contextmanager
def _backwards_first() -> Iterator[None]:
    """Make schedules run every waiting backward before a forward."""

    def start_pass(self: ScheduleMachine) -> None:
        self._forward_next = False
        original(self)

    original: Callable[[ScheduleMachine], None] = ScheduleMachine._start_pass
    ScheduleMachine._start_pass = start_pass  # type: ignore[method-assign]
    try:
        yield
    finally:
        ScheduleMachine._start_pass = original  # type: ignore[method-assign]


def _speed() -> str:
    links = (LinkCost(0.02, 0.02),) * 7
    began = time.process_time()
    events = simulate(Scenario((COST,) * 8, links, 32, 32, "sync", microbatches=960)).events
    rate = events / (time.process_time() - began)
    return f"The simulator handles {rate / 1000:.0f} thousand events per second of CPU time."


if __name__ == "__main__":
    print(measure())
