"""Jobs find providers: queue, plan, reserve, ship.

Planning and shipping take seconds, so they happen between transactions, in a thread of their own.
Whether the world is still as they assumed is checked before anything is written.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ravnest.errors import RavnestError
from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import Assignment, ProviderOffer, ProviderState
from ravnest.server.assignments import needed_by
from ravnest.server.db.jobs import RUNNING
from ravnest.server.db.records import JobRecord, ProviderRecord
from ravnest.server.scheduling.planning import JobPlanner, Planned, Short
from ravnest.server.scheduling.queue import Decision, IdleProvider, Refusal, WaitingJob, decide
from ravnest.server.unit_of_work import UnitOfWorkFactory

_log = logging.getLogger(__name__)

_REMEMBERED = 2
"""Plans of a job: for those that it could have now, and for all that are here."""

_Chosen = tuple[tuple[str, ProviderOffer], ...]
"""Providers and what they offer, strongest first."""


@dataclass(frozen=True)
class _Scene:
    """What a round of matching goes by."""

    waiting: Sequence[JobRecord]
    queue: Sequence[WaitingJob]
    running: Counter[str]
    idle: Sequence[ProviderRecord]
    busy: Sequence[ProviderRecord]


class Matching:
    """Starts jobs. Only one thread at a time runs ``run_once``."""

    def __init__(self, office: UnitOfWorkFactory, planner: JobPlanner) -> None:
        self._office = office
        self._planner = planner
        self._remembered: dict[str, dict[_Chosen, Planned | Short]] = {}
        """The last plans of each waiting job, and for whom: most changes do not concern it."""

    def run_once(self) -> None:
        """Start what can be started."""
        while (scene := self._scene()).waiting and self._round(scene):
            pass

    def _scene(self) -> _Scene:
        with self._office.store.look() as books:
            waiting = books.jobs.in_state(JobState.SUBMITTED)
            running = Counter(job.owner for job in books.jobs.in_state(*RUNNING))
            here = books.providers.present()
        queue = [
            WaitingJob(
                job.id,
                job.owner,
                job.created,
                job.min_providers,
                job.max_providers,
                job.passed_over,
            )
            for job in waiting
        ]
        idle = [provider for provider in here if provider.state is ProviderState.OFFERED]
        busy = [provider for provider in here if provider.state is not ProviderState.OFFERED]
        return _Scene(waiting, queue, running, idle, busy)

    def _round(self, scene: _Scene) -> bool:
        """One pass through the queue; whether something started, so that another may be worthwhile."""
        self._remembered = {
            job.id: self._remembered[job.id] for job in scene.waiting if job.id in self._remembered
        }
        offers = {each.id: each.offer for each in scene.idle}
        plans: dict[str, Planned] = {}
        hopeless: set[str] = set()
        broken: dict[str, str] = {}

        def fit(job: WaitingJob, providers: tuple[str, ...]) -> tuple[str, ...] | Refusal:
            try:
                plan = self._plan(job, tuple((name, offers[name]) for name in providers))
                if isinstance(plan, Planned):
                    plans[job.id] = plan
                    return plan.providers
                if self._is_hopeless(job, scene):
                    hopeless.add(job.id)
            except Exception as error:  # a job may hold anything; the others must not suffer
                broken[job.id] = _explained("planned", error)
                return Refusal(broken[job.id], hopeless=True)
            return Refusal(plan.reason, hopeless=job.id in hopeless)

        idle = [IdleProvider(each.id, each.offer.compute, each.offer.ram) for each in scene.idle]
        started = False
        for decision in decide(scene.queue, scene.running, idle, len(scene.busy), fit):
            if decision.providers:
                started |= self._start(decision, plans[decision.job])
            elif decision.job in broken:
                self._fail(decision.job, broken[decision.job])
            else:
                self._wait(decision, scene, is_short=decision.job in hopeless)
        return started

    def _plan(self, job: WaitingJob, chosen: _Chosen) -> Planned | Short:
        plans = self._remembered.setdefault(job.id, {})
        if chosen not in plans:
            with self._office.store.look() as books:
                spec = books.jobs.spec(job.id)
            while len(plans) >= _REMEMBERED:
                del plans[next(iter(plans))]
            plans[chosen] = self._planner.plan(spec, chosen)
        return plans[chosen]

    def _is_hopeless(self, job: WaitingJob, scene: _Scene) -> bool:
        """Whether even all that are here, idle and at work, could not hold it."""
        if not scene.busy:
            return True
        everybody = sorted(
            (*scene.idle, *scene.busy), key=lambda each: (-each.offer.compute * each.offer.ram, each.id)
        )
        chosen = tuple((each.id, each.offer) for each in everybody[: job.max_providers])
        return isinstance(self._plan(job, chosen), Short)

    def _wait(self, decision: Decision, scene: _Scene, *, is_short: bool) -> None:
        """A job does not start now: say why, or end it if it was asked for so."""
        wanted = next(job.min_providers for job in scene.queue if job.id == decision.job)
        is_short = is_short or len(scene.idle) + len(scene.busy) < wanted
        with self._office.change() as change:
            record = change.books.jobs.get(decision.job)
            if record is None or record.state is not JobState.SUBMITTED:
                return
            if is_short and change.books.jobs.spec(record.id).on_insufficient == "fail":
                change.end_job(record, JobState.FAILED, decision.reason)
                return
            change.books.jobs.pass_over(record.id, decision.passed_over)
            if decision.reason != record.reason:
                change.books.jobs.explain(record, decision.reason)
                change.topics.add(("job", record.id))

    def _fail(self, job: str, reason: str) -> None:
        with self._office.change() as change:
            record = change.books.jobs.get(job)
            if record is not None and not record.state.is_final:
                change.end_job(record, JobState.FAILED, reason)

    def _start(self, decision: Decision, plan: Planned) -> bool:
        """Reserve the providers, write the stages, hand out the assignments; whether it was begun."""
        if not self._reserve(decision, plan):
            return False
        try:
            assignments = self._planner.ship(decision.job, plan)
        except Exception as error:  # the model's files are the requester's: anything can be wrong
            self._fail(decision.job, _explained("shipped", error))
            return True
        self._hand_out(decision.job, plan, assignments)
        return True

    def _reserve(self, decision: Decision, plan: Planned) -> bool:
        with self._office.change() as change:
            record = change.books.jobs.get(decision.job)
            providers = [change.books.providers.get(provider) for provider in plan.providers]
            if record is None or record.state is not JobState.SUBMITTED:
                return False
            free = [each for each in providers if each and each.state is ProviderState.OFFERED]
            if len(free) < len(providers):
                return False
            for provider in free:
                reason = f"reserved for {record.name}"
                change.books.providers.move(provider, ProviderState.RESERVED, reason, job=record.id)
            change.books.jobs.move(record, JobState.PLANNED, decision.reason, plan=plan.words)
            change.topics.add(("job", record.id))
        return True

    def _hand_out(self, job: str, plan: Planned, assignments: Sequence[Assignment]) -> None:
        with self._office.change() as change:
            record = change.books.jobs.get(job)
            if record is None or record.state is not JobState.PLANNED:
                return
            for provider, assignment in zip(plan.providers, assignments, strict=True):
                change.books.parts.add(assignment, provider)
                change.books.holdings.give(assignment.id, needed_by(assignment))
                change.topics.add(("provider", provider))
            reason = f"{len(assignments)} providers fetch their part"
            change.books.jobs.move(record, JobState.SHIPPING, reason)
            change.topics.add(("job", job))


class MatchingThread:
    """Runs matching whenever it is wanted."""

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def want(self) -> None:
        """Something changed; called from any thread."""
        self._wanted.set()

    def start(self, matching: Matching) -> None:
        """Run until ``stop``."""
        self._thread = threading.Thread(target=self._run, args=(matching,), name="matching", daemon=True)
        self._thread.start()

    def stop(self, patience: float) -> None:
        """Stop; a plan that takes longer than ``patience`` seconds is left to die with the process."""
        self._stopping = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(patience)

    def _run(self, matching: Matching) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._stopping:
                return
            try:
                matching.run_once()
            except Exception:
                _log.exception("matching failed; it is tried again at the next change")


def _explained(what: str, error: Exception) -> str:
    """Our own errors say it all; for others the log has the rest."""
    if isinstance(error, RavnestError):
        return f"it cannot be {what}: {error}"
    _log.exception("a job cannot be %s", what)
    return f"it cannot be {what}: {type(error).__name__}: {error}"
