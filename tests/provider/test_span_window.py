"""Spans that a worker sends: those of the start, of a request, and of the end."""

from __future__ import annotations

import threading
from pathlib import Path

from ravnest.provider.job_dir import JobDir
from ravnest.provider.span_window import ENDS, RECENT, SpanWindow, answering
from ravnest.telemetry import SpansRecord, WorkerRecord
from ravnest.tracing.spans import SpanKind, TraceSpan, unflattened


class _Sink:
    def __init__(self) -> None:
        self.records: list[SpansRecord] = []
        self.answered = threading.Event()

    def emit(self, record: WorkerRecord) -> None:
        assert isinstance(record, SpansRecord)
        self.records.append(record)
        if record.order:
            self.answered.set()

    def taken(self) -> list[int]:
        records, self.records = self.records, []
        return [span.second for record in records for span in unflattened(record.spans)]


def _spans(first: int, count: int) -> list[TraceSpan]:
    return [TraceSpan(SpanKind.FORWARD, index, 1, 0, 0, index) for index in range(first, first + count)]


def test_a_worker_sends_the_start_the_end_and_what_is_asked_for() -> None:
    sink = _Sink()
    window = SpanWindow(sink)
    window.write(_spans(0, ENDS - 1))
    window.write(_spans(ENDS - 1, 3 * RECENT))
    total = ENDS - 1 + 3 * RECENT
    assert sink.taken() == list(range(ENDS))
    window.request(9)
    assert [record.order for record in sink.records if record.order] == [9]
    assert sink.records[-1].order == 9, "the last record says that all have arrived"
    assert sink.taken() == list(range(total - RECENT, total))
    window.close()
    assert sink.taken() == list(range(total - ENDS, total))


def test_a_request_without_spans_is_answered_too() -> None:
    sink = _Sink()
    SpanWindow(sink).request(3)
    assert sink.records == [SpansRecord((), 3)]


def test_the_worker_follows_the_requests_of_its_agent(tmp_path: Path) -> None:
    sink, job_dir = _Sink(), JobDir(tmp_path)
    window = SpanWindow(sink)
    with answering(window, job_dir, pause=0.001):
        (tmp_path / "trace.json").write_text("no number")
        job_dir.write_trace_order(17)
        assert sink.answered.wait(60)
    assert [record.order for record in sink.records] == [17]
