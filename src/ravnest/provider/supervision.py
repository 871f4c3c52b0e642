"""Decides when processes that belong together are started again or ended; does no input or output."""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, auto

from ravnest.deadlines import JITTER, NODE_FIRST_PAUSE, NODE_LONGEST_PAUSE, NODE_SETTLED, WORKER_STOP
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
class PauseOver:
    """``Supervision.deadline`` has passed."""


SupervisionEvent = ProcessEnded | Interrupted | OutputClosed | PauseOver


@dataclass(frozen=True)
class SendSignal:
    """Send a signal to a process that still runs."""

    name: str
    signal: signal.Signals


@dataclass(frozen=True)
class StartAgain:
    """Start a process that has failed again, and show why."""

    name: str
    reason: str


SupervisionAction = SendSignal | StartAgain


@dataclass(frozen=True)
class RestartPolicy:
    """Bounds of starting a failed process again."""

    limit: int = 10
    """Most restarts of a process that does not settle."""
    settled: float = NODE_SETTLED
    """Seconds after which a process that was started again counts as running."""
    first_pause: float = NODE_FIRST_PAUSE
    """Seconds before the first restart; pauses double."""
    longest_pause: float = NODE_LONGEST_PAUSE
    """Longest of these pauses, without the jitter. They are for processes that fail at once: after a
    process has run for longer than this, the first pause is used again."""

    def pause(self, quick: int, chance: random.Random) -> float:
        """Return the seconds to wait after ``quick`` restarts that failed at once."""
        doublings = min(quick, 32)  # of a float, without an overflow
        pause = min(self.first_pause * 2.0**doublings, self.longest_pause)
        return pause * chance.uniform(1 - JITTER, 1 + JITTER)


@dataclass
class _Restarts:
    """Restarts of one process."""

    count: int = 0
    """All of them."""
    unsettled: int = 0
    """Those since the process last settled."""
    quick: int = 0
    """Those since the process last ran for longer than the longest pause."""
    started: float = -math.inf
    """Time of the last one."""


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

    With ``restart``, a process that fails is started again after a pause and the others are not
    touched, until it has failed too often. ``groups`` names the processes that finish together: once one
    of them has succeeded, another one of its group that fails has nothing to continue.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        grace: float = WORKER_STOP,
        patience: float = 5.0,
        restart: RestartPolicy | None = None,
        groups: Mapping[str, int] | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self.running = list(names)
        self._grace = grace
        self._patience = patience
        self._restart = restart
        self._groups = {} if groups is None else groups
        self._chance = random.Random() if chance is None else chance  # noqa: S311 - only jitter
        self._step = _Step.RUNNING
        self._end_by: float | None = None
        self._interrupted = False
        self._failed: list[ProcessEnded] = []
        self._waiting: dict[ProcessEnded, float] = {}
        self._restarts: dict[str, _Restarts] = {}
        self._done: set[int] = set()
        self._sent: set[int] = set()

    @property
    def active(self) -> bool:
        """Return whether a process runs or will be started again."""
        return bool(self.running or self._waiting)

    @property
    def deadline(self) -> float | None:
        """Time at which ``PauseOver`` is due; ``None`` if it is not."""
        times = [*self._waiting.values(), *([] if self._end_by is None else [self._end_by])]
        return min(times, default=None)

    def handle(self, event: SupervisionEvent, now: float) -> list[SupervisionAction]:
        """Return what to do after ``event``."""
        match event:
            case ProcessEnded():
                self.running.remove(event.name)
                self._ended(event, now)
                return []
            case Interrupted() if self._interrupted:
                return self._all(KILL, _Step.KILLED, None)
            case OutputClosed() if self._interrupted:
                return []
            case Interrupted() | OutputClosed():
                self._interrupted = True
                self._begin_ending(now)
                return [SendSignal(name, INTERRUPT) for name in self.running]
            case PauseOver() if self._step is _Step.RUNNING:
                return [self._start_again(ended, now) for ended in self._due(now)]
            case PauseOver():
                if self._step is _Step.ENDING:
                    return self._all(TERMINATE, _Step.TERMINATED, now + self._patience)
                return self._all(KILL, _Step.KILLED, None)

    def _ended(self, ended: ProcessEnded, now: float) -> None:
        group = self._groups.get(ended.name)
        if not ended.code:
            if group is not None:
                self._done.add(group)
            return
        if self._restart is None or self._step is not _Step.RUNNING:
            self._fail(ended, now)
        elif group in self._done:  # the others of its group end by themselves, and other groups go on
            self._failed.append(ended)
        else:
            self._plan_restart(self._restart, ended, now)

    def _plan_restart(self, policy: RestartPolicy, ended: ProcessEnded, now: float) -> None:
        restarts = self._restarts.setdefault(ended.name, _Restarts())
        ran = now - restarts.started
        if ran >= policy.settled:
            restarts.unsettled = 0
        if ran >= policy.longest_pause:
            restarts.quick = 0
        if restarts.unsettled >= policy.limit:
            self._fail(ended, now)
        else:
            self._waiting[ended] = now + policy.pause(restarts.quick, self._chance)

    def _due(self, now: float) -> list[ProcessEnded]:
        return [ended for ended, due in self._waiting.items() if due <= now]

    def _start_again(self, ended: ProcessEnded, now: float) -> StartAgain:
        del self._waiting[ended]
        self.running.append(ended.name)
        restarts = self._restarts[ended.name]
        restarts.count += 1
        restarts.unsettled += 1
        restarts.quick += 1
        restarts.started = now
        how = (
            f"was ended by {signal_name(-ended.code)}"
            if ended.code < 0
            else f"failed with exit code {ended.code}"
        )
        return StartAgain(ended.name, f"{ended.name} {how}; started again ({restarts.count})")

    def _fail(self, ended: ProcessEnded, now: float) -> None:
        self._failed.append(ended)
        self._begin_ending(now)

    def _begin_ending(self, now: float) -> None:
        if self._step is _Step.RUNNING:
            self._step = _Step.ENDING
            self._end_by = now + self._grace
            self._failed.extend(self._waiting)
            self._waiting.clear()

    def _all(self, kind: signal.Signals, step: _Step, deadline: float | None) -> list[SupervisionAction]:
        self._step, self._end_by = step, deadline
        self._sent.add(kind)
        return [SendSignal(name, kind) for name in self.running]

    @property
    def exit_code(self) -> int:
        """Exit code of the first process that failed for good, as a shell reports it; 0 if none did."""
        if not self._failed:
            return 0
        code = self._failed[0].code
        return code if code > 0 else 128 - code

    def summary(self) -> list[str]:
        """Return a line for each process that failed for good, in the order in which they ended."""
        return [f"{ended.name} {self._words(ended.code)}{self._after(ended)}" for ended in self._failed]

    def _after(self, ended: ProcessEnded) -> str:
        restarts = self._restarts.get(ended.name, _Restarts())
        if self._restart is None or restarts.unsettled < self._restart.limit:
            return ""
        return f"; given up after {restarts.unsettled} restarts"

    def _words(self, code: int) -> str:
        if code >= 0:
            return f"failed: exit code {code}"
        if code == -signal.SIGINT and self._interrupted:
            return "was interrupted"
        if -code in self._sent:
            return f"did not end by itself: {signal_name(-code)}"
        return f"failed: ended by {signal_name(-code)}"
