"""Records of a node that a launcher has started."""

from __future__ import annotations

import json
import os

import pytest

from ravnest.logs.record_stream import (
    PROGRESS_VARIABLE,
    RECORDS_VARIABLE,
    RecordStream,
    launched_sink,
)
from ravnest.runtime.settings import NodeSettings
from ravnest.telemetry import PhaseRecord, WorkerRecord


class _Kept:
    def __init__(self) -> None:
        self.records: list[WorkerRecord] = []

    def emit(self, record: WorkerRecord) -> None:
        self.records.append(record)


def test_without_a_launcher_the_sink_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = _Kept()
    assert launched_sink(own) is own
    assert launched_sink(None) is None
    monkeypatch.setenv(RECORDS_VARIABLE, "9999")
    assert launched_sink(own) is own, "the pipe is not there"
    assert NodeSettings().progress
    monkeypatch.setenv(PROGRESS_VARIABLE, "0")
    assert not NodeSettings().progress, "the launcher shows the progress"


def test_records_reach_the_launcher_and_the_sink_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    source, end = os.pipe()
    monkeypatch.setenv(RECORDS_VARIABLE, str(end))
    own, record = _Kept(), PhaseRecord("train", 2)
    both = launched_sink(own)
    assert both is not None
    both.emit(record)
    assert launched_sink(own) is own, "the next node of this process has no pipe"
    stream = both._other  # type: ignore[attr-defined]
    assert isinstance(stream, RecordStream)
    stream.close()
    with os.fdopen(source, "rb") as pipe:
        (line,) = pipe.read().splitlines()
    assert json.loads(line) == {"phase": "train", "epoch": 2, "kind": "phase"}
    assert own.records == [record]
