"""Decides when processes that belong together are ended; does no input or output itself."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, auto

from ravnest.deadlines import WORKER_STOP
from ravnest.host import INTERRUPT, KILL, TERMINATE, signal_name


@dataclass(frozen=True)
class ProcessEnded:
    """A process has ended; a negative code is the number of the signal that ended it."""

    name: str
    code: int


@dataclass(frozen=True)
class Interrupted:
    """The user asks all processes to end."""


@dataclass(frozen=True)
class OutputClosed:
    """The output of the processes cannot be shown any longer."""


@dataclass(frozen=True)
class GracePassed:
    """``Supervision.deadline`` has passed."""


SupervisionEvent = ProcessEnded | Interrupted | OutputClosed | GracePassed


@dataclass(frozen=True)
class SendSignal:
    """Send a signal to a process that still runs."""

    name: str
    signal: signal.Signals


class _Step(IntEnum):
    """Progress of ending all processes."""

    RUNNING = auto()
    ENDING = auto()
    TERMINATED = auto()
    KILLED = auto()


class Supervision:
    """State machine that keeps all processes running, or ends all of them.

    When one fails, the others get ``grace`` seconds to end by themselves, as nodes do that lose a
    neighbour; then SIGTERM, and after ``patience`` more seconds SIGKILL. An interrupt is passed on
    and starts the same sequence; a second one kills. Closed output (``| head``) is an interrupt.
    """

    def __init__(
        self, names: Iterable[str], *, grace: float = WORKER_STOP, patience: float = 5.0
    ) -> None:
        self.running = list(names)
        self.deadline: float | None = None
        """Time at which ``GracePassed`` is due; ``None`` if it is not."""
        self._grace = grace
        self._patience = patience
        self._step = _Step.RUNNING
        self._interrupted = False
        self._failed: list[ProcessEnded] = []
        self._sent: set[int] = set()

    def handle(self, event: SupervisionEvent, now: float) -> list[SendSignal]:
        """Return the signals to send after ``event``."""
        match event:
            case ProcessEnded(name, code):
                self.running.remove(name)
                if code:
                    self._failed.append(event)
                    self._begin_ending(now)
                return []
            case Interrupted() if self._interrupted:
                return self._all(KILL, _Step.KILLED, None)
            case OutputClosed() if self._interrupted:
                return []
            case Interrupted() | OutputClosed():
                self._interrupted = True
                self._begin_ending(now)
                return [SendSignal(name, INTERRUPT) for name in self.running]
            case GracePassed():
                if self._step is _Step.ENDING:
                    return self._all(TERMINATE, _Step.TERMINATED, now + self._patience)
                return self._all(KILL, _Step.KILLED, None)

    def _begin_ending(self, now: float) -> None:
        if self._step is _Step.RUNNING:
            self._step = _Step.ENDING
            self.deadline = now + self._grace

    def _all(self, kind: signal.Signals, step: _Step, deadline: float | None) -> list[SendSignal]:
        self._step, self.deadline = step, deadline
        self._sent.add(kind)
        return [SendSignal(name, kind) for name in self.running]

    @property
    def exit_code(self) -> int:
        """Exit code of the first process that failed, as a shell reports it; 0 if none failed."""
        if not self._failed:
            return 0
        code = self._failed[0].code
        return code if code > 0 else 128 - code

    def summary(self) -> list[str]:
        """Return a line for each process that failed, in the order in which they ended."""
        return [f"{ended.name} {self._words(ended.code)}" for ended in self._failed]

    def _words(self, code: int) -> str:
        if code >= 0:
            return f"failed: exit code {code}"
        if code == -signal.SIGINT and self._interrupted:
            return "was interrupted"
        if -code in self._sent:
            return f"did not end by itself: {signal_name(-code)}"
        return f"failed: ended by {signal_name(-code)}"
