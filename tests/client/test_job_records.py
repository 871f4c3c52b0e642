"""The records of a followed job: times, epochs and staleness of each update, and repeated updates."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from ravnest.client.handle import JobHandle
from ravnest.client.job_records import JobRecords
from ravnest.errors import SettingsError
from ravnest.logs.run_log import METRICS, RECORDS, RunLog
from ravnest.schemas.jobs import EventView, JobProgress, JobState, JobView, LossHistory
from ravnest.telemetry import LossRecord, RoundRecord, ValidationRecord


class Server:
    """A job whose losses are stored as a server stores them: the last one of each update."""

    def __init__(self) -> None:
        self.losses_by_update: dict[int, tuple[float, LossRecord]] = {}
        self.rounds: list[tuple[float, RoundRecord]] = []
        self.tests: dict[int, tuple[float, ValidationRecord]] = {}
        self.recoveries = 0
        self.asked: list[tuple[int, float]] = []

    def train(self, at: float, *updates: int, staleness: int = 0) -> None:
        for each in updates:
            self.losses_by_update[each] = at, LossRecord(each, each // 10, at + each, 1, staleness, 0.1)

    def view(self, state: JobState = JobState.TRAINING) -> JobView:
        last = self.losses_by_update[max(self.losses_by_update)][1]
        return JobView(
            id="job-1",
            name="job",
            owner="rita",
            state=state,
            reason="",
            created=0.0,
            changed=0.0,
            recoveries=self.recoveries,
            progress=JobProgress(
                updates=last.update + 1, epoch=last.epoch + 1, epochs=9, staleness=last.staleness
            ),
        )

    def losses(self, first: int = 0, since: float = 0.0) -> LossHistory:
        self.asked.append((first, since))
        found = [each for update, each in sorted(self.losses_by_update.items()) if update >= first]
        tests = [each for _, each in sorted(self.tests.items()) if each[0] >= since]
        rounds = [each for each in self.rounds if each[0] >= since]
        return LossHistory(
            first=first,
            updates=tuple(loss.update for _, loss in found),
            losses=tuple(loss.loss for _, loss in found),
            validations=tuple(test for _, test in tests),
            epochs=tuple(loss.epoch for _, loss in found),
            staleness=tuple(loss.staleness for _, loss in found),
            times=tuple(at for at, _ in found),
            validation_times=tuple(at for at, _ in tests),
            rounds=tuple(each for _, each in rounds),
            round_times=tuple(at for at, _ in rounds),
        )

    def events(self, after: int = 0) -> list[EventView]:
        return []


def averaged(number: int) -> RoundRecord:
    return RoundRecord(number, 1, "background", True, (0, 1), 0.5, 1, "")


def test_each_update_has_its_own_time_epoch_and_staleness() -> None:
    server = Server()
    server.train(100.0, *range(15), staleness=3)
    server.train(200.0, *range(15, 25), staleness=0)
    found = JobRecords(server).of(server.view())
    losses = [(at, each) for at, each in found if isinstance(each, LossRecord)]
    assert [at for at, _ in losses] == [100.0] * 15 + [200.0] * 10
    assert [each.epoch for _, each in losses] == [0] * 10 + [1] * 10 + [2] * 5
    assert [each.staleness for _, each in losses] == [3] * 15 + [0] * 10


def test_repeated_updates_and_all_rounds_arrive_once() -> None:
    server = Server()
    records = JobRecords(server)
    server.train(100.0, *range(20))
    server.rounds = [(90.0, averaged(0)), (95.0, averaged(1))]
    server.tests[0] = 99.0, ValidationRecord(0, 1, "loss", 1.0, 10)
    first = [each for _, each in records.of(server.view())]
    assert [each.round for each in first if isinstance(each, RoundRecord)] == [0, 1]
    assert [each.kind for each in first[:4]] == ["round", "round", "validation", "loss"], "by time"
    assert records.of(server.view()) == []
    server.recoveries = 1
    assert records.of(server.view()) == []
    server.train(130.0, *range(12, 16))
    server.rounds.append((131.0, averaged(2)))
    again = [each for _, each in records.of(server.view())]
    assert [each.update for each in again if isinstance(each, LossRecord)] == [12, 13, 14, 15]
    assert [each.round for each in again if isinstance(each, RoundRecord)] == [2]
    server.train(140.0, *range(16, 30))
    assert [each.update for _, each in records.of(server.view())] == list(range(16, 30))
    assert server.asked[-1] == (16, 71.0), "not all of it again"


def test_a_server_without_times_sends_each_update_once() -> None:
    class Older(Server):
        def losses(self, first: int = 0, since: float = 0.0) -> LossHistory:
            found = super().losses(first)
            later = ("epochs", "staleness", "times", "validation_times", "rounds", "round_times")
            return found.model_copy(update=dict.fromkeys(later, ()))

    server = Older()
    records = JobRecords(server)
    server.tests[0] = 1.0, ValidationRecord(0, 1, "loss", 1.0, 10)
    server.train(1.0, 0, 1)
    assert [(at, each.kind) for at, each in records.of(server.view())] == [
        (None, "loss"),
        (None, "loss"),
        (None, "validation"),
    ]
    server.recoveries = 1
    server.train(2.0, 2)
    assert [each.kind for _, each in records.of(server.view())] == ["loss"]


def test_the_log_of_a_job_has_the_times_of_the_server(tmp_path: Path) -> None:
    server = Server()
    server.train(100.0, 0, 1)
    server.train(200.0, 2)
    server.tests[0] = 150.0, ValidationRecord(0, 1, "loss", 1.0, 10)

    class Handle(JobHandle):
        def __init__(self) -> None:
            pass

        losses = server.losses  # type: ignore[assignment]
        events = server.events  # type: ignore[assignment]

        def wait(self, timeout: float | None = None, on_change: object = None) -> JobView:
            ended = server.view(JobState.DONE)
            on_change(ended)  # type: ignore[operator]
            return ended

    with RunLog(tmp_path, continues=False) as log:
        Handle().follow(log)
    with (tmp_path / METRICS).open(encoding="utf-8", newline="") as file:
        rows = [(row["time"], row["update"], row["name"]) for row in csv.DictReader(file)]
    assert [row for row in rows if row[2] == "train/loss"] == [
        ("100.000", "0", "train/loss"),
        ("100.000", "1", "train/loss"),
        ("200.000", "2", "train/loss"),
    ]
    assert ("150.000", "1", "validation/loss") in rows, "with the update of its time"
    lines = (tmp_path / RECORDS).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["time"] for line in lines] == [100.0, 100.0, 150.0, 200.0]
    with pytest.raises(SettingsError, match="has the log of an earlier run"):
        RunLog(tmp_path, continues=False)


def test_an_empty_log_may_be_begun_again(tmp_path: Path) -> None:
    for _ in range(2):
        RunLog(tmp_path, continues=False).close()
