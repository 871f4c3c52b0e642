"""When processes that belong together are ended; decides, and touches none of them."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, auto


@dataclass(frozen=True)
class Ended:
    """A process has ended; a negative code is the signal that ended it."""

    name: str
    code: int


@dataclass(frozen=True)
class Interrupted:
    """The user wants it all to end."""


@dataclass(frozen=True)
class OutputClosed:
    """Nobody can see any longer what a process writes."""


@dataclass(frozen=True)
class DeadlinePassed:
    """It is ``Supervision.deadline``."""


Event = Ended | Interrupted | OutputClosed | DeadlinePassed


@dataclass(frozen=True)
class Send:
    """Send a signal to a process that still runs."""

    name: str
    signal: signal.Signals


class _Step(IntEnum):
    """How far the ending has come."""

    RUNNING = auto()
    ENDING = auto()
    TERMINATED = auto()
    KILLED = auto()


class Supervision:
    """All go on, or all end.

    When one fails, the others get ``grace`` seconds to end by themselves, as nodes do that lose a
    neighbour; then SIGTERM, and after ``patience`` more seconds SIGKILL. An interrupt is passed on
    and starts the same; the second one kills. Output that is closed (``| head``) is an interrupt.
    """

    def __init__(self, names: Iterable[str], *, grace: float = 10.0, patience: float = 5.0) -> None:
        self.running = list(names)
        self.deadline: float | None = None
        """When to come back with ``DeadlinePassed``; None: not at all."""
        self._grace = grace
        self._patience = patience
        self._step = _Step.RUNNING
        self._interrupted = False
        self._failed: list[Ended] = []
        self._sent: set[int] = set()

    def handle(self, event: Event, now: float) -> list[Send]:
        """What to do about an event."""
        match event:
            case Ended(name, code):
                self.running.remove(name)
                if code:
                    self._failed.append(event)
                    self._begin_ending(now)
                return []
            case Interrupted() if self._interrupted:
                return self._all(signal.SIGKILL, _Step.KILLED, None)
            case OutputClosed() if self._interrupted:
                return []
            case Interrupted() | OutputClosed():
                self._interrupted = True
                self._begin_ending(now)
                return [Send(name, signal.SIGINT) for name in self.running]
            case DeadlinePassed():
                if self._step is _Step.ENDING:
                    return self._all(signal.SIGTERM, _Step.TERMINATED, now + self._patience)
                return self._all(signal.SIGKILL, _Step.KILLED, None)

    def _begin_ending(self, now: float) -> None:
        if self._step is _Step.RUNNING:
            self._step = _Step.ENDING
            self.deadline = now + self._grace

    def _all(self, kind: signal.Signals, step: _Step, deadline: float | None) -> list[Send]:
        self._step, self.deadline = step, deadline
        self._sent.add(kind)
        return [Send(name, kind) for name in self.running]

    @property
    def exit_code(self) -> int:
        """Of the first that failed, as a shell gives it; 0 if none has."""
        if not self._failed:
            return 0
        code = self._failed[0].code
        return code if code > 0 else 128 - code

    def summary(self) -> list[str]:
        """A line for each that failed, in the order in which they ended."""
        return [f"{ended.name} {self._words(ended.code)}" for ended in self._failed]

    def _words(self, code: int) -> str:
        if code >= 0:
            return f"failed: exit code {code}"
        if code == -signal.SIGINT and self._interrupted:
            return "was interrupted"
        if -code in self._sent:
            return f"did not end by itself: {_name(-code)}"
        return f"failed: ended by {_name(-code)}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
