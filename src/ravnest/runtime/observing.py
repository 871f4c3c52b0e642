"""What becomes of the worker's reports: the progress line, the loss file, the window."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence

from ravnest.runtime.machine import Schedule
from ravnest.runtime.progress import ProgressLine
from ravnest.runtime.results import FigureFile
from ravnest.runtime.simulate import LinkDelay, StageCost
from ravnest.runtime.window import choose_window
from ravnest.runtime.worker import Update
from ravnest.wire.messages import Begin, StageTiming

_MEASURED = 64
"""Micro-batches that a choice looks back on."""
_FIRST_CHOICE = 8


class RunObserver:
    """Implements the worker's ``Observer``."""

    def __init__(
        self, line: ProgressLine, losses: FigureFile | None, window: WindowKeeper | None
    ) -> None:
        """``losses`` and ``window`` are the Root's."""
        self._line = line
        self._losses = losses
        self._window = window

    def begun(self, begin: Begin) -> None:
        """A phase has begun here."""
        if begin.kind == "train":
            self._line.state.begin(begin.epoch, self._line.clock())

    def updated(self, update: Update) -> None:
        """The weights were updated."""
        state = self._line.state
        state.staleness, state.in_flight = update.staleness, update.in_flight
        state.add(update.count, self._line.clock())
        if update.loss is not None:
            state.add_loss(update.loss)
            if self._losses is not None:
                self._losses.append(update.loss)
        self._line.changed()

    def timed(self, timings: tuple[StageTiming, ...]) -> None:
        """At the Root: what a micro-batch cost at each stage."""
        if self._window is not None:
            self._window.timed(timings)


class WindowKeeper:
    """Chooses the window from what micro-batches cost; now and then, as costs may change."""

    def __init__(
        self,
        apply: Callable[[int], None],
        *,
        schedule: Schedule,
        update_frequency: int,
        cap: int,
    ) -> None:
        """``apply`` gets a new window; it is called in a thread of its own."""
        self._apply = apply
        self._schedule: Schedule = schedule
        self._update_frequency = update_frequency
        self._cap = cap
        self._timings: deque[tuple[StageTiming, ...]] = deque(maxlen=_MEASURED)
        self._seen = 0
        self._next = _FIRST_CHOICE

    def timed(self, timings: tuple[StageTiming, ...]) -> None:
        """A micro-batch has come back."""
        self._timings.append(timings)
        self._seen += 1
        if self._seen == self._next:
            self._next *= 2
            measured = list(self._timings)
            threading.Thread(target=self._choose, args=(measured,), daemon=True).start()

    def _choose(self, measured: Sequence[tuple[StageTiming, ...]]) -> None:
        costs, links = costs_of(measured)
        choice = choose_window(
            costs,
            links,
            update_frequency=self._update_frequency,
            schedule=self._schedule,
            cap=self._cap,
        )
        self._apply(choice.window)


def costs_of(
    measured: Sequence[tuple[StageTiming, ...]],
) -> tuple[list[StageCost], list[LinkDelay]]:
    """Typical costs by stage and link: means, as rates follow those, without the odd ones out."""
    stages = list(zip(*measured, strict=True))

    def typical(stage: int, name: str) -> float:
        values = sorted(getattr(timing, name) for timing in stages[stage])
        odd = len(values) // 8
        return statistics.fmean(values[odd : len(values) - odd])

    costs = [
        StageCost(typical(k, "forward"), typical(k, "backward"), typical(k, "step"))
        for k in range(len(stages))
    ]
    links = [
        LinkDelay(
            typical(k, "to_next"),
            typical(k + 1, "to_previous"),
            typical(k, "to_next_busy"),
            typical(k + 1, "to_previous_busy"),
        )
        for k in range(len(stages) - 1)
    ]
    return costs, links
