"""Telemetry of a node: its reports as typed records, at a bounded rate."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable

from ravnest.averaging.outcome import RoundOutcome
from ravnest.runtime.control.checkpoints import CheckpointReport
from ravnest.runtime.stage.observer import UpdateReport
from ravnest.telemetry import (
    CheckpointRecord,
    LossRecord,
    PhaseName,
    PhaseRecord,
    QueueRecord,
    RecordSink,
    RecoveryRecord,
    RoundRecord,
    ScheduleRecord,
    TimingRecord,
    ValidationRecord,
    WarningRecord,
    finite,
)
from ravnest.types import Schedule
from ravnest.wire.messages import StageTiming, ValidationResult

_INTERVAL = 1.0
"""Seconds between two reports of timings, and between two of queue lengths."""


class TelemetryReporter:
    """Creates the records of one node. Without a sink, every method returns at once."""

    def __init__(self, sink: RecordSink | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink = sink
        self._clock = clock
        self._phase = PhaseRecord("end", 0)
        self._phase_lock = threading.Lock()
        self._validations = 0
        self._timings: list[tuple[StageTiming, ...]] = []
        self._next_timings = 0.0
        self._next_queues = 0.0
        self._warnings = None if sink is None else _WarningHandler(sink)

    def start(self) -> None:
        """Report warnings of the package's loggers from now on, until ``close``."""
        if self._warnings is not None:
            logging.getLogger("ravnest").addHandler(self._warnings)

    def close(self) -> None:
        """Report the end, and no warnings from now on."""
        self.phase("end")
        self.stop_warnings()

    def stop_warnings(self) -> None:
        """Report no warnings from now on."""
        if self._warnings is not None:
            logging.getLogger("ravnest").removeHandler(self._warnings)

    def resume(self, validations: int) -> None:
        """Continue to count validations after this number."""
        self._validations = validations

    def checkpoint(self, report: CheckpointReport) -> None:
        """Report a checkpoint of this node."""
        if self._sink is not None:
            identifier = report.id
            self._sink.emit(
                CheckpointRecord(identifier.update, identifier.phase, report.bytes, report.seconds)
            )

    def recovery(self, record: RecoveryRecord) -> None:
        """Report that training continues after a loss."""
        if self._sink is not None:
            self._sink.emit(record)

    def phase(self, phase: PhaseName, epoch: int | None = None) -> None:
        """Report the start of a phase, unless it is the one reported last.

        Without ``epoch``, the phase belongs to the same epoch as the one before.
        """
        if self._sink is None:
            return
        with self._phase_lock:
            record = PhaseRecord(phase, self._phase.epoch if epoch is None else epoch)
            if record != self._phase:
                self._phase = record
                self._sink.emit(record)

    def update(self, update: UpdateReport) -> None:
        """Report the loss of an update."""
        if self._sink is not None and update.loss is not None:
            self._sink.emit(
                LossRecord(
                    update.number,
                    update.epoch,
                    finite(update.loss),
                    update.batches * update.parts,
                    update.staleness,
                )
            )

    def schedule(self, schedule: Schedule, microbatches: int, reason: str) -> None:
        """Report the schedule of the run."""
        if self._sink is not None:
            self._sink.emit(ScheduleRecord(schedule, microbatches, reason))

    def queues(self, *, in_flight: int, window: int, inbox: int) -> None:
        """Report queue lengths, at most once per interval."""
        if self._sink is not None and (now := self._clock()) >= self._next_queues:
            self._next_queues = now + _INTERVAL
            self._sink.emit(QueueRecord(in_flight, window, inbox))

    def timings(self, timings: tuple[StageTiming, ...]) -> None:
        """Collect the costs of a micro-batch by stage; report their means once per interval."""
        if self._sink is None:
            return
        self._timings.append(timings)
        if (now := self._clock()) < self._next_timings:
            return
        self._next_timings = now + _INTERVAL
        collected, self._timings = self._timings, []
        for stage, costs in enumerate(zip(*collected, strict=True)):
            self._sink.emit(_mean(stage, costs))

    def validation(self, result: ValidationResult, epoch: int) -> None:
        """Report the result of a validation after ``epoch`` epochs of training."""
        if self._sink is not None:
            number, self._validations = self._validations, self._validations + 1
            value = finite(result.value)
            self._sink.emit(ValidationRecord(number, epoch, result.name, value, result.samples))

    def round(self, outcome: RoundOutcome) -> None:
        """Report the outcome of an averaging round."""
        if self._sink is not None:
            self._sink.emit(_round_record(outcome))


class _WarningHandler(logging.Handler):
    """Forwards log messages of level WARNING and above to a sink."""

    def __init__(self, sink: RecordSink) -> None:
        super().__init__(logging.WARNING)
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        self._sink.emit(WarningRecord(record.getMessage()))


def _mean(stage: int, costs: tuple[StageTiming, ...]) -> TimingRecord:
    return TimingRecord(
        stage,
        len(costs),
        forward=statistics.fmean(cost.forward for cost in costs),
        backward=statistics.fmean(cost.backward + cost.weights for cost in costs),
        step=statistics.fmean(cost.step for cost in costs),
        to_next=statistics.fmean(cost.to_next for cost in costs),
        to_previous=statistics.fmean(cost.to_previous for cost in costs),
    )


def _round_record(outcome: RoundOutcome) -> RoundRecord:
    missing = [f"cluster {cluster} missing: {why}" for cluster, why in sorted(outcome.missing.items())]
    return RoundRecord(
        round=outcome.round.number,
        attempts=outcome.round.attempt + 1,
        mode=outcome.kind,
        committed=outcome.committed,
        clusters=tuple(sorted(outcome.weights)),
        seconds=outcome.seconds,
        sent_bytes=outcome.sent_bytes,
        reason="; ".join([*([outcome.reason] if outcome.reason else []), *missing]),
    )
