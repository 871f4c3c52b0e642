"""Telemetry records through a pipe: all kinds, a full pipe, a closed pipe, and invalid bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ravnest.provider import record_pipe
from ravnest.provider.record_pipe import (
    LONGEST_MESSAGE,
    RecordWriter,
    decoded,
    read_records,
    record_writer,
)
from ravnest.schemas.providers import AssignmentReport
from ravnest.telemetry import (
    LossRecord,
    PaceRecord,
    PhaseRecord,
    QueueRecord,
    RoundRecord,
    SpansRecord,
    TimingRecord,
    ValidationRecord,
    WarningRecord,
    WorkerRecord,
)

ALL = (
    PhaseRecord("train", 0),
    SpansRecord((9, *range(1, 10)), 7),
    LossRecord(0, 0, 2.5, 4, 1),
    LossRecord(1, 0, None, 4, 1),
    ValidationRecord(0, 1, "accuracy", 0.75, 100),
    RoundRecord(0, 1, "background", True, (0, 1), 0.5, 1000, ""),
    TimingRecord(1, 10, 0.1, 0.2, 0.05, 0.01, 0.01),
    QueueRecord(3, 4, 0),
    PaceRecord(1, 40, 12.5, None),
    WarningRecord("slow neighbour\nnode_1"),
)
SECONDS = 30


class Reader:
    """Reads a pipe in a thread."""

    def __init__(self, descriptor: int) -> None:
        self.records: list[WorkerRecord] = []
        self._thread = threading.Thread(target=read_records, args=(descriptor, self.records.extend))
        self._thread.start()

    def finish(self) -> list[WorkerRecord]:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.records


@contextmanager
def unread() -> Iterator[tuple[RecordWriter, int]]:
    """A started writer, and the descriptor from which nobody reads yet."""
    reading, writing = os.pipe()
    writer = RecordWriter(writing)
    writer.start()
    yield writer, reading


def fill(writer: RecordWriter, reading: int) -> int:
    """Emit losses until the pipe is full and the writer waits; return how many."""
    capacity = 1 << 20
    count = capacity // 50
    for number in range(count):
        writer.emit(LossRecord(number, 0, 1.0, 1, 0))
    return count


def test_all_kinds_arrive_in_order() -> None:
    reading, writing = os.pipe()
    reader = Reader(reading)
    with record_writer(writing) as writer:
        assert writer is not None
        for record in ALL:
            writer.emit(record)
    assert tuple(reader.finish()) == ALL
    report = AssignmentReport(assignment="a", phase="training", records=ALL)
    assert AssignmentReport.model_validate_json(report.model_dump_json()) == report


def test_a_full_pipe_blocks_nobody_and_drops_only_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_pipe, "BACKLOG", 100)
    with unread() as (writer, reading):
        count = fill(writer, reading)
        for record in ALL:
            writer.emit(record)
        reader = Reader(reading)
        writer.close()
        records = reader.finish()
    assert writer.dropped >= 1
    kept = [record for record in ALL if not isinstance(record, TimingRecord | QueueRecord | PaceRecord)]
    assert [
        r for r in records[count:] if not isinstance(r, TimingRecord | QueueRecord | PaceRecord)
    ] == kept
    assert [record.update for record in records[:count] if isinstance(record, LossRecord)] == list(
        range(count)
    )


def test_an_agent_that_is_gone_does_not_disturb_the_worker() -> None:
    with unread() as (writer, reading):
        os.close(reading)
        for record in ALL * 100:
            writer.emit(record)
        writer.close()


def test_without_a_descriptor_nothing_is_sent() -> None:
    with record_writer(None) as writer:
        assert writer is None


def test_a_warning_is_shortened() -> None:
    reading, writing = os.pipe()
    reader = Reader(reading)
    with record_writer(writing) as writer:
        assert writer is not None
        writer.emit(WarningRecord("x" * 200_000))
    (record,) = reader.finish()
    assert isinstance(record, WarningRecord)
    assert len(record.message) == LONGEST_MESSAGE


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"no record",
        b"[]",
        b'{"kind": "loss"}',
        b'{"kind": "unknown", "update": 1}',
        b'{"kind": "phase", "phase": "dance", "epoch": 0}',
        b'{"kind": "queue", "in_flight": "many", "window": 1, "inbox": 0}',
        b'{"kind": "warning", "message": "' + b"x" * 100_000 + b'"}',
        b"\xff\xfe",
    ],
)
def test_a_line_that_is_no_record_is_left_out(line: bytes) -> None:
    assert decoded(line) is None


def test_records_after_a_bad_line_still_arrive() -> None:
    reading, writing = os.pipe()
    reader = Reader(reading)
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(b"x" * 300_000 + b"\n")
        pipe.write(b'{"kind": "warning", "message": "still here"}\n{"kind": "war')
    assert reader.finish() == [WarningRecord("still here")]


def test_a_killed_worker_ends_the_pipe() -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    script = (
        "import sys, threading\n"
        "from ravnest.provider.record_pipe import record_writer\n"
        "from ravnest.telemetry import WarningRecord\n"
        "with record_writer(int(sys.argv[1])) as writer:\n"
        "    writer.emit(WarningRecord('started'))\n"
        "    threading.Event().wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(writing)], pass_fds=(writing,)) as process:
        os.close(writing)
        found: list[WorkerRecord] = []

        def kill(records: tuple[WorkerRecord, ...]) -> None:
            found.extend(records)
            process.kill()

        read_records(reading, kill)
    assert found == [WarningRecord("started")]
