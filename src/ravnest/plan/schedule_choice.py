"""Choice of the schedule by the predicted time to a given loss.

``async`` keeps two batches in the pipeline, so that it is up to twice as fast where a batch has too few
micro-batches to keep all stages busy. Its gradients are one update late, so that it needs more samples
for the same loss. It is chosen if the first outweighs the second. Only times that are known count,
those of computing and of transfers, and measured delays of distant nodes: the fixed times of messages
and short delays are not known, and a model for which they are all that matters is small enough to be
trained exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ravnest.plan.microbatches import (
    FAR_LATENCY_SECONDS,
    MOST_PER_STAGE,
    NO_FIXED_TIMES,
    StageTimes,
    cycle_seconds,
    delayed_seconds,
)

DELAY_COST = 1.5
"""Samples that training with a delay of one update needs for the same loss, as a multiple of those
without delay: the upper end of what was measured for tasks that both can learn (docs/schedules.md)."""


def delay_pays(clusters: Sequence[Sequence[StageTimes]], most: int) -> bool:
    """Return whether pipelines reach a given loss sooner with a delay of one update than without.

    ``most`` is the largest number of micro-batches of a batch.
    """
    without, delayed = 0.0, 0.0
    for known in clusters:
        stages = [_without_short_delay(stage) for stage in known]
        count = max(1, min(most, MOST_PER_STAGE * len(stages)))
        seconds = cycle_seconds(stages, count, fixed=NO_FIXED_TIMES)
        if not seconds:
            return False
        without += 1 / seconds
        delayed += 1 / delayed_seconds(stages, count, NO_FIXED_TIMES)
    return delayed > DELAY_COST * without


def _without_short_delay(stage: StageTimes) -> StageTimes:
    """Return the times of a stage whose delay counts only if its neighbour is distant."""
    if stage.latency is None or stage.latency >= FAR_LATENCY_SECONDS:
        return stage
    return replace(stage, latency=None)
