"""Progress of the nodes that ``ravnest launch`` started, as lines of text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ravnest.cli.job_view import bar, bounded, cut, loss_curve
from ravnest.client.progress_text import duration, schedule_words
from ravnest.store.node_spec import NodeSpec
from ravnest.telemetry import (
    LossRecord,
    PaceRecord,
    PhaseRecord,
    RecoveryRecord,
    RoundRecord,
    ScheduleRecord,
    TimingRecord,
    ValidationRecord,
    WorkerRecord,
)

_WIDEST = 100
_PAUSE = 0.2
"""Seconds between two drawings."""


@dataclass
class LaunchedCluster:
    """Newest figures of a cluster, as its Root reported them."""

    losses: dict[int, float] = field(default_factory=dict)
    """Finite losses by update."""
    update: int = 0
    """Updates so far."""
    pace: PaceRecord | None = None
    schedule: ScheduleRecord | None = None
    validation: ValidationRecord | None = None
    round: RoundRecord | None = None
    recoveries: int = 0
    timings: dict[int, TimingRecord] = field(default_factory=dict)
    """By stage."""

    @property
    def total(self) -> int | None:
        """Updates of the whole training; a prediction, as far as there is one."""
        known = None if self.pace is None else self.pace.updates
        return None if known is None else max(known, self.update)


class LaunchView:
    """Progress of all launched nodes: ``add`` what they report, ``lines`` show it. Pure."""

    def __init__(self, nodes: Sequence[NodeSpec]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._phases: dict[str, str] = {}
        self._clusters = {node.cluster: LaunchedCluster() for node in nodes}

    def add(self, name: str, record: WorkerRecord) -> None:
        """Take a record of a node."""
        own = self._clusters[self._nodes[name].cluster]
        match record:
            case LossRecord(update=update, loss=loss):
                own.update = update + 1
                if loss is not None:
                    own.losses[update] = loss
                    own.losses = bounded(own.losses)
            case PaceRecord():
                own.pace = record
            case ScheduleRecord():
                own.schedule = record
            case ValidationRecord():
                own.validation = record
            case RoundRecord():
                own.round = record
            case TimingRecord():
                own.timings[record.stage] = record
            case RecoveryRecord():
                own.recoveries += 1
            case PhaseRecord(phase=phase):
                self._phases[name] = phase

    def lines(self, width: int) -> Iterator[str]:
        """Yield the lines of the view, each at most ``width`` columns long."""
        for number, own in sorted(self._clusters.items()):
            yield cut(self._pipeline(number, own), width)
            if own.update:
                yield cut(f"  {', '.join(_figures(own))}", width)
            if own.schedule is not None:
                yield cut(f"  {schedule_words(own.schedule)}", width)
        leading = self._clusters[min(self._clusters)]
        if leading.total:
            yield bar(leading.update / leading.total, min(width, _WIDEST))
        if len(leading.losses) > 1:
            yield from loss_curve(leading.losses, width)

    def _pipeline(self, cluster: int, own: LaunchedCluster) -> str:
        nodes = sorted((e for e in self._nodes.values() if e.cluster == cluster), key=lambda e: e.stage)
        words = " → ".join(self._node(each, own.timings.get(each.stage)) for each in nodes)
        return f"cluster {cluster}: {words}"

    def _node(self, node: NodeSpec, timing: TimingRecord | None) -> str:
        phase = self._phases.get(node.name, "starts")
        time = "" if timing is None else f", {1000 * (timing.forward + timing.backward):.3g} ms"
        return f"{node.name} ({node.role}{'' if phase == 'train' else f', {phase}'}{time})"


def _figures(own: LaunchedCluster) -> Iterator[str]:
    pace = own.pace
    if pace is not None:
        yield f"epoch {pace.epoch + 1}"
    yield f"update {own.update}" + (f" of {own.total}" if own.total else "")
    if own.losses:
        yield f"loss {own.losses[max(own.losses)]:.4f}"
    if own.validation is not None and own.validation.value is not None:
        yield f"validation {own.validation.name} {own.validation.value:.4f}"
    rate = None if pace is None else pace.samples_per_second if pace.recent is None else pace.recent
    if rate is not None:
        yield f"{rate:,.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s"
    if pace is not None and pace.seconds_left is not None:
        yield f"{duration(pace.seconds_left)} left"
    if own.round is not None:
        yield f"round {own.round.round} {'averaged' if own.round.committed else 'given up'}"
    if own.recoveries:
        yield f"{own.recoveries} recoveries" if own.recoveries > 1 else "1 recovery"


@contextmanager
def live_view(
    view: LaunchView, console: Console
) -> Iterator[Callable[[str, Sequence[WorkerRecord]], None]]:
    """Show a view below the output of the nodes; yield the receiver of their records.

    The last state stays when the context ends.
    """
    lock = threading.Lock()
    drawn = -_PAUSE

    with Live(Text(""), console=console, auto_refresh=False, vertical_overflow="crop") as live:

        def draw() -> None:
            text = "\n".join(view.lines(console.width - 1))
            live.update(Text(text, no_wrap=True), refresh=True)

        def take(name: str, records: Sequence[WorkerRecord]) -> None:
            nonlocal drawn
            with lock:
                for record in records:
                    view.add(name, record)
                if time.monotonic() - drawn >= _PAUSE:
                    drawn = time.monotonic()
                    draw()

        yield take
        with lock:
            draw()
