"""Telemetry of a node: its reports as typed records, at a bounded rate."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ravnest.averaging.outcome import RoundOutcome
from ravnest.runtime.control.checkpoints import CheckpointReport
from ravnest.runtime.control.progress import RunState
from ravnest.runtime.control.recent_records import RecentRecord
from ravnest.runtime.stage.observer import UpdateReport
from ravnest.telemetry import (
    BestRecord,
    CheckpointRecord,
    CheckRecord,
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
    WorkRecord,
    finite,
)
from ravnest.tracing.recorder import SpanRecorder
from ravnest.types import Schedule
from ravnest.wire.messages import StageTiming, ValidationResult

_INTERVAL = 1.0
"""Seconds between two reports of timings, of queue lengths and of work."""
_BUSY_INTERVAL = 0.05
"""Seconds between two looks at the time of the compute thread, a call of the kernel."""
Traffic = tuple[int, int]
"""Bytes received from other nodes and sent to them."""


class TelemetryReporter:
    """Creates the records of one node. Without a sink, every method returns at once."""

    def __init__(
        self,
        sink: RecordSink | None,
        clock: Callable[[], float] = time.monotonic,
        trace: SpanRecorder | None = None,
    ) -> None:
        """``trace`` records the phases."""
        self._trace = trace
        self._sink = sink
        self._clock = clock
        self._phase = PhaseRecord("end", 0)
        self._phase_lock = threading.Lock()
        self._validations = 0
        self._timings: list[tuple[StageTiming, ...]] = []
        self._next_timings = 0.0
        self._next_queues = 0.0
        self._queue = QueueRecord(0, 0, 0)
        self._next_work = 0.0
        self._samples = 0
        self._busy = 0.0
        self._next_busy = 0.0
        self._work: tuple[UpdateReport, Callable[[], Traffic]] | None = None
        """Last update, if its work is not reported yet."""
        self._next_pace = 0.0
        self._warnings = None if sink is None else _WarningHandler(sink)

    def start(self) -> None:
        """Report warnings of the package's loggers from now on, until ``close``."""
        if self._warnings is not None:
            logging.getLogger("ravnest").addHandler(self._warnings)

    def close(self) -> None:
        """Report the last work and the end, and no warnings from now on."""
        self._report_work()
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

    def check(self, record: CheckRecord) -> None:
        """Report a file for a spot check."""
        if self._sink is not None:
            self._sink.emit(record)

    def recovery(self, record: RecoveryRecord) -> None:
        """Report that training continues after a loss."""
        if self._sink is not None:
            self._sink.emit(record)

    def phase(self, phase: PhaseName, epoch: int | None = None) -> None:
        """Report the start of a phase, unless it is the one reported last.

        Without ``epoch``, the phase belongs to the same epoch as the one before.
        """
        if self._sink is None and self._trace is None:
            return
        with self._phase_lock:
            record = PhaseRecord(phase, self._phase.epoch if epoch is None else epoch)
            if record == self._phase:
                return
            self._phase = record
            if self._sink is not None:
                self._sink.emit(record)
            if self._trace is not None:
                self._trace.phase(phase, record.epoch)

    def update(self, update: UpdateReport) -> None:
        """Report the loss of an update."""
        if self._sink is not None and (record := update.loss_record) is not None:
            self._sink.emit(record)

    def repeat(self, record: RecentRecord) -> None:
        """Report a result that the process which this Root replaces may not have reported."""
        if self._sink is not None:
            self._sink.emit(record)

    def pace(self, state: RunState, made: int) -> None:
        """Report the pace after ``made`` updates, at most once per interval."""
        if self._sink is not None and (now := self._clock()) >= self._next_pace:
            self._next_pace = now + _INTERVAL
            self._sink.emit(state.pace(made))

    def schedule(self, schedule: Schedule, microbatches: int, reason: str) -> None:
        """Report the schedule of the run, at its beginning and when it changes."""
        if self._sink is not None:
            self._sink.emit(ScheduleRecord(schedule, microbatches, reason))

    def queues(self, *, in_flight: int, window: int, inbox: int) -> None:
        """Report queue lengths, at most once per interval."""
        if self._sink is not None and (now := self._clock()) >= self._next_queues:
            self._next_queues = now + _INTERVAL
            self._queue = QueueRecord(in_flight, window, inbox, self._queue.averaging)
            self._sink.emit(self._queue)

    def averaging(self, is_open: bool) -> None:
        """Report that an averaging round begins or ends, with the newest queue lengths."""
        if self._sink is not None and self._queue.averaging != is_open:
            self._queue = replace(self._queue, averaging=is_open)
            self._sink.emit(self._queue)

    def work(self, update: UpdateReport, traffic: Callable[[], Traffic]) -> None:
        """Count an update and report the node's work; in the compute thread, whose time counts."""
        self._samples += update.samples
        if self._sink is None:
            return
        now = self._clock()
        if now >= self._next_busy:
            self._next_busy = now + _BUSY_INTERVAL
            self._busy = time.thread_time()
        self._work = update, traffic
        if now >= self._next_work:
            self._next_work = now + _INTERVAL
            self._report_work()

    def _report_work(self) -> None:
        """Report the work up to the last update, if that was not reported."""
        work, self._work = self._work, None
        if self._sink is not None and work is not None:
            update, traffic = work
            made, (received, sent) = update.number + 1, traffic()
            self._sink.emit(WorkRecord(made, update.epoch, self._samples, self._busy, received, sent))

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

    def validation(self, result: ValidationResult, epoch: int) -> ValidationRecord:
        """Report the result of a validation after ``epoch`` epochs of training; return the record."""
        number, self._validations = self._validations, self._validations + 1
        value = finite(result.value)
        metrics = {name: finite(each) for name, each in result.metrics.items()}
        record = ValidationRecord(number, epoch, result.name, value, result.samples, metrics)
        if self._sink is not None:
            self._sink.emit(record)
        return record

    def best(self, metric: str, value: float, epoch: int) -> None:
        """Report that the weights after ``epoch`` epochs are kept as the best ones."""
        if self._sink is not None:
            self._sink.emit(BestRecord(epoch, metric, value))

    def stopped(self, reason: str) -> None:
        """Report that training stops before its last epoch."""
        if self._sink is not None:
            self._sink.emit(WarningRecord(reason))

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
        to_next_busy=statistics.fmean(cost.to_next_busy for cost in costs),
        to_previous_busy=statistics.fmean(cost.to_previous_busy for cost in costs),
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
