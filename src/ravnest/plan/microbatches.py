"""Choice of the number of micro-batches per batch.

With m micro-batches per batch and no weights that are older than an update, a pipeline repeats itself
with each batch. A cycle takes at least

- the time that the slowest stage computes for m micro-batches, weight gradients included;
- the way of one micro-batch through all stages and links, forward and back, plus the time that the
  slowest stage needs for the forwards and the gradients of inputs of the others. Its weight gradients
  fill the time in which it waits;
- the same way, plus the time for which the others occupy the slowest link;
- if memory allows only n micro-batches in flight, m / n times the way of one through all stages and
  links and back.

The schedule reaches the largest of these within a few percent (``docs/schedules.md``). More
micro-batches shorten the way through the pipeline, and cost a fixed time each. How long links take to
deliver is not known when a plan is made, so that the number must be good for near and for far nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OVERHEAD_SECONDS = 1.0e-3
"""Fixed time of a micro-batch at a stage: messages, threads and Python."""
UNIT_SECONDS = 5.0e-5
"""Fixed time of a micro-batch in each unit, forward and backward."""
LATENCY_SECONDS = 1.0e-3
"""Assumed delay of a link, besides the time of the transfer."""
FAR_LATENCY_SECONDS = 20.0e-3
"""Delay of a link between distant nodes."""
PASSING = 2 / 3
"""Share of forwards and gradients of inputs in the time of a micro-batch; the rest are weights'."""
GOOD_ENOUGH = 1.01
"""Fewer micro-batches are preferred if they are at most this many times as bad as the best number."""
GIVEN_AWAY = 1.03
"""Time on near links, as a multiple of the shortest, that may be given away for far links."""
MOST_PER_STAGE = 8
"""Micro-batches per stage beyond which nothing is gained."""


@dataclass(frozen=True)
class StageTimes:
    """Predicted times of a stage for a whole batch."""

    compute: float
    """Seconds of forward and backward."""
    link: float
    """Seconds on the link to the next stage; 0 for the last stage."""
    units: int
    fixed: float | None = None
    """Measured fixed seconds of a micro-batch, besides those of the units."""
    latency: float | None = None
    """Measured delay of the link to the next stage, besides the time of the transfer."""
    defers: bool = True
    """Weight gradients are computed after the gradients of the inputs are sent."""


@dataclass(frozen=True)
class FixedTimes:
    """Times of a micro-batch that do not depend on its size, in seconds."""

    stage: float = OVERHEAD_SECONDS
    unit: float = UNIT_SECONDS
    link: float = LATENCY_SECONDS


NEAR, FAR = FixedTimes(), FixedTimes(link=FAR_LATENCY_SECONDS)
NO_FIXED_TIMES = FixedTimes(0.0, 0.0, 0.0)


def cycle_seconds(
    stages: Sequence[StageTimes], count: int, in_flight: int | None = None, fixed: FixedTimes = NEAR
) -> float:
    """Return the predicted time between two batches of ``count`` micro-batches.

    At most ``in_flight`` of them are in the pipeline at once; by default all.
    """
    each = _each(stages, count, fixed)
    links = [stage.link / count for stage in stages[:-1]]
    slowest = max(each)
    # The first stage has no earlier stage to serve: it computes weight gradients with the others.
    at_once = [not stage.defers or stage is stages[0] for stage in stages]
    way = sum(seconds * (1 if whole else PASSING) for seconds, whole in zip(each, at_once, strict=True))
    way += sum(2 * (link + _latency(stage, fixed)) for link, stage in zip(links, stages, strict=False))
    return max(
        count * slowest,
        count / (in_flight or count) * way,
        way + (count - 1) * max(PASSING * slowest, *links, 0.0),
    )


def delayed_seconds(stages: Sequence[StageTimes], count: int, fixed: FixedTimes = NEAR) -> float:
    """Return the predicted time between two batches if a batch may start before the one before ends.

    Then two batches of ``count`` micro-batches are in the pipeline at once.
    """
    busy = count * max(*_each(stages, count, fixed), *(s.link / count for s in stages[:-1]), 0.0)
    return max(busy, cycle_seconds(stages, count, fixed=fixed) / 2)


def _each(stages: Sequence[StageTimes], count: int, fixed: FixedTimes) -> list[float]:
    """Return the seconds of one of ``count`` micro-batches at each stage."""
    return [
        stage.compute / count
        + (fixed.stage if stage.fixed is None else stage.fixed)
        + fixed.unit * stage.units
        for stage in stages
    ]


def _latency(stage: StageTimes, fixed: FixedTimes) -> float:
    return fixed.link if stage.latency is None else stage.latency


def choose_microbatches(stages: Sequence[StageTimes], batch: int, smallest: int) -> int:
    """Return the number of micro-batches of a batch, each of ``smallest`` samples at least.

    It is the smallest that is about as good as any. The worse of two ratios counts: of its time to the
    shortest time on far links and, less by what may be given away, on near links.
    """
    most = max(1, min(batch // smallest, MOST_PER_STAGE * len(stages)))
    counts = sorted({-(-batch // rows) for rows in range(1, batch + 1)} & set(range(1, most + 1)))
    near, far = (
        {count: cycle_seconds(stages, count, fixed=fixed) for count in counts} for fixed in (NEAR, FAR)
    )
    shortest = GIVEN_AWAY * min(near.values()), min(far.values())
    ratios = {c: max(near[c] / shortest[0], far[c] / shortest[1]) for c in counts}
    limit = GOOD_ENOUGH * min(ratios.values())
    return next(count for count in counts if ratios[count] <= limit)
