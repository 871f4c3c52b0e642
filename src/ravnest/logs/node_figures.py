"""Figures of nodes for Prometheus, from the records that they report."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ravnest.logs.prometheus import Figure, Sample
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


@dataclass
class NodeState:
    """Newest figures of one node, and what it has counted. Losses and rounds are those of Roots."""

    updates: int | None = None
    epoch: int | None = None
    loss: LossRecord | None = None
    pace: PaceRecord | None = None
    queue: QueueRecord | None = None
    work: WorkRecord | None = None
    validation: dict[str, float | None] = field(default_factory=dict)
    """By metric."""
    timings: dict[int, TimingRecord] = field(default_factory=dict)
    """By stage."""
    phase: str | None = None
    round: RoundRecord | None = None
    """The newest round that was averaged."""
    averaged: int = 0
    abandoned: int = 0
    checkpoint: CheckpointRecord | None = None
    checkpoints: int = 0
    recoveries: int = 0
    warnings: int = 0

    def add(self, record: WorkerRecord) -> None:  # noqa: C901 - one case for each kind of record
        """Take a record."""
        match record:
            case LossRecord(update=update, epoch=epoch):
                self.loss, self.updates, self.epoch = record, update + 1, epoch
            case WorkRecord(updates=updates, epoch=epoch):
                self.work, self.updates, self.epoch = record, updates, epoch
            case PaceRecord():
                self.pace = record
            case QueueRecord():
                self.queue = record
            case ValidationRecord(name=name, value=value, metrics=metrics):
                self.validation |= {name: value, **metrics}
            case TimingRecord(stage=stage):
                self.timings[stage] = record
            case PhaseRecord(phase=phase):
                self.phase = phase
            case RoundRecord(committed=True):
                self.round = record
                self.averaged += 1
            case RoundRecord():
                self.abandoned += 1
            case CheckpointRecord():
                self.checkpoint = record
                self.checkpoints += 1
            case RecoveryRecord():
                self.recoveries += 1
            case WarningRecord():
                self.warnings += 1


class NodeFigures:
    """Figures of some nodes by name; any thread may add records and read the figures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, NodeState] = {}

    def add(self, name: str, records: Sequence[WorkerRecord]) -> None:
        """Take records of a node; figures of a node without a name have no label for it."""
        with self._lock:
            node = self._nodes.setdefault(name, NodeState())
            for record in records:
                node.add(record)

    def figures(self) -> list[Figure]:
        """Return the figures as they are now."""
        with self._lock:
            return list(node_figures(self._nodes))


def node_figures(nodes: Mapping[str, NodeState]) -> Iterator[Figure]:
    """Yield the figures of nodes by name. What a node has not reported has no sample."""
    samples: dict[str, list[Sample]] = {name: [] for name in _FIGURES}
    for name, node in sorted(nodes.items()):
        own = {"node": name} if name else {}
        for figure, labels, value in _values(node):
            samples[figure].append(Sample(own | labels, value))
    for figure, (kind, text) in _FIGURES.items():
        yield Figure(f"ravnest_node_{figure}", kind, text, samples[figure])


_FIGURES = {
    "phase": ("gauge", "1 for the phase of the node."),
    "updates": ("gauge", "Updates of the training so far; fewer after the loss of a node."),
    "epoch": ("gauge", "Epoch in progress, from 1."),
    "loss": ("gauge", "Loss of the last update; at Roots."),
    "learning_rate": ("gauge", "Learning rate of the last update; at Roots."),
    "staleness": ("gauge", "Updates between the forward and the backward pass; at Roots."),
    "samples_per_second": ("gauge", "Training rate of the cluster in the last second; at Roots."),
    "seconds_left": ("gauge", "Predicted time until the end of training; at Roots."),
    "validation": ("gauge", "Result of the last validation by metric; at Roots."),
    "stage_seconds": ("gauge", "Mean time of a micro-batch by stage and part; at Roots."),
    "microbatches_in_flight": ("gauge", "Micro-batches that the stage has started and not finished."),
    "rounds_total": ("counter", "Averaging rounds by result; at the coordinating Root."),
    "round_seconds": ("gauge", "Duration of the last averaged round; at the coordinating Root."),
    "checkpoints_total": ("counter", "Checkpoints that the node has written."),
    "checkpoint_bytes": ("gauge", "Size of the last checkpoint."),
    "checkpoint_seconds": ("gauge", "Time for which training stopped for the last checkpoint."),
    "recoveries_total": ("counter", "Losses of a node after which training continued; at Roots."),
    "warnings_total": ("counter", "Warnings in the log of the node."),
    "samples_total": ("counter", "Samples trained here since the process began."),
    "busy_seconds_total": ("counter", "Processor time of the thread that computes."),
    "received_bytes_total": ("counter", "Bytes from other nodes."),
    "sent_bytes_total": ("counter", "Bytes to other nodes."),
}
"""Kind and text of each figure, in the order of the page."""

_Value = tuple[str, dict[str, str], float]
"""Figure, its labels besides the node, and the value."""


def _values(node: NodeState) -> Iterator[_Value]:
    if node.phase is not None:
        yield "phase", {"phase": node.phase}, 1
    if node.updates is not None:
        yield "updates", {}, node.updates
    if node.epoch is not None:
        yield "epoch", {}, node.epoch + 1
    yield from _of_training(node)
    for metric, value in sorted(node.validation.items()):
        yield "validation", {"metric": metric}, _number(value)
    for stage, timing in sorted(node.timings.items()):
        for part in ("forward", "backward", "step", "to_next", "to_previous"):
            yield "stage_seconds", {"stage": str(stage), "part": part}, getattr(timing, part)
    yield "rounds_total", {"result": "averaged"}, node.averaged
    yield "rounds_total", {"result": "abandoned"}, node.abandoned
    if node.round is not None:
        yield "round_seconds", {}, node.round.seconds
    yield "checkpoints_total", {}, node.checkpoints
    if node.checkpoint is not None:
        yield "checkpoint_bytes", {}, node.checkpoint.bytes
        yield "checkpoint_seconds", {}, node.checkpoint.seconds
    yield "recoveries_total", {}, node.recoveries
    yield "warnings_total", {}, node.warnings
    if node.work is not None:
        yield "samples_total", {}, node.work.samples
        yield "busy_seconds_total", {}, node.work.busy
        yield "received_bytes_total", {}, node.work.received_bytes
        yield "sent_bytes_total", {}, node.work.sent_bytes


def _of_training(node: NodeState) -> Iterator[_Value]:
    if node.loss is not None:
        yield "loss", {}, _number(node.loss.loss)
        yield "staleness", {}, node.loss.staleness
        if node.loss.learning_rate is not None:
            yield "learning_rate", {}, node.loss.learning_rate
    pace = node.pace
    if pace is not None and node.phase == "train":
        rate = pace.samples_per_second if pace.recent is None else pace.recent
        if rate is not None:
            yield "samples_per_second", {}, rate
        if pace.seconds_left is not None:
            yield "seconds_left", {}, pace.seconds_left
    if node.queue is not None:
        yield "microbatches_in_flight", {}, node.queue.in_flight


def _number(value: float | None) -> float:
    return math.nan if value is None else value
