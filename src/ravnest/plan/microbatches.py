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
micro-batches shorten the way through the pipeline, and cost a fixed time each.
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
PASSING = 2 / 3
"""Share of forwards and gradients of inputs in the time of a micro-batch; the rest are weights'."""
GOOD_ENOUGH = 1.03
"""Fewer micro-batches are preferred if a cycle takes at most this many times the shortest."""
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
    fixed: float = OVERHEAD_SECONDS
    """Fixed seconds of a micro-batch, besides those of the units."""
    latency: float = LATENCY_SECONDS
    """Delay of the link to the next stage, besides the time of the transfer."""


@dataclass(frozen=True)
class MicrobatchChoice:
    """Number of micro-batches per batch, with the predicted time of a batch."""

    count: int
    seconds: float


def cycle_seconds(stages: Sequence[StageTimes], count: int, in_flight: int | None = None) -> float:
    """Return the predicted time between two batches of ``count`` micro-batches.

    At most ``in_flight`` of them are in the pipeline at once; by default all.
    """
    each = [stage.compute / count + stage.fixed + UNIT_SECONDS * stage.units for stage in stages]
    links = [stage.link / count for stage in stages[:-1]]
    slowest = max(each)
    # The first stage has no earlier stage to serve: it computes weight gradients with the others.
    way = PASSING * sum(each) + (1 - PASSING) * each[0]
    way += sum(2 * (link + stage.latency) for link, stage in zip(links, stages, strict=False))
    return max(
        count * slowest,
        count / (in_flight or count) * way,
        way + (count - 1) * max(PASSING * slowest, *links, 0.0),
    )


def delayed_seconds(stages: Sequence[StageTimes], in_flight: int) -> float:
    """Return the predicted time between batches that are not split, ``in_flight`` of them at once."""
    each = [stage.compute + stage.fixed + UNIT_SECONDS * stage.units for stage in stages]
    links = [stage.link for stage in stages[:-1]]
    way = PASSING * sum(each) + sum(2 * (stage.link + stage.latency) for stage in stages[:-1])
    return max(*each, *links, way / in_flight)


def choose_microbatches(stages: Sequence[StageTimes], most: int) -> MicrobatchChoice:
    """Return the smallest number of micro-batches, up to ``most``, that is about as fast as any."""
    counts = range(1, max(1, min(most, MOST_PER_STAGE * len(stages))) + 1)
    seconds = {count: cycle_seconds(stages, count) for count in counts}
    best = min(seconds.values())
    count = next(count for count in counts if seconds[count] <= GOOD_ENOUGH * best)
    return MicrobatchChoice(count, seconds[count])
