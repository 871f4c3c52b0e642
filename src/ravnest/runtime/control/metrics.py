"""What becomes of the worker's reports: the progress line, the loss file, the window."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ravnest.runtime.control.metric_files import MetricFile
from ravnest.runtime.control.progress import ProgressLine
from ravnest.runtime.control.telemetry_reporter import TelemetryReporter
from ravnest.runtime.schedule.machine import Schedule
from ravnest.runtime.schedule.simulator import LinkCost, StageCost
from ravnest.runtime.schedule.window import SPARE, choose_window, unexplained_after
from ravnest.runtime.stage.observer import UpdateReport
from ravnest.wire.messages import PhaseBegin, StageTiming

_MEASURED = 32
"""Micro-batches that a choice looks back on."""
_FIRST_CHOICE = 8
_SELDOM = 64
"""Measured micro-batches between choices, once the first ones are made."""
_BREATH_SECONDS = 0.0005


def _breathe() -> None:
    """A choice is in no hurry: training has Python's lock when it needs it."""
    time.sleep(_BREATH_SECONDS)


class MetricsObserver:
    """Implements the worker's ``Observer``."""

    def __init__(
        self,
        line: ProgressLine,
        telemetry: TelemetryReporter,
        losses: MetricFile | None = None,
        window: WindowTuner | None = None,
    ) -> None:
        """``losses`` and ``window`` are given at the Root only."""
        self._line = line
        self._telemetry = telemetry
        self._losses = losses
        self._window = window

    def begun(self, begin: PhaseBegin) -> None:
        """A phase has begun here."""
        self._telemetry.phase(begin.kind, begin.epoch)
        if begin.kind == "train":
            self._line.state.begin(begin.epoch, self._line.clock())

    def updated(self, update: UpdateReport) -> None:
        """The weights were updated."""
        state = self._line.state
        state.staleness, state.in_flight = update.staleness, update.in_flight
        state.add(update.count, self._line.clock())
        if update.loss is not None:
            state.add_loss(update.loss)
            if self._losses is not None:
                self._losses.append(update.loss)
                self._telemetry.update(update)
        self._telemetry.queues(in_flight=update.in_flight, window=state.window, inbox=update.inbox)
        self._line.changed()

    def saving(self) -> None:
        """The trained stage is about to be saved."""
        self._telemetry.phase("save")

    def timed(self, timings: tuple[StageTiming, ...], round_trip: float) -> None:
        """At the Root: what a micro-batch cost at each stage, and how long it was under way."""
        self._telemetry.timings(timings)
        if self._window is not None:
            self._window.timed(timings, round_trip)


class WindowTuner:
    """Chooses the window from what micro-batches cost; now and then, as costs may change."""

    def __init__(
        self,
        apply: Callable[[int], None],
        window: int,
        *,
        schedule: Schedule,
        update_frequency: int,
        cap: int,
    ) -> None:
        """``window`` is the first; ``apply`` gets another, in a thread of its own."""
        self._apply = apply
        self._window = window
        self._schedule: Schedule = schedule
        self._update_frequency = update_frequency
        self._cap = cap
        self._timings: deque[tuple[StageTiming, ...]] = deque(maxlen=_MEASURED)
        self._round_trips: deque[float] = deque(maxlen=_MEASURED)
        self._filling = window
        """Micro-batches that started before the window had its size."""
        self._unexplained = 0.0
        self._seen = 0
        self._next = _FIRST_CHOICE

    def timed(self, timings: tuple[StageTiming, ...], round_trip: float) -> None:
        """A micro-batch has come back."""
        self._timings.append(timings)
        if self._filling:
            self._filling -= 1
        else:
            self._round_trips.append(round_trip)
        self._seen += 1
        if self._seen == self._next:
            self._next += min(self._next, _SELDOM)
            measured, under_way = list(self._timings), list(self._round_trips)
            threading.Thread(target=self._choose, args=(measured, under_way), daemon=True).start()

    def _choose(self, measured: Sequence[tuple[StageTiming, ...]], under_way: Sequence[float]) -> None:
        costs, links = costs_of(measured)
        if self._schedule == "async" and len(under_way) >= _FIRST_CHOICE:
            self._unexplained = unexplained_after(
                self._unexplained,
                under_way,
                self._window,
                costs,
                links,
                update_frequency=self._update_frequency,
                breathe=_breathe,
            )
        choice = choose_window(
            costs,
            links,
            update_frequency=self._update_frequency,
            schedule=self._schedule,
            cap=self._cap,
            unexplained=self._unexplained,
            spare=SPARE,
            breathe=_breathe,
        )
        if choice.window != self._window:
            self._filling = max(choice.window, self._window)
            self._round_trips.clear()
            self._window = choice.window
            self._apply(choice.window)


def costs_of(
    measured: Sequence[tuple[StageTiming, ...]],
) -> tuple[list[tuple[StageCost, ...]], list[LinkCost]]:
    """Costs by stage as they were measured, micro-batch by micro-batch, and typical delays of links.

    That they vary matters: a pipeline with just enough under way for the mean waits whenever one
    micro-batch takes longer. Single hiccups are no part of what to expect.
    """
    stages = list(zip(*measured, strict=True))

    def usual(stage: int, name: str) -> list[float]:
        values = [getattr(timing, name) for timing in stages[stage]]
        ordered, odd = sorted(values), len(values) // 16
        least, most = ordered[odd], ordered[-1 - odd]
        return [min(max(value, least), most) for value in values]

    def typical(stage: int, name: str) -> float:
        return statistics.fmean(usual(stage, name))

    costs = [
        tuple(map(StageCost, usual(k, "forward"), usual(k, "backward"), usual(k, "step")))
        for k in range(len(stages))
    ]
    links = [
        LinkCost(
            typical(k, "to_next"),
            typical(k + 1, "to_previous"),
            typical(k, "to_next_busy"),
            typical(k + 1, "to_previous_busy"),
        )
        for k in range(len(stages) - 1)
    ]
    return costs, links
