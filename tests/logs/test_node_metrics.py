"""Figures of nodes for Prometheus, from their records."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from ravnest.errors import SettingsError
from ravnest.logs.node_figures import NodeFigures
from ravnest.logs.node_metrics import NodeMetrics
from ravnest.logs.prometheus import exposition
from ravnest.telemetry import (
    CheckpointRecord,
    LossRecord,
    PaceRecord,
    PhaseRecord,
    QueueRecord,
    RecoveryRecord,
    RoundRecord,
    TimingRecord,
    ValidationRecord,
    WarningRecord,
    WorkerRecord,
    WorkRecord,
)

RECORDS_OF_A_ROOT: tuple[WorkerRecord, ...] = (
    PhaseRecord("train", 0),
    LossRecord(0, 0, 2.5, 4, 0, 0.25),
    LossRecord(1, 1, 1.5, 4, 1, 0.125),
    PaceRecord(1, 100, 12.5, 8.0, recent=16.0),
    QueueRecord(3, 4, 0),
    RoundRecord(0, 1, "background", True, (0, 1), 0.25, 1000, ""),
    RoundRecord(1, 1, "background", False, (), 0.5, 0, "nobody answered"),
    TimingRecord(1, 8, 0.5, 0.25, 0.125, 0.0, 2.0),
    ValidationRecord(0, 1, "accuracy", 0.75, 100, {"accuracy": 0.75, "f1": None}),
    CheckpointRecord(1, 0, 4096, 0.5),
    CheckpointRecord(2, 0, 8192, 0.25),
    RecoveryRecord("node_1 is gone", 1, 1, "a replica", 3.0),
    WarningRecord("slow"),
    WorkRecord(2, 1, 64, 1.5, 2000, 1000),
)


def _lines(figures: NodeFigures) -> list[str]:
    return [line for line in exposition(figures.figures()).splitlines() if not line.startswith("#")]


def test_the_newest_figures_and_counters_of_a_node_are_shown() -> None:
    figures = NodeFigures()
    figures.add("", RECORDS_OF_A_ROOT)
    assert _lines(figures) == [
        'ravnest_node_phase{phase="train"} 1',
        "ravnest_node_updates 2",
        "ravnest_node_epoch 2",
        "ravnest_node_loss 1.5",
        "ravnest_node_learning_rate 0.125",
        "ravnest_node_staleness 1",
        "ravnest_node_samples_per_second 16",
        "ravnest_node_seconds_left 8",
        'ravnest_node_validation{metric="accuracy"} 0.75',
        'ravnest_node_validation{metric="f1"} nan',
        'ravnest_node_stage_seconds{stage="1",part="forward"} 0.5',
        'ravnest_node_stage_seconds{stage="1",part="backward"} 0.25',
        'ravnest_node_stage_seconds{stage="1",part="step"} 0.125',
        'ravnest_node_stage_seconds{stage="1",part="to_next"} 0',
        'ravnest_node_stage_seconds{stage="1",part="to_previous"} 2',
        "ravnest_node_microbatches_in_flight 3",
        'ravnest_node_rounds_total{result="averaged"} 1',
        'ravnest_node_rounds_total{result="abandoned"} 1',
        "ravnest_node_round_seconds 0.25",
        "ravnest_node_checkpoints_total 2",
        "ravnest_node_checkpoint_bytes 8192",
        "ravnest_node_checkpoint_seconds 0.25",
        "ravnest_node_recoveries_total 1",
        "ravnest_node_warnings_total 1",
        "ravnest_node_samples_total 64",
        "ravnest_node_busy_seconds_total 1.5",
        "ravnest_node_received_bytes_total 2000",
        "ravnest_node_sent_bytes_total 1000",
    ]


def test_each_node_has_its_label_and_a_figure_one_head() -> None:
    figures = NodeFigures()
    figures.add("node_1", [WorkRecord(7, 0, 8, 0.5, 1, 1)])
    figures.add("node_0", [LossRecord(6, 0, None, 1, 0)])
    text = exposition(figures.figures())
    head = "# TYPE ravnest_node_updates gauge\n"
    assert (
        f'{head}ravnest_node_updates{{node="node_0"}} 7\nravnest_node_updates{{node="node_1"}} 7\n'
        in text
    )
    assert text.count(head) == 1
    assert 'ravnest_node_loss{node="node_0"} nan\n' in text
    assert 'ravnest_node_loss{node="node_1"}' not in text


def test_there_is_no_rate_while_nothing_trains() -> None:
    figures = NodeFigures()
    figures.add("", [*RECORDS_OF_A_ROOT, PhaseRecord("validate", 1)])
    assert not [line for line in _lines(figures) if "samples_per_second" in line or "left" in line]


def test_a_node_serves_its_figures_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeMetrics, "PAUSE", 0.0)
    with NodeMetrics(0, name="node_0") as metrics:
        assert metrics.address.host == "127.0.0.1"
        for record in RECORDS_OF_A_ROOT:
            metrics.emit(record)
        text = ""
        while "ravnest_node_sent_bytes_total{" not in text:  # of the last record
            with urllib.request.urlopen(f"http://{metrics.address}/metrics", timeout=60) as answer:
                text = answer.read().decode()
        assert 'ravnest_node_loss{node="node_0"} 1.5\n' in text
        with pytest.raises(SettingsError, match="another port"):
            NodeMetrics(metrics.address.port)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{metrics.address}/metrics", timeout=60)


def test_a_number_that_is_no_port_is_an_error() -> None:
    with pytest.raises(SettingsError, match="another port"):
        NodeMetrics(70_000)
