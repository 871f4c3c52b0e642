"""Records that a node reports to its sink."""

from __future__ import annotations

import logging
import math
from collections import Counter

import pytest
import torch
from local_cluster import Formed
from training_cases import points

from ravnest import Trainer
from ravnest.averaging.outcome import RoundOutcome
from ravnest.runtime.control.telemetry_reporter import TelemetryReporter
from ravnest.runtime.stage.observer import UpdateReport
from ravnest.telemetry import (
    LossRecord,
    PaceRecord,
    PhaseRecord,
    QueueRecord,
    RoundRecord,
    ScheduleRecord,
    TimingRecord,
    ValidationRecord,
    WarningRecord,
    WorkerRecord,
    WorkRecord,
)
from ravnest.wire.messages import RoundId, StageTiming


class _Sink:
    """Keeps the records."""

    def __init__(self) -> None:
        self.records: list[WorkerRecord] = []

    def emit(self, record: WorkerRecord) -> None:
        self.records.append(record)

    def phases(self) -> list[tuple[str, int]]:
        return [(r.phase, r.epoch) for r in self.records if isinstance(r, PhaseRecord)]


@pytest.fixture
def sink() -> _Sink:
    return _Sink()


def test_records_of_a_training(cluster: Formed) -> None:
    local = cluster()
    sinks = {name: _Sink() for name in local.names}

    def script(name: str) -> None:
        loader = points()
        options = {"labels": loader, "test_labels": loader, "record_sink": sinks[name]}
        halved = {"step_size": 1, "gamma": 0.5}
        with local.node(
            name, lr_scheduler=torch.optim.lr_scheduler.StepLR, lr_scheduler_params=halved, **options
        ) as own:
            Trainer(own, train_loader=loader, val_loader=loader, epochs=2, save=True).train()

    local.results(script)
    root, leaf = (sinks[name] for name in (local.names[0], local.names[-1]))
    losses = [r for r in root.records if isinstance(r, LossRecord)]
    assert [(r.update, r.epoch) for r in losses] == [(n, n // 5) for n in range(10)]
    written = [float(line) for line in (local.folder / "losses.txt").read_text().split()]
    assert [r.loss for r in losses] == pytest.approx(written)
    rates = [0.1] * 5 + [0.05] * 5
    assert [r.learning_rate for r in losses] == pytest.approx(rates), "the rate that an update used"
    validations = [r for r in root.records if isinstance(r, ValidationRecord)]
    assert [(r.number, r.epoch, r.name) for r in validations] == [(0, 1, "accuracy"), (1, 2, "accuracy")]
    stages = {r.stage for r in root.records if isinstance(r, TimingRecord)}
    assert stages == set(range(len(local.names)))
    assert any(isinstance(r, QueueRecord) and r.window >= 1 for r in root.records)
    (schedule,) = [r for r in root.records if isinstance(r, ScheduleRecord)]
    assert (schedule.schedule, schedule.microbatches) == ("sync", losses[0].microbatches)
    assert "batch" in schedule.reason
    phases = [("connect", 0), ("train", 0), ("validate", 1), ("train", 1), ("validate", 2)]
    assert root.phases() == leaf.phases() == [*phases, ("save", 2), ("end", 2)]
    pace = next(r for r in root.records if isinstance(r, PaceRecord))
    assert (pace.epoch, pace.updates) == (0, 10)
    assert pace.samples_per_second is not None
    assert pace.samples_per_second > 0
    for own in sinks.values():
        work = [r for r in own.records if isinstance(r, WorkRecord)]
        assert work, "each node says what it does"
        assert work[-1].samples > 0
        assert work[-1].sent_bytes > 0
        assert work[-1].updates == len(losses), "the last figures are those of the end"
    only_root = LossRecord | ValidationRecord | TimingRecord | ScheduleRecord | PaceRecord
    assert not any(isinstance(r, only_root) for r in leaf.records)


def test_rates_are_bounded(sink: _Sink) -> None:
    now = [0.0]
    reporter = TelemetryReporter(sink, clock=lambda: now[0])
    timing = StageTiming(
        forward=1.0,
        backward=2.0,
        weights=0.5,
        step=3.0,
        to_next=4.0,
        to_next_busy=0.25,
        to_previous=5.0,
        to_previous_busy=0.5,
    )
    for step in range(300):
        now[0] = step / 100
        reporter.timings((timing, timing))
        reporter.queues(in_flight=1, window=2, inbox=3)
    kinds = Counter(type(record) for record in sink.records)
    assert kinds == {TimingRecord: 3 * 2, QueueRecord: 3}
    last = [r for r in sink.records if isinstance(r, TimingRecord)][-1]
    assert last == TimingRecord(1, 100, 1.0, 2.5, 3.0, 4.0, 5.0, 0.25, 0.5)


def test_the_begin_and_the_end_of_a_round_are_reported_at_once(sink: _Sink) -> None:
    reporter = TelemetryReporter(sink, clock=lambda: 0.5)
    reporter.queues(in_flight=1, window=2, inbox=3)
    for is_open in (False, True, True, False):
        reporter.averaging(is_open)
    assert sink.records == [QueueRecord(1, 2, 3), QueueRecord(1, 2, 3, True), QueueRecord(1, 2, 3)]


def test_a_repeated_phase_is_reported_once(sink: _Sink) -> None:
    reporter = TelemetryReporter(sink)
    for _ in range(3):
        reporter.phase("predict", 1)
    reporter.phase("train", 1)
    reporter.phase("predict", 1)
    assert sink.phases() == [("predict", 1), ("train", 1), ("predict", 1)]


def test_a_loss_that_is_not_finite_is_none(sink: _Sink) -> None:
    report = UpdateReport(
        3, 1, math.nan, staleness=1, batches=2, parts=4, in_flight=1, learning_rate=math.inf
    )
    TelemetryReporter(sink).update(report)
    assert sink.records == [LossRecord(3, 1, None, microbatches=8, staleness=1)]


def test_warnings_between_start_and_close(sink: _Sink) -> None:
    logger = logging.getLogger("ravnest.runtime.test")
    reporter = TelemetryReporter(sink)
    logger.warning("too early")
    reporter.start()
    logger.warning("cluster %d is slow", 3)
    logger.info("not a warning")
    reporter.close()
    logger.warning("too late")
    assert [r for r in sink.records if isinstance(r, WarningRecord)] == [
        WarningRecord("cluster 3 is slow")
    ]


def test_a_round_names_missing_clusters(sink: _Sink) -> None:
    outcome = RoundOutcome(
        RoundId(4, 1), "final", True, "", {0: 0.5, 2: 0.5}, {1: "lost"}, sent_bytes=10, seconds=0.5
    )
    TelemetryReporter(sink).round(outcome)
    (record,) = sink.records
    expected = RoundRecord(4, 2, "final", True, (0, 2), 0.5, 10, "cluster 1 missing: lost")
    assert record == expected


def test_no_sink_no_work() -> None:
    reporter = TelemetryReporter(None)
    before = list(logging.getLogger("ravnest").handlers)
    reporter.start()
    reporter.phase("train", 0)
    reporter.close()
    assert logging.getLogger("ravnest").handlers == before
