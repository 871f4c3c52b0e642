"""Progress output of a node: a live line on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ravnest.telemetry import PaceRecord
from ravnest.types import Role, Schedule

_LIVE_SECONDS = 0.2
_PLAIN_SECONDS = 5.0
_PLAIN_SECONDS_BEHIND = 60.0
"""Interval of plain lines on nodes other than the Root, whose lines show the whole run."""
_SMOOTHING = 0.9


@dataclass
class RunState:
    """Progress of a run, written by the worker and shown by the progress line."""

    role: Role
    epochs: int | None = None
    batches: int | None = None
    """Number of micro-batches in all epochs; None if unknown."""
    epoch: int = 0
    done: int = 0
    loss: float | None = None
    in_flight: int = 0
    window: int = 0
    schedule: Schedule | None = None
    """None if the node is alone, so that there is nothing to schedule."""
    microbatches: int = 1
    """Micro-batches of the last batch."""
    staleness: int = 0
    started: float | None = None
    """Time at which training began, after the neighbours were connected."""
    updated: float = 0.0
    samples: int = 0
    """Samples of the updates so far, in this process."""
    updates: int = 0
    """Updates in this process."""
    epoch_batches: int | None = None
    """Batches of an epoch; None if unknown."""
    update_frequency: int = 1
    epoch_done: int = 0
    """Batches of this epoch that are done."""
    paced: tuple[float, int] | None = None
    """Time and samples of the last update before the pace was returned last."""

    def begin(self, epoch: int, now: float, done: int = 0) -> None:
        """Begin an epoch; ``done``: batches of it that are part of the checkpoint."""
        self.epoch = epoch
        self.epoch_done = done
        if self.started is None:
            self.started = now

    def expect(
        self,
        epochs: int,
        batches: int | None,
        epoch_batches: int | None = None,
        update_frequency: int = 1,
    ) -> None:
        """Set the total number of epochs and the number of micro-batches still to come."""
        self.epochs = epochs
        self.epoch_batches, self.update_frequency = epoch_batches, update_frequency
        self.batches = None if batches is None else self.done + batches

    def add(self, batches: int, now: float, samples: int = 0) -> None:
        """Count an update of some micro-batches."""
        self.done += batches
        self.epoch_done += batches
        self.samples += samples
        self.updates += 1
        self.updated = now

    def pace(self, made: int) -> PaceRecord:
        """Return the pace after ``made`` updates of the whole training."""
        elapsed, left = self._elapsed(), self._updates_left()
        total = None if left is None else made + left
        if elapsed <= 0 or not self.updates:
            return PaceRecord(self.epoch, total, None, None)
        seconds = None if left is None else elapsed / self.updates * left
        return PaceRecord(self.epoch, total, self.samples / elapsed, seconds, self._recent())

    def _recent(self) -> float | None:
        """Return the samples per second since the last call."""
        last, samples = self.paced or (self.started or 0.0, 0)
        self.paced = self.updated, self.samples
        return None if self.updated <= last else (self.samples - samples) / (self.updated - last)

    def _updates_left(self) -> int | None:
        size = self.epoch_batches
        if size is None or self.epochs is None:
            return None
        whole = max(self.epochs - 1 - self.epoch, 0)
        rest = max(size - self.epoch_done, 0)
        return whole * -(-size // self.update_frequency) + -(-rest // self.update_frequency)

    def add_loss(self, loss: float) -> None:
        """Add a loss to the running mean."""
        self.loss = loss if self.loss is None else _SMOOTHING * self.loss + (1 - _SMOOTHING) * loss

    def line(self) -> str:
        """Return the state as one line, least important last: a narrow terminal cuts it there."""
        rate = self._rate()
        epochs = f"/{self.epochs}" if self.epochs else ""
        parts = [f"epoch {self.epoch + 1}{epochs}", *self._loss(), f"{rate:.1f} batches/s"]
        if self.batches and rate > 0:
            parts.append(f"ETA {_duration((self.batches - self.done) / rate)}")
        if self.window:
            parts.append(f"in flight {self.in_flight}/{self.window}")
        return ", ".join([*parts, *self._schedule(), f"staleness {self.staleness}"])

    def summary(self) -> str:
        """Return a summary of the run as one line."""
        done = f"{self.role}: {self.done} batches in {_duration(self._elapsed())}"
        return ", ".join([done, f"{self._rate():.1f} batches/s", *self._loss()])

    def _schedule(self) -> list[str]:
        """Return the schedule and the micro-batches, such as ``sync x 4``."""
        if self.schedule is None:
            return []
        return [f"{self.schedule} x {self.microbatches}" if self.microbatches > 1 else self.schedule]

    def _rate(self) -> float:
        return self.done / max(self._elapsed(), 1e-9)

    def _elapsed(self) -> float:
        return 0.0 if self.started is None else self.updated - self.started

    def _loss(self) -> list[str]:
        return [] if self.loss is None else [f"loss {self.loss:.4f}"]


class ProgressLine:
    """Output of a run's state at a limited rate."""

    def __init__(
        self,
        state: RunState,
        *,
        console: Console,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``shown``: print the state; lines passed to ``say`` are always printed."""
        self.state = state
        self._console = console
        self._visible = shown
        self.clock = clock
        self._live: Live | None = None
        self._shown: float | None = None
        self._summed_up = 0

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def changed(self) -> None:
        """Show the state if enough time has passed since it was last shown."""
        if not self._visible:
            return
        live = self._console.is_terminal
        now = self.clock()
        if self._shown is None:  # the time before the neighbours connected does not count
            self._shown = self.state.started if self.state.started is not None else now
        if now - self._shown < (_LIVE_SECONDS if live else self._plain_seconds()):
            return
        self._shown = now
        line = self.state.line()
        if not live:
            self.say(f"{self.state.role}: {line}")
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def sum_up(self) -> None:
        """Remove the live line and print a summary, once for each training."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._visible and self.state.done > self._summed_up:
            self._summed_up = self.state.done
            self.say(self.state.summary())

    def _plain_seconds(self) -> float:
        return _PLAIN_SECONDS if self.state.role is Role.ROOT else _PLAIN_SECONDS_BEHIND


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
