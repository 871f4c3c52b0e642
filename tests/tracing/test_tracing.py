"""Traces: recording, files, clocks, and the document for Perfetto."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ravnest.errors import SettingsError
from ravnest.tracing.chrome import chrome_trace, nested
from ravnest.tracing.clocks import clock_offsets
from ravnest.tracing.files import SpanFiles, newest_run, read_traces
from ravnest.tracing.node_trace import NodeTrace, TracedNode
from ravnest.tracing.recorder import SpanRecorder, link_number, now
from ravnest.tracing.spans import (
    FIELDS,
    LABELS,
    LARGEST,
    PHASES,
    SpanKind,
    TraceSpan,
    flattened,
    unflattened,
)
from ravnest.types import MicrobatchId

ROOT = TracedNode(0, 0, 0, "Root", "alice")
LEAF = TracedNode(1, 0, 1, "Leaf", "bob")


@dataclass(frozen=True)
class Forward:
    """Head of a message, as far as traces know it."""

    microbatch: MicrobatchId


def test_recorded_spans_are_taken_once_and_have_wall_times() -> None:
    recorder = SpanRecorder()
    start = now()
    recorder.add(SpanKind.FORWARD, start, 2, 7, end=start + 5_000_000)
    recorder.message(SpanKind.SEND, start, Forward(MicrobatchId(2, 7)), (1, 5), 9, 100)
    recorder.message(SpanKind.SEND, start, object(), (1, 5), 10, 1)
    forward, sent, other = recorder.take()
    assert (forward.kind, forward.duration, forward.first, forward.second) == (0, 5000, 2, 7)
    assert forward.start > 1_700_000_000_000_000, "microseconds since 1970"
    assert sent[3:] == (1, 2, 7, 1, 5, 9, 100)
    assert other.what == 0
    assert recorder.take() == []


def test_a_recorder_keeps_the_newest_spans_only() -> None:
    recorder = SpanRecorder(limit=3)
    for index in range(10):
        recorder.add(SpanKind.FORWARD, now(), 0, index)
    assert [span.second for span in recorder.take()] == [7, 8, 9]


def test_phases_outlast_the_reporter_that_began_them() -> None:
    recorder = SpanRecorder()
    for phase, epoch in (("connect", 0), ("train", 1), ("rejoin", 1), ("train", 1), ("end", 1)):
        recorder.phase(phase, epoch)
    found = [(PHASES[span.what], span.first) for span in recorder.take()]
    assert found == [("connect", 0), ("train", 1), ("rejoin", 1), ("train", 1)]


def test_spans_survive_flattening() -> None:
    spans = [TraceSpan(SpanKind.SEND, 5, 6, 1, 2, 3, 4, 5, 6, 7), TraceSpan(SpanKind.STEP, 1, 2)]
    assert list(unflattened(flattened(spans))) == spans


@pytest.mark.parametrize(
    "numbers",
    [
        (1,) * (FIELDS - 1),
        TraceSpan(99, 0, 0),
        TraceSpan(SpanKind.FORWARD, -1, 0),
        TraceSpan(SpanKind.FORWARD, 0, LARGEST),
        TraceSpan(SpanKind.SEND, 0, 0, what=10_000),
        TraceSpan(SpanKind.FORWARD, 0, 0, what=1),
        (SpanKind.STEP, 0.5, *(0,) * (FIELDS - 2)),
        (SpanKind.STEP, True, *(0,) * (FIELDS - 2)),
    ],
)
def test_numbers_that_are_no_spans_are_refused(numbers: Any) -> None:
    with pytest.raises(ValueError, match="span"):
        list(unflattened(numbers))


def test_every_kind_has_a_name_and_can_be_shown() -> None:
    assert set(LABELS) == set(SpanKind)
    spans = tuple(TraceSpan(kind, 10 * kind, 5) for kind in SpanKind)
    shown = [each for each in chrome_trace([NodeTrace(ROOT, spans)])["traceEvents"] if each["ph"] == "X"]
    assert len(shown) == len(SpanKind)


def test_files_are_read_back_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    files = SpanFiles(tmp_path, ROOT)
    spans = [TraceSpan(SpanKind.FORWARD, 10 * index, 5, 0, 0, index) for index in range(600)]
    files.write(spans)
    files.close()
    (path,) = tmp_path.iterdir()
    with path.open("a") as file:
        file.write("[1, 2")
    assert read_traces(tmp_path) == [NodeTrace(ROOT, tuple(spans))]


def test_files_of_a_long_run_keep_its_start_and_its_end(tmp_path: Path) -> None:
    files = SpanFiles(tmp_path, ROOT, limit=10)
    for index in range(100):
        files.write([TraceSpan(SpanKind.FORWARD, 10 * index, 5, 0, 0, index)])
    files.close()
    (trace,) = read_traces(tmp_path)
    assert [span.second for span in trace.spans] == [*range(10), *range(80, 100)]


def test_only_the_newest_run_of_a_folder_is_shown() -> None:
    hour = 3600 * 1_000_000
    times = [(0, ROOT), (10, LEAF), (hour, ROOT), (hour + 60, LEAF)]
    traces = [NodeTrace(node, (TraceSpan(SpanKind.STEP, at, 5),)) for at, node in times]
    assert newest_run(traces) == traces[2:]


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", '{"format": "ravnest-trace-1"}\n', "\0\n"])
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.1.spans.jsonl").write_text(text)
    with pytest.raises(SettingsError, match=r"x\.1\.spans\.jsonl is no trace"):
        read_traces(tmp_path)


def test_a_folder_without_traces_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"Node\(trace=folder\)"):
        read_traces(tmp_path)


def _messages(there: list[int], back: list[int], ahead: int) -> list[NodeTrace]:
    """Return two nodes with messages of these delays; the second clock is ahead."""
    link = link_number("session")
    root, leaf = [], []
    for number, delay in enumerate(there):
        at = 1000 * number
        root.append(TraceSpan(SpanKind.SEND, at, 1, 1, 0, number, 1, link, number))
        leaf.append(TraceSpan(SpanKind.RECEIVE, at + delay + ahead, 0, 1, 0, number, 0, link, number))
    for number, delay in enumerate(back):
        at = 1000 * number + 500
        leaf.append(TraceSpan(SpanKind.SEND, at + ahead, 1, 2, 0, number, 0, link, number))
        root.append(TraceSpan(SpanKind.RECEIVE, at + delay, 0, 2, 0, number, 1, link, number))
    return [NodeTrace(ROOT, tuple(root)), NodeTrace(LEAF, tuple(leaf))]


@pytest.mark.parametrize("ahead", [0, 123_456, 7])
def test_clocks_are_compared_by_the_fastest_messages(ahead: int) -> None:
    first, second = clock_offsets(_messages([300, 90, 200], [500, 110], ahead))
    assert (first.ahead, first.error) == (0, 0)
    assert second.error == 100, "half of the fastest round trip"
    assert abs(second.ahead - ahead) <= 100


def test_clocks_without_messages_both_ways_are_taken_as_they_are() -> None:
    _, second = clock_offsets(_messages([100], [], 50))
    assert (second.ahead, second.error) == (0, None)


def test_the_last_seconds_are_those_of_one_clock() -> None:
    hour = 3_600_000_000
    root, leaf = _messages([100, 100], [100, 100], hour)
    root = NodeTrace(root.node, (*root.spans, TraceSpan(SpanKind.STEP, 2_000_000, 10)))
    document = chrome_trace([root, leaf], seconds=1.0)
    assert [each["name"] for each in document["traceEvents"] if each["ph"] == "X"] == ["optimizer step"]
    everything = chrome_trace([root, leaf], seconds=60.0)["traceEvents"]
    assert {each["pid"] for each in everything if each["ph"] == "X"} == {1, 2}, (
        "not the clock ahead only"
    )


def test_spans_of_a_row_lie_within_each_other_or_apart() -> None:
    spans = [TraceSpan(SpanKind.SEND, start, end - start) for start, end in ((0, 10), (5, 20), (6, 8))]
    found = [(span.start, span.end) for span in nested([*spans, TraceSpan(SpanKind.SEND, 30, 0)])]
    assert found == [(0, 10), (6, 8), (10, 20), (30, 30)]


def test_the_document_has_rows_clocks_and_arrows() -> None:
    root, leaf = _messages([100, 100], [100, 100], 5000)
    passes = [
        (SpanKind.FORWARD, root, 0),
        (SpanKind.FORWARD, leaf, 200 + 5000),
        (SpanKind.BACKWARD, leaf, 300 + 5000),
        (SpanKind.BACKWARD, root, 450),
    ]
    more: dict[int, list[TraceSpan]] = {0: [], 1: []}
    for kind, trace, at in passes:
        more[trace.node.node].append(TraceSpan(kind, at, 50, 0, 3, 7))
    more[0].append(TraceSpan(SpanKind.WAIT, 50, 400, SpanKind.BACKWARD))
    traces = [NodeTrace(each.node, (*each.spans, *more[each.node.node])) for each in (leaf, root)]
    document = json.loads(json.dumps(chrome_trace(traces)))
    events = document["traceEvents"]
    names = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert names == {"compute", "to node_1", "from node_1", "to node_0", "from node_0"}
    processes = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert processes == [
        "cluster 0, stage 0: node_0 (Root) on alice",
        "cluster 0, stage 1: node_1 (Leaf) on bob",
    ]
    assert document["otherData"]["clocks"][processes[1]] == (
        "clock corrected by -5.000 ms, error at most 0.100 ms"
    )
    assert [each["name"] for each in events if each.get("cat") == "wait"] == ["wait for gradients"]
    flows = [(each["ph"], each["pid"], each["ts"]) for each in events if each.get("cat") == "flow"]
    assert flows == [("s", 1, 0), ("t", 2, 200), ("t", 2, 300), ("f", 1, 450)]
