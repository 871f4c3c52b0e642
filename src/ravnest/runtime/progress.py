"""What a user sees while a node works: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ravnest.types import Role

_LIVE_SECONDS = 0.2
_PLAIN_SECONDS = 5.0
_PLAIN_SECONDS_BEHIND = 60.0
"""On other nodes than the Root, whose lines say it all."""
_SMOOTH = 0.9


@dataclass
class RunState:
    """How far a run is; the worker writes it, the line shows it."""

    role: Role
    epochs: int | None = None
    batches: int | None = None
    """Micro-batches in all epochs, where known."""
    epoch: int = 0
    done: int = 0
    loss: float | None = None
    in_flight: int = 0
    window: int = 0
    staleness: int = 0
    started: float = 0.0

    def expect(self, epochs: int, batches: int | None) -> None:
        """So many epochs in all, and so many micro-batches after those that are done."""
        self.epochs = epochs
        self.batches = None if batches is None else self.done + batches

    def add_loss(self, loss: float) -> None:
        """Take a loss into the running mean."""
        self.loss = loss if self.loss is None else _SMOOTH * self.loss + (1 - _SMOOTH) * loss

    def line(self, now: float) -> str:
        """The state in one line; what matters least comes last, where a narrow terminal cuts it."""
        rate = self._rate(now)
        epochs = f"/{self.epochs}" if self.epochs else ""
        parts = [f"epoch {self.epoch + 1}{epochs}", *self._loss(), f"{rate:.1f} batches/s"]
        if self.batches and rate > 0:
            parts.append(f"ETA {_duration((self.batches - self.done) / rate)}")
        if self.window:
            parts.append(f"in flight {self.in_flight}/{self.window}")
        return ", ".join([*parts, f"staleness {self.staleness}"])

    def summary(self, now: float) -> str:
        """What was done, in one line."""
        done = f"{self.role}: {self.done} batches in {_duration(now - self.started)}"
        return ", ".join([done, f"{self._rate(now):.1f} batches/s", *self._loss()])

    def _rate(self, now: float) -> float:
        return self.done / max(now - self.started, 1e-9)

    def _loss(self) -> list[str]:
        return [] if self.loss is None else [f"loss {self.loss:.4f}"]


class ProgressLine:
    """Shows a run's state, not more often than an eye or a log file wants."""

    def __init__(
        self,
        state: RunState,
        *,
        console: Console,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``shown``: whether the state is; lines that are said always are."""
        self.state = state
        self._console = console
        self._visible = shown
        self._clock = clock
        self._live: Live | None = None
        self._shown = clock()
        self._summed_up = 0

    def begin(self) -> None:
        """The node has met its neighbours: time counts from now."""
        self._shown = self.state.started = self._clock()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def changed(self) -> None:
        """The state has changed; show it if it is time."""
        if not self._visible:
            return
        live = self._console.is_terminal
        now = self._clock()
        if now - self._shown < (_LIVE_SECONDS if live else self._plain_seconds()):
            return
        self._shown = now
        line = self.state.line(now)
        if not live:
            self.say(f"{self.state.role}: {line}")
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def sum_up(self) -> None:
        """Take the live line away; what was done stays as a plain one, once."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._visible and self.state.done > self._summed_up:
            self._summed_up = self.state.done
            self.say(self.state.summary(self._clock()))

    def _plain_seconds(self) -> float:
        return _PLAIN_SECONDS if self.state.role is Role.ROOT else _PLAIN_SECONDS_BEHIND


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
