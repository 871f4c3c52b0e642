"""The server's figures of a job, as the records that a node reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from ravnest.schemas.jobs import EventView, JobView, LossHistory
from ravnest.telemetry import LossRecord, PaceRecord, WarningRecord, WorkerRecord

_TOLD = ("warning", "recovery", "round")
"""Kinds of events that become warnings."""


_OVERLAP = 60.0
"""Seconds that are asked for again: the times of two clusters' records are not in strict order."""

TimedJobRecord = tuple[float | None, WorkerRecord]
"""A record, and when the server learned of it; ``None``: it does not say, or just now."""


class JobSource(Protocol):
    """Where the figures of a job come from; a ``JobHandle``."""

    def losses(self, first: int = 0, since: float = 0.0) -> LossHistory:
        """Return the losses from update ``first`` on, and validations and rounds since a time."""

    def events(self, after: int = 0) -> list[EventView]:
        """Return the events with a sequence number above ``after``."""


class JobRecords:
    """Records of a job that were not returned before."""

    def __init__(self, source: JobSource) -> None:
        self._source = source
        self._next_update = 0
        self._newest = 0.0
        """Time of the newest loss that was returned; later ones are new, even of earlier updates."""
        self._recoveries = 0
        self._known: set[tuple[str, int, float | None]] = set()
        """Kind, number and time of the validations and rounds that were returned."""
        self._since = 0.0
        """Time of the newest of them."""
        self._last_event = 0

    def of(self, view: JobView) -> Sequence[TimedJobRecord]:
        """Return what is new when the job looks like this, by time."""
        if self._newest and self._goes_back(view):
            self._next_update = 0
        self._recoveries = view.recoveries
        history = self._source.losses(self._next_update, max(self._since - _OVERLAP, 0.0))
        past = [*self._losses(history, view), *self._others(history), *self._events()]
        return [*sorted(past, key=lambda each: each[0] or 0.0), *self._pace(view)]

    def _goes_back(self, view: JobView) -> bool:
        """Return whether the job repeats updates after the loss of a node."""
        return view.recoveries != self._recoveries or view.progress.updates < self._next_update

    def _losses(self, history: LossHistory, view: JobView) -> Iterator[TimedJobRecord]:
        schedule = view.progress.schedule
        microbatches = 1 if schedule is None else schedule.microbatches
        empty = (None,) * len(history.updates)
        columns = (
            history.updates,
            history.epochs or (max(view.progress.epoch - 1, 0),) * len(history.updates),
            history.losses,
            history.staleness or (view.progress.staleness,) * len(history.updates),
            history.learning_rates or empty,
            history.times or empty,
        )
        newest = self._newest
        all_new = not newest or self._next_update > 0
        for update, epoch, loss, staleness, rate, at in zip(*columns, strict=True):
            if all_new or (at is not None and at > newest):
                yield at, LossRecord(update, epoch, loss, microbatches, staleness, rate)
                self._newest, self._next_update = max(self._newest, at or 0.0), update + 1

    def _others(self, history: LossHistory) -> Iterator[TimedJobRecord]:
        times = history.validation_times or (None,) * len(history.validations)
        tests = zip(times, history.validations, strict=True)
        rounds = zip(history.round_times, history.rounds, strict=True)
        keyed: list[tuple[tuple[str, int, float | None], WorkerRecord]] = [
            *((("validation", each.number, at), each) for at, each in tests),
            *((("round", each.round, at), each) for at, each in rounds),
        ]
        for key, record in keyed:
            if key not in self._known:
                self._known.add(key)
                self._since = max(self._since, key[2] or 0.0)
                yield key[2], record

    def _pace(self, view: JobView) -> Iterator[TimedJobRecord]:
        progress = view.progress
        if progress.samples_per_second is not None and not view.state.is_final:
            yield (
                None,
                PaceRecord(
                    max(progress.epoch - 1, 0),
                    progress.total_updates,
                    progress.samples_per_second,
                    progress.seconds_left,
                ),
            )

    def _events(self) -> Iterator[TimedJobRecord]:
        for event in self._source.events(self._last_event):
            self._last_event = event.sequence
            if event.kind in _TOLD:
                yield event.time, WarningRecord(f"{event.subject}: {event.reason}")
