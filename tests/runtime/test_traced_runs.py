"""Traces of real runs: what nodes record, and the file that ``ravnest trace`` makes of it."""

from __future__ import annotations

import json
from pathlib import Path

from local_cluster import Formed
from training_cases import points
from typer.testing import CliRunner

from ravnest import Trainer
from ravnest.averaging.round_trace import RoundTrace
from ravnest.cli.app import app
from ravnest.tracing.clocks import clock_offsets
from ravnest.tracing.files import read_traces
from ravnest.tracing.recorder import SpanRecorder
from ravnest.tracing.spans import SpanKind


def test_a_run_is_traced_and_shown(cluster: Formed, tmp_path: Path) -> None:
    local = cluster(nodes=2, schedule="sync", micro_batches=2, transport=None)
    folder = tmp_path / "traces"

    def script(name: str) -> None:
        loaders = {"labels": points(), "test_labels": points()}
        with local.node(name, trace=folder, **loaders) as own:
            Trainer(own, train_loader=points(), val_loader=points(), save=True).train()

    local.results(script)
    traces = read_traces(folder)
    updates, microbatches = len(points()), 2 * len(points())
    assert sorted(trace.node.stage for trace in traces) == [0, 1]
    for trace in traces:
        counts = {kind: [s for s in trace.spans if s.kind == kind] for kind in SpanKind}
        assert len(counts[SpanKind.FORWARD]) == len(counts[SpanKind.BACKWARD]) == microbatches
        assert [span.first for span in counts[SpanKind.STEP]] == list(range(updates))
        for needed in (SpanKind.EVALUATE, SpanKind.CHECKPOINT, SpanKind.WAIT, SpanKind.PHASE):
            assert counts[needed], needed
        assert counts[SpanKind.SEND]
        assert all(span.bytes > 0 for span in counts[SpanKind.SEND])
    assert all(offset.error is not None for offset in clock_offsets(traces)), "messages match"

    output = tmp_path / "trace.json"
    result = CliRunner().invoke(app, ["trace", str(folder), "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "2 nodes" in result.output
    assert "error at most" in result.output
    shown = json.loads(output.read_text())["traceEvents"]
    rows = {each["args"]["name"] for each in shown if each["name"] == "thread_name"}
    assert {"phases", "compute", "to node_1", "from node_1"} <= rows
    assert sum(each["ph"] == "s" for each in shown) >= microbatches, "arrows follow micro-batches"


def test_rounds_are_traced_with_their_parts() -> None:
    recorder = SpanRecorder()
    trace = RoundTrace(recorder)
    trace.settled()  # a round that began before this node
    trace.copying(4)
    trace.copied()
    trace.exchanging()
    trace.exchanged()
    trace.settled()
    found = recorder.take()
    assert [(span.kind, span.first) for span in found] == [
        (SpanKind.COPY, 4),
        (SpanKind.EXCHANGE, 4),
        (SpanKind.ROUND, 4),
    ]
