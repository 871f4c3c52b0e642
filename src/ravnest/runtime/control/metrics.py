"""Use of the worker's reports: progress line, loss file, telemetry and choice of the window."""

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
from ravnest.runtime.schedule.window import MARGIN, choose_window, estimate_overhead
from ravnest.runtime.stage.observer import UpdateReport
from ravnest.wire.messages import PhaseBegin, StageTiming

_MEASURED = 32
"""Number of recent micro-batches that a choice of the window is based on."""
_FIRST_CHOICE = 8
"""Measured micro-batches before the first choice."""
_MAX_INTERVAL = 64
"""Maximum number of measured micro-batches between two choices."""
_PAUSE_SECONDS = 0.0005


def _pause() -> None:
    """Release Python's lock during a choice: training has priority."""
    time.sleep(_PAUSE_SECONDS)


class MetricsObserver:
    """Receiver of the worker's reports; implements ``WorkerObserver``."""

    def __init__(
        self,
        progress: ProgressLine,
        telemetry: TelemetryReporter,
        losses: MetricFile | None = None,
        window: WindowTuner | None = None,
    ) -> None:
        """``losses`` and ``window`` are given at the Root only."""
        self._progress = progress
        self._telemetry = telemetry
        self._losses = losses
        self._window = window

    def begun(self, begin: PhaseBegin) -> None:
        """Show and report the start of a phase."""
        self._telemetry.phase(begin.kind, begin.epoch)
        if begin.kind == "train":
            self._progress.state.begin(begin.epoch, self._progress.clock())

    def updated(self, update: UpdateReport) -> None:
        """Show, record and report an update."""
        state = self._progress.state
        state.staleness, state.in_flight = update.staleness, update.in_flight
        state.add(update.count, self._progress.clock())
        if update.loss is not None:
            state.add_loss(update.loss)
            if self._losses is not None:
                self._losses.append(update.loss)
                self._telemetry.update(update)
        self._telemetry.queues(in_flight=update.in_flight, window=state.window, inbox=update.inbox)
        self._progress.changed()

    def saving(self) -> None:
        """Report that the trained stage is about to be saved."""
        self._telemetry.phase("save")

    def timed(self, timings: tuple[StageTiming, ...], round_trip: float) -> None:
        """Report the costs of a micro-batch, and pass them to the window tuner."""
        self._telemetry.timings(timings)
        if self._window is not None:
            self._window.timed(timings, round_trip)


class WindowTuner:
    """Choice of the window from measured costs, repeated since costs may change."""

    def __init__(
        self,
        apply: Callable[[int], None],
        window: int,
        *,
        schedule: Schedule,
        update_frequency: int,
        max_window: int,
    ) -> None:
        """``window`` is the initial one; ``apply`` is called with a new one, in a separate thread."""
        self._apply = apply
        self._window = window
        self._schedule: Schedule = schedule
        self._update_frequency = update_frequency
        self._max_window = max_window
        self._timings: deque[tuple[StageTiming, ...]] = deque(maxlen=_MEASURED)
        self._round_trips: deque[float] = deque(maxlen=_MEASURED)
        self._filling = window
        """Micro-batches still to return that started before the window had its current size."""
        self._overhead = 0.0
        self._seen = 0
        self._next = _FIRST_CHOICE
        """Number of measured micro-batches at which the next choice is made."""

    def timed(self, timings: tuple[StageTiming, ...], round_trip: float) -> None:
        """Add the costs of a micro-batch that has returned; choose a window if it is time."""
        self._timings.append(timings)
        if self._filling:
            self._filling -= 1
        else:
            self._round_trips.append(round_trip)
        self._seen += 1
        if self._seen == self._next:
            self._next += min(self._next, _MAX_INTERVAL)
            measured, round_trips = list(self._timings), list(self._round_trips)
            threading.Thread(target=self._choose, args=(measured, round_trips), daemon=True).start()

    def _choose(self, measured: Sequence[tuple[StageTiming, ...]], round_trips: Sequence[float]) -> None:
        costs, links = costs_of(measured)
        if self._schedule == "async" and len(round_trips) >= _FIRST_CHOICE:
            self._overhead = estimate_overhead(
                self._overhead,
                round_trips,
                self._window,
                costs,
                links,
                update_frequency=self._update_frequency,
                pause=_pause,
            )
        choice = choose_window(
            costs,
            links,
            update_frequency=self._update_frequency,
            schedule=self._schedule,
            max_window=self._max_window,
            overhead=self._overhead,
            margin=MARGIN,
            pause=_pause,
        )
        if choice.window != self._window:
            self._filling = max(choice.window, self._window)
            self._round_trips.clear()
            self._window = choice.window
            self._apply(choice.window)


def costs_of(
    measured: Sequence[tuple[StageTiming, ...]],
) -> tuple[list[tuple[StageCost, ...]], list[LinkCost]]:
    """Return the measured costs by stage and micro-batch, and the mean delays of links.

    Individual costs are kept because their variation matters: a window that is just enough for the mean
    cost makes stages wait whenever one micro-batch takes longer. Rare outliers are clipped.
    """
    stages = list(zip(*measured, strict=True))

    def clipped(stage: int, name: str) -> list[float]:
        values = [getattr(timing, name) for timing in stages[stage]]
        ordered, outliers = sorted(values), len(values) // 16
        least, most = ordered[outliers], ordered[-1 - outliers]
        return [min(max(value, least), most) for value in values]

    def mean(stage: int, name: str) -> float:
        return statistics.fmean(clipped(stage, name))

    costs = [
        tuple(map(StageCost, clipped(k, "forward"), clipped(k, "backward"), clipped(k, "step")))
        for k in range(len(stages))
    ]
    links = [
        LinkCost(
            mean(k, "to_next"),
            mean(k + 1, "to_previous"),
            mean(k, "to_next_busy"),
            mean(k + 1, "to_previous_busy"),
        )
        for k in range(len(stages) - 1)
    ]
    return costs, links
