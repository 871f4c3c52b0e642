"""Figures of what a provider does and delivers, for its owner. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ravnest.plan.memory import size
from ravnest.telemetry import WorkRecord

_WINDOW = 15.0
"""Seconds that rates are averaged over."""
_LARGEST = 2**53
"""Bound of figures: a worker handles data of others, and may write anything."""


@dataclass(frozen=True)
class WorkFigures:
    """Work of a node since it began."""

    epoch: int
    """Epoch in progress, from 1."""
    updates: int
    """Updates of the training so far."""
    samples: int
    """Samples that this node has trained."""
    received_bytes: int
    sent_bytes: int
    samples_per_second: float | None = None
    """Rate of the last seconds; ``None`` if it is not known yet."""
    idle: float | None = None
    """Share of the last seconds in which the node did not compute, but waited for others or a core."""

    def __str__(self) -> str:
        parts = [f"epoch {self.epoch}", f"update {self.updates}"]
        if self.samples_per_second is not None:
            rate = self.samples_per_second
            parts.append(f"{rate:,.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s")
        parts.append(f"received {size(self.received_bytes)}, sent {size(self.sent_bytes)}")
        if self.idle is not None:
            parts.append(f"idle {self.idle:.0%}")
        return ", ".join(parts)


class WorkMeter:
    """Figures of one assignment, from the records of its workers."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, WorkRecord]] = deque()
        """Records of the current worker within the window, with the times of their arrival."""
        self.latest: WorkFigures | None = None
        """Figures after the newest record, with rates; ``None`` if there is none."""
        self._before = WorkRecord(0, 0, 0, 0.0, 0, 0)
        """Sums of earlier workers."""

    def add(self, record: WorkRecord, now: float) -> WorkFigures | None:
        """Add a record and return the figures; ``None`` if the record cannot be true."""
        counts = (record.updates, record.epoch, record.samples, record.received_bytes, record.sent_bytes)
        if not all(0 <= count < _LARGEST for count in (*counts, record.busy)):
            return None
        if self._recent and record.samples < self._recent[-1][1].samples:  # another worker
            self._before = self._total(self._recent[-1][1])
            self._recent.clear()
        self._recent.append((now, record))
        while len(self._recent) > 2 and self._recent[1][0] <= now - _WINDOW:
            self._recent.popleft()
        self.latest = self._figures()
        return self.latest

    @property
    def total(self) -> WorkFigures | None:
        """The figures without rates; ``None`` if there is no record."""
        if not self._recent:
            return None
        record = self._total(self._recent[-1][1])
        return WorkFigures(
            record.epoch + 1, record.updates, record.samples, record.received_bytes, record.sent_bytes
        )

    def _figures(self) -> WorkFigures | None:
        total, (start, first), (end, last) = self.total, self._recent[0], self._recent[-1]
        if total is None or end <= start:
            return total
        seconds = end - start
        return WorkFigures(
            total.epoch,
            total.updates,
            total.samples,
            total.received_bytes,
            total.sent_bytes,
            samples_per_second=(last.samples - first.samples) / seconds,
            idle=min(max(1 - (last.busy - first.busy) / seconds, 0.0), 1.0),
        )

    def _total(self, record: WorkRecord) -> WorkRecord:
        before = self._before
        return WorkRecord(
            record.updates,
            record.epoch,
            before.samples + record.samples,
            before.busy + record.busy,
            before.received_bytes + record.received_bytes,
            before.sent_bytes + record.sent_bytes,
        )
