"""Choice of the number of micro-batches from measured times.

A plan chooses the number from stated speeds and an assumed delay of links. The Root measures the times
of stages and links while it trains, chooses again with the plan's formula (``plan/microbatches.py``),
and goes back if training has not become faster. The result does not depend on the number, except for
the order in which gradients are added up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ravnest.plan.microbatches import (
    OVERHEAD_SECONDS,
    StageTimes,
    choose_microbatches,
    cycle_seconds,
)
from ravnest.runtime.batch_parts import BatchSplit
from ravnest.runtime.stage.observer import MicrobatchReport
from ravnest.wire.messages import StageTiming

WORTHWHILE = 0.97
"""A new number must be predicted to take at most this share of the time."""
FASTER = 0.97
"""A new number is kept if a batch takes at most this share of the time that it took before."""
LEAST_SECONDS = 0.05
"""Computing time of a batch, over all stages, below which the number is left alone: the figures of very
short computations say little."""
LEAST_BATCHES = 4
"""Batches that are measured before each choice, after one that is not."""
CHOICES = 3
"""Numbers that are tried at most."""


@dataclass(frozen=True)
class Measured:
    """Medians over some micro-batches."""

    parts: int
    """Micro-batches in a batch."""
    stages: tuple[float, ...]
    """Seconds of a micro-batch at each stage."""
    links: tuple[tuple[float, float], ...]
    """For each link, the seconds that a micro-batch occupies it, in the slower direction, and the rest
    of its delay, mean of both directions."""
    batch: float
    """Seconds between two batches."""


def stage_times(now: Measured, before: Measured | None = None) -> list[StageTimes]:
    """Return the times of the stages for a whole batch.

    Part of a stage's time for a micro-batch is fixed. It is assumed, or follows from measurements with
    two numbers of micro-batches.
    """
    fixed = [min(seconds, OVERHEAD_SECONDS) for seconds in now.stages]
    if before is not None and before.parts != now.parts:
        per_part = 1 / before.parts - 1 / now.parts
        fixed = [
            min(max(new - (old - new) / per_part / now.parts, low), new)
            for old, new, low in zip(before.stages, now.stages, fixed, strict=True)
        ]
    return [
        StageTimes(
            compute=now.parts * (seconds - own),
            link=now.parts * busy,
            units=0,
            fixed=own,
            latency=latency,
        )
        for seconds, own, (busy, latency) in zip(
            now.stages, fixed, (*now.links, (0.0, 0.0)), strict=True
        )
    ]


@dataclass(frozen=True)
class MicrobatchChange:
    """New number of micro-batches per batch."""

    parts: int
    reason: str
    """Why it was chosen, as a sentence for the user."""

    def __str__(self) -> str:
        count = "1 micro-batch" if self.parts == 1 else f"{self.parts} micro-batches"
        return f"{count} per batch from now on: {self.reason}"


class MicrobatchTuner:
    """Number of micro-batches per batch, by measured times.

    The user's thread begins it with the first batch and reads ``parts``; reports come in the worker's
    thread.
    """

    def __init__(self) -> None:
        self._size = 0
        """Samples in the batches that are measured; 0 before the first one."""
        self._parts = self._fewest = self._smallest = 1
        self._before: Measured | None = None
        """Measurement with the number before."""
        self._choices = 0
        self._timings: list[tuple[StageTiming, ...]] = []
        self._since: float | None = None
        """End of the last batch; None after an interruption, whose next batch is not measured."""
        self._batches = 0
        """Batches that are measured."""
        self._seconds = 0.0
        """Time that they took."""
        self._over = False

    @property
    def current(self) -> int:
        """Number of micro-batches of a whole batch."""
        return self._parts

    def parts(self, size: int, split: BatchSplit) -> int:
        """Return the number of micro-batches of a batch; the first one begins with the plan's."""
        if not self._size:
            self._parts = self._fewest = split.parts(size)
            self._smallest = max(split.smallest, 1)
            self._size = size
        return replace(split, rows=-(-self._size // self._parts), count=None).parts(size)

    def pause(self) -> None:
        """Leave an interruption of the training out of the measurement, and the batch after it."""
        self._since = None

    def add(self, report: MicrobatchReport, now: float) -> MicrobatchChange | None:
        """Take the times of a micro-batch; return the change if the number changes."""
        if self._over or (report.parts, report.batch_size) != (self._parts, self._size):
            return None
        if self._since is not None and report.timings:
            self._timings.append(report.timings)
        if report.part + 1 < report.parts:
            return None
        since, self._since = self._since, now
        if since is None:
            return None
        self._batches += 1
        self._seconds += now - since
        if self._batches < LEAST_BATCHES or not self._timings:
            return None
        return self._choose(self._measured())

    def _measured(self) -> Measured:
        columns = list(zip(*self._timings, strict=True))
        return Measured(
            parts=self._parts,
            stages=tuple(median(t.forward + t.backward + t.weights for t in own) for own in columns),
            links=tuple(_links(columns)),
            batch=self._seconds / self._batches,
        )

    def _choose(self, measured: Measured) -> MicrobatchChange | None:
        before = self._before
        if before is not None and measured.batch > FASTER * before.batch:
            self._over = True
            return self._change(before.parts, f"{measured.parts} were not faster")
        computing = measured.parts * sum(measured.stages)
        self._over = self._choices == CHOICES or computing < LEAST_SECONDS
        if self._over:
            return None
        times = stage_times(measured, before)
        # The memory of the stages is planned for parts that are not larger than the plan's.
        chosen = max(choose_microbatches(times, self._size, self._smallest), self._fewest)
        if cycle_seconds(times, chosen) >= WORTHWHILE * cycle_seconds(times, self._parts):
            self._over = True
            return None
        self._choices += 1
        self._before = measured
        return self._change(
            chosen, f"faster than {measured.parts}, by the measured times of stages and links"
        )

    def _change(self, parts: int, reason: str) -> MicrobatchChange:
        self._parts = parts
        self._timings, self._since, self._batches, self._seconds = [], None, 0, 0.0
        return MicrobatchChange(parts, reason)


def _links(columns: Sequence[Sequence[StageTiming]]) -> Iterator[tuple[float, float]]:
    """Yield for each link the seconds of a transfer and the rest of its delay."""
    for before, behind in itertools.pairwise(columns):
        ways = (
            [(t.to_next, t.to_next_busy) for t in before],
            [(t.to_previous, t.to_previous_busy) for t in behind],
        )
        busy = [median(busy for _, busy in way) for way in ways]
        rest = [median(max(delay - busy, 0.0) for delay, busy in way) for way in ways]
        yield max(busy), sum(rest) / 2
