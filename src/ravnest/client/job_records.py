"""The server's figures of a job, as the records that a node reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from ravnest.schemas.jobs import EventView, JobView, LossHistory
from ravnest.telemetry import LossRecord, PaceRecord, RoundRecord, WarningRecord, WorkerRecord

_TOLD = ("warning", "recovery", "round")
"""Kinds of events that become warnings."""


class JobSource(Protocol):
    """Where the figures of a job come from; a ``JobHandle``."""

    def losses(self, first: int = 0) -> LossHistory:
        """Return the losses from update ``first`` on, and all validation results."""

    def events(self, after: int = 0) -> list[EventView]:
        """Return the events with a sequence number above ``after``."""


class JobRecords:
    """Records of a job that were not returned before."""

    def __init__(self, source: JobSource) -> None:
        self._source = source
        self._next_update = 0
        self._validations: set[tuple[int, str]] = set()
        """Number and name of the results that were returned."""
        self._last_event = 0
        self._rounds: dict[int, RoundRecord] = {}
        """Last averaging round by the cluster that coordinated it."""

    def of(self, view: JobView) -> Sequence[WorkerRecord]:
        """Return what is new when the job looks like this."""
        return [*self._losses(view), *self._rounds_of(view), *self._pace(view), *self._events()]

    def _losses(self, view: JobView) -> Iterator[WorkerRecord]:
        history = self._source.losses(self._next_update)
        progress, schedule = view.progress, view.progress.schedule
        microbatches = 1 if schedule is None else schedule.microbatches
        rates = history.learning_rates or (None,) * len(history.updates)
        for update, loss, rate in zip(history.updates, history.losses, rates, strict=True):
            epoch = max(progress.epoch - 1, 0)
            if progress.total_updates:
                epoch = min(update * progress.epochs // progress.total_updates, progress.epochs - 1)
            yield LossRecord(update, epoch, loss, microbatches, progress.staleness, rate)
            self._next_update = update + 1
        for result in history.validations:
            if (result.number, result.name) not in self._validations:
                self._validations.add((result.number, result.name))
                yield result

    def _rounds_of(self, view: JobView) -> Iterator[WorkerRecord]:
        for cluster in view.clusters:
            last = cluster.round
            if last is not None and self._rounds.get(cluster.cluster) != last:
                self._rounds[cluster.cluster] = last
                yield last

    def _pace(self, view: JobView) -> Iterator[WorkerRecord]:
        progress = view.progress
        if progress.samples_per_second is not None and not view.state.is_final:
            yield PaceRecord(
                max(progress.epoch - 1, 0),
                progress.total_updates,
                progress.samples_per_second,
                progress.seconds_left,
            )

    def _events(self) -> Iterator[WorkerRecord]:
        for event in self._source.events(self._last_event):
            self._last_event = event.sequence
            if event.kind in _TOLD:
                yield WarningRecord(f"{event.subject}: {event.reason}")
