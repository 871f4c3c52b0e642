"""Progress of launched nodes as text."""

from __future__ import annotations

import io

from node_files import node_file
from rich.console import Console

from ravnest.cli.launch_view import LaunchView, live_view
from ravnest.telemetry import (
    LossRecord,
    PaceRecord,
    PhaseRecord,
    ScheduleRecord,
    TimingRecord,
    ValidationRecord,
)


def test_pipeline_figures_and_curve_are_shown() -> None:
    view = LaunchView([node_file(number, stages=3) for number in range(3)])
    assert list(view.lines(200)) == [
        "cluster 0: node_0 (Root, starts) → node_1 (Stem, starts) → node_2 (Leaf, starts)"
    ]
    for name in ("node_0", "node_1", "node_2"):
        view.add(name, PhaseRecord("train", 0))
    for update in range(4):
        view.add("node_0", LossRecord(update, 0, 2.0 - update / 4, 1, 0))
    view.add("node_0", LossRecord(4, 0, None, 1, 0))
    view.add("node_0", PaceRecord(1, 10, 300.0, 75.0, recent=512.0))
    view.add("node_0", ValidationRecord(0, 1, "accuracy", 0.5, 8))
    view.add("node_0", TimingRecord(1, 8, 0.002, 0.003, 0.0, 0.0, 0.0))
    view.add("node_0", ScheduleRecord("sync", 4, "it is exact"))
    pipeline, figures, schedule, bar, *curve = view.lines(200)
    assert schedule.strip() == "schedule sync, 4 micro-batches per batch: it is exact"
    assert pipeline == "cluster 0: node_0 (Root) → node_1 (Stem, 5 ms) → node_2 (Leaf)"
    assert figures.strip() == (
        "epoch 2, update 5 of 10, loss 1.2500, validation accuracy 0.5000, 512 samples/s, 1:15 left"
    )
    assert bar.endswith(" 50%")
    assert curve[0].startswith("        2 █")
    assert all(len(line) <= 60 for line in view.lines(60))


def test_updates_beyond_the_predicted_end_are_the_end() -> None:
    view = LaunchView([node_file(0, stages=1)])
    view.add("node_0", PaceRecord(0, 3, None, None))
    view.add("node_0", LossRecord(4, 0, 1.0, 1, 0))
    assert "update 5 of 5" in "".join(view.lines(100))


def test_the_last_state_stays_below_the_output() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with live_view(LaunchView([node_file(0, stages=1)]), console) as take:
        take("node_0", [LossRecord(0, 0, 0.5, 1, 0)])
        console.print("a line of a node")
        take("node_0", [LossRecord(1, 0, 0.25, 1, 0)])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "a line of a node" in text
    assert "loss 0.2500" in text.rpartition("a line of a node")[2]
