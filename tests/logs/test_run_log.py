"""Logs of a run: files for TensorBoard and for programs, and calls of the user's code."""

from __future__ import annotations

import csv
import json
import logging
import math
import struct
import threading
from pathlib import Path

import pytest

from ravnest.errors import SettingsError
from ravnest.logs import background
from ravnest.logs.callbacks import Callbacks
from ravnest.logs.event_file import EventFile, _masked, crc32c
from ravnest.logs.run_log import METRICS, RECORDS, RunLog
from ravnest.logs.scalars import scalars_of
from ravnest.telemetry import (
    LossRecord,
    PaceRecord,
    PhaseRecord,
    RoundRecord,
    TimingRecord,
    ValidationRecord,
    WorkerRecord,
)

RECORDS_OF_A_RUN: tuple[WorkerRecord, ...] = (
    PhaseRecord("train", 0),
    LossRecord(0, 0, 2.5, 4, 0),
    LossRecord(1, 0, None, 4, 1),
    PaceRecord(0, 100, 12.5, 8.0),
    RoundRecord(0, 1, "background", True, (0, 1), 0.25, 1000, ""),
    RoundRecord(1, 1, "background", False, (), 0.5, 0, "nobody answered"),
    TimingRecord(1, 8, 0.001, 0.002, 0.0005, 0.0001, 0.0),
    ValidationRecord(0, 1, "accuracy", 0.75, 100),
)


def frames(data: bytes) -> list[bytes]:
    """Return the messages of an event file; checks lengths and checksums."""
    found = []
    while data:
        head, rest = data[:8], data[12:]
        assert data[8:12] == _masked(head)
        (length,) = struct.unpack("<Q", head)
        message, data = rest[:length], rest[length + 4 :]
        assert rest[length : length + 4] == _masked(message)
        found.append(message)
    return found


def test_the_checksum_is_that_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"\0" * 32) == 0x8A9136AA


def test_an_event_file_has_the_bytes_of_the_format(tmp_path: Path) -> None:
    with EventFile(tmp_path, 3.0, "a") as file:
        file.add([("x", 1.0)], 300, 4.0)
        file.add([("y", 1e300)], 1, 4.0)
    version, scalar, huge = frames(file.path.read_bytes())
    assert version == b"\x09" + struct.pack("<d", 3.0) + b"\x1a\x0dbrain.Event:2"
    value = b"\x0a\x01x\x15" + struct.pack("<f", 1.0)
    summary = b"\x0a" + bytes([len(value)]) + value
    time_and_step = b"\x09" + struct.pack("<d", 4.0) + b"\x10\xac\x02"
    assert scalar == time_and_step + b"\x2a" + bytes([len(summary)]) + summary
    assert huge.endswith(struct.pack("<f", math.inf))


def test_figures_have_names_that_group_them() -> None:
    known = [("train/loss", 2.5), ("train/staleness", 1)]
    assert scalars_of(LossRecord(1, 0, 2.5, 4, 1)) == known
    assert scalars_of(LossRecord(1, 0, 2.5, 4, 1, 0.01)) == [*known, ("train/learning_rate", 0.01)]
    assert scalars_of(RoundRecord(1, 1, "background", False, (), 0.5, 0, "why")) == []
    assert scalars_of(ValidationRecord(0, 1, "accuracy", 0.75, 100, {"accuracy": 0.75, "f1": 0.5})) == [
        ("validation/accuracy", 0.75),
        ("validation/f1", 0.5),
    ]
    assert scalars_of(RECORDS_OF_A_RUN[6])[0] == ("stage_1/forward_ms", 1.0)


def test_a_run_is_logged_and_continued(tmp_path: Path) -> None:
    for _ in range(2):
        with RunLog(tmp_path / "run", clock=lambda: 1000.0) as log:
            for record in RECORDS_OF_A_RUN:
                log.emit(record)
        log.emit(RECORDS_OF_A_RUN[0])  # dropped
    with (tmp_path / "run" / METRICS).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["value"] for row in rows if row["name"] == "train/loss"] == ["2.5", "nan"] * 2
    assert rows[-1] == {
        "time": "1000.000",
        "update": "1",
        "name": "validation/accuracy",
        "value": "0.75",
    }
    lines = [json.loads(line) for line in (tmp_path / "run" / RECORDS).read_text("utf-8").splitlines()]
    assert [line["kind"] for line in lines[: len(RECORDS_OF_A_RUN)]] == [
        record.kind for record in RECORDS_OF_A_RUN
    ]
    events = sorted((tmp_path / "run").glob("events.out.tfevents.*"))
    with_figures = [record for record in RECORDS_OF_A_RUN if scalars_of(record)]
    for each in events:
        _, *found = frames(each.read_bytes())
        assert len(found) == len(with_figures), "one event for each record"
        for event, record in zip(found, with_figures, strict=True):
            assert all(name.encode() in event for name, _ in scalars_of(record))


def test_records_are_written_at_once_with_their_own_times(tmp_path: Path) -> None:
    class Counted(RunLog):
        calls = 0

        def flush(self) -> None:
            super().flush()
            self.calls += 1

    with Counted(tmp_path) as log:
        for update in range(50):
            log.emit(LossRecord(update, 0, 1.0, 1, 0), at=100.0 + update)
        log.emit(ValidationRecord(0, 1, 'top 5, "all"', 0.5, 10), at=200.0)
    assert log.calls <= 3, "not once for each record"
    with (tmp_path / METRICS).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [row for row in rows if row["name"] == "train/loss"]
    assert [float(row["time"]) for row in losses] == [100.0 + update for update in range(50)]
    assert rows[-1]["name"] == 'validation/top 5, "all"'


def test_a_callback_that_hangs_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    entered, release = threading.Event(), threading.Event()

    class Hanging(Callbacks):
        def on_update(self, record: LossRecord) -> None:
            entered.set()
            release.wait(60)

    hanging = Hanging()
    for _ in range(background._MOST + 3):
        hanging.emit(RECORDS_OF_A_RUN[1])
    assert entered.wait(60)
    with caplog.at_level(logging.WARNING):
        hanging.close(timeout=0.01)
    release.set()
    assert "records were dropped" in caplog.text or "not ended after 0.01 s" in caplog.text


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(SettingsError, match="cannot write a log to"):
        RunLog(tmp_path / "file" / "run")


def test_callbacks_get_their_records_in_another_thread() -> None:
    class Own(Callbacks):
        def __init__(self) -> None:
            self.seen: list[tuple[str, str]] = []
            self.threads: set[str] = set()
            super().__init__()

        def on_update(self, record: LossRecord) -> None:
            self._note("update", record)

        def on_validation(self, record: ValidationRecord) -> None:
            self._note("validation", record)

        def on_round(self, record: RoundRecord) -> None:
            self._note("round", record)

        def on_event(self, record: WorkerRecord) -> None:
            self._note("event", record)

        def _note(self, method: str, record: WorkerRecord) -> None:
            self.seen.append((method, record.kind))
            self.threads.add(threading.current_thread().name)

    with Own() as own:
        for record in RECORDS_OF_A_RUN:
            own.emit(record)
    methods = {"loss": "update", "validation": "validation", "round": "round"}
    assert own.seen == [(methods.get(r.kind, "event"), r.kind) for r in RECORDS_OF_A_RUN]
    assert own.threads == {"ravnest-log"}


def test_a_failing_callback_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Callbacks):
        def on_update(self, record: LossRecord) -> None:
            raise ValueError(f"no {record.update}")

    with caplog.at_level(logging.WARNING), Failing() as failing:
        for record in RECORDS_OF_A_RUN:
            failing.emit(record)
    assert [r.getMessage() for r in caplog.records] == [
        "Failing: ValueError: no 0; told once, training continues"
    ]
