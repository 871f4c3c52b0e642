"""Job queue: which waiting job starts next, and with which idle providers. Pure.

Jobs of owners with fewer running jobs go first, then older jobs. A job that does not fit now lets
later ones start, but not forever: after ``PATIENCE`` of them it blocks the queue, and no job behind it
starts before it. A job that even all providers together cannot hold does not block others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

PATIENCE = 3
"""Number of later jobs that may start before a job that does not fit."""


@dataclass(frozen=True)
class WaitingJob:
    """A job in the queue."""

    id: str
    owner: str
    submitted: float
    min_providers: int = 1
    max_providers: int | None = None
    passed_over: int = 0
    """Number of later jobs that started while this one did not fit."""


@dataclass(frozen=True)
class IdleProvider:
    """A provider without a job."""

    id: str
    strength: float
    """Compute times RAM; the strongest are used first."""


@dataclass(frozen=True)
class Refusal:
    """Reason why a job cannot be planned for the providers that it would get."""

    reason: str
    hopeless: bool = False
    """True if all connected providers, idle and busy, are not enough either."""


@dataclass(frozen=True)
class QueueDecision:
    """Providers for a waiting job, or the reason why it keeps waiting."""

    job: str
    providers: tuple[str, ...]
    """Providers that the job starts with, strongest first; empty if it waits."""
    reason: str
    passed_over: int
    """New value for a job that waits."""


Fit = Callable[[WaitingJob, tuple[str, ...]], tuple[str, ...] | Refusal]
"""Function that returns those of the given providers that a plan uses, or why there is no plan."""


def decide(
    waiting: Iterable[WaitingJob],
    running: Mapping[str, int],
    idle: Iterable[IdleProvider],
    busy: int = 0,
    fit: Fit = lambda _, providers: providers,
    start: Callable[[QueueDecision], None] = lambda _: None,
) -> tuple[QueueDecision, ...]:
    """Return one decision for each waiting job, in the order in which they were tried.

    ``running`` counts the running jobs of each owner, ``busy`` the connected providers that have a job.
    ``fit`` is called once for each job that has enough providers; without it every job fits. ``start``
    is called with each job that starts, before the next one is tried: plans may take long.
    """
    queue = _Queue(Counter(running), _by_strength(idle), busy)
    left = list(waiting)
    while left:
        job = min(left, key=queue.priority)
        left.remove(job)
        queue.offer(job, fit)
        if queue.decisions[-1].providers:
            start(queue.decisions[-1])
    return tuple(replace(made, passed_over=queue.passed[made.job]) for made in queue.decisions)


def _by_strength(idle: Iterable[IdleProvider]) -> list[str]:
    ordered = sorted(idle, key=lambda provider: (-provider.strength, provider.id))
    return [provider.id for provider in ordered]


class _Queue:
    """State of one call of ``decide``."""

    def __init__(self, running: Counter[str], free: list[str], busy: int) -> None:
        self.decisions: list[QueueDecision] = []
        self.passed: dict[str, int] = {}
        self._running = running
        self._free = free
        self._busy = busy
        self._patient: list[str] = []
        """Jobs that do not fit now and may fit when others have ended."""
        self._blocker: str | None = None

    def priority(self, job: WaitingJob) -> tuple[int, float, str]:
        """Return the sort key of a job, smallest first; it counts jobs that this call started."""
        return self._running[job.owner], job.submitted, job.id

    def offer(self, job: WaitingJob, fit: Fit) -> None:
        """Start a job with free providers, or store why it waits."""
        self.passed[job.id] = job.passed_over
        if self._blocker is not None:
            self._add(job, f"waits for its turn: {self._blocker} was passed over {PATIENCE} times")
            return
        found = self._providers_for(job, fit)
        if isinstance(found, Refusal):
            self._add(job, found.reason)
            if self._busy and not found.hopeless:
                self._patient.append(job.id)
        else:
            self._add(job, _granted(len(found), len(self._free), self._running[job.owner]), found)
            self._start(job, found)
        self._blocker = next((each for each in self._patient if self.passed[each] >= PATIENCE), None)

    def _providers_for(self, job: WaitingJob, fit: Fit) -> tuple[str, ...] | Refusal:
        needed = max(job.min_providers, 1)
        if len(self._free) < needed:
            enough = len(self._free) + self._busy >= needed
            return Refusal(_too_few(needed, len(self._free), self._busy), hopeless=not enough)
        most = None if job.max_providers is None else max(job.max_providers, needed)
        return fit(job, tuple(self._free[:most]))

    def _add(self, job: WaitingJob, reason: str, providers: tuple[str, ...] = ()) -> None:
        self.decisions.append(QueueDecision(job.id, providers, reason, job.passed_over))

    def _start(self, job: WaitingJob, providers: Sequence[str]) -> None:
        self._free = [provider for provider in self._free if provider not in providers]
        self._busy += len(providers)
        self._running[job.owner] += 1
        for each in self._patient:
            self.passed[each] += 1


def _too_few(needed: int, idle: int, busy: int) -> str:
    missing = needed - idle
    more = f"{missing} more provider{'s' if missing > 1 else ''}" if idle else _providers(missing)
    at_work = f", {busy} {_are(busy)} at work" if busy else ""
    return f"waits for {more}: it wants {needed}, {idle or 'none'} {_are(idle or 1)} idle{at_work}"


def _granted(given: int, idle: int, running: int) -> str:
    which = _providers(idle, "idle") if given == idle else f"{given} of {_providers(idle, 'idle')}"
    return f"gets {which}; its owner has {running or 'no'} other job{'s' if running > 1 else ''} running"


def _providers(count: int, kind: str = "") -> str:
    return f"{count} {f'{kind} ' if kind else ''}provider{'s' if count != 1 else ''}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
