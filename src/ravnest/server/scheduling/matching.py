"""Matching of waiting jobs with idle providers: queue, plan, reserve, ship.

Planning and shipping take seconds, so they run between transactions, in a thread of their own. Before
anything is written, the transaction checks that their assumptions still hold.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from ravnest.errors import RavnestError, StageFormatError
from ravnest.plan.explain import plan_notes
from ravnest.plan.infeasible import Infeasible
from ravnest.schemas.base import plain_lines
from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import Assignment, ProviderOffer, ProviderState
from ravnest.schemas.reachability import RelayView
from ravnest.server.assignments import needed_by
from ravnest.server.db.jobs import RUNNING
from ravnest.server.db.records import JobRecord, ProviderRecord
from ravnest.server.job_service import JobService
from ravnest.server.reachability.status import reachability
from ravnest.server.resume_state import newest_checkpoint, starts_of
from ravnest.server.scheduling.link_tests import ProviderLinks, ProviderPair
from ravnest.server.scheduling.planning import JobPlanner, PlannedJob, plan_reachable
from ravnest.server.scheduling.queue import IdleProvider, QueueDecision, Refusal, WaitingJob, decide
from ravnest.server.scheduling.remainder import RemainderError
from ravnest.server.scheduling.replanning import safe_checkpoint
from ravnest.server.scheduling.stragglers import NO_SLOWDOWNS, Slowdowns, with_slowdowns
from ravnest.server.unit_of_work import UnitOfWorkFactory

_log = logging.getLogger(__name__)

_CACHED_PLANS = 4
"""Cached plans per job: for the providers that it could have now, and for all that are connected, both
of those that others reach and of one that trains alone."""

_OWNER_SECONDS = 30.0
"""Seconds after which no further job of an owner is planned in a pass; one plan may take longer."""

_Chosen = tuple[tuple[str, ProviderOffer], ...]
"""Ids and offers of providers, strongest first."""


@dataclass(frozen=True)
class _Snapshot:
    """Jobs and providers at the start of a pass."""

    waiting: Sequence[JobRecord]
    queue: Sequence[WaitingJob]
    running: Counter[str]
    idle: Sequence[ProviderRecord]
    busy: Sequence[ProviderRecord]
    unreachable: Mapping[str, str]
    """Names of the providers that others cannot reach, by id: they can only train alone."""
    unreliable: frozenset[str] = frozenset()
    """Providers that failed more often than they finished: they are chosen last."""
    proven: frozenset[str] = frozenset()
    """Providers that have finished a part of a job."""

    def idle_providers(self) -> list[IdleProvider]:
        """Return the idle providers for the queue, which orders them by strength.

        An offer is a provider's own word. While it has finished nothing, it counts for less than the
        median of those that have, so that no offer is the first choice just because it is large.
        """
        last = self.unreachable.keys() | self.unreliable
        known = [_strength(each) for each in (*self.idle, *self.busy) if each.id in self.proven]
        most = math.nextafter(statistics.median(known), 0.0) if known else math.inf
        return [
            IdleProvider(
                each.id,
                0.0
                if each.id in last
                else min(_strength(each), math.inf if each.id in self.proven else most),
            )
            for each in self.idle
        ]


@dataclass(frozen=True)
class _PassOutcome:
    started: bool
    """True if a job started, so that another pass may help."""
    deferred: int
    """Number of jobs that were not planned, because the others of their owners took long."""


class _DeferredError(Exception):
    """A job is not planned in this pass."""


class _PlanningBudget:
    """Time that the plans of each owner take in a pass, so that others do not wait for all of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.deferred: set[str] = set()
        """Jobs that were not planned."""
        self._clock = clock
        self._spent: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def spending(self, job: WaitingJob) -> Iterator[None]:
        """Count the time of a plan; raise ``_DeferredError`` if its owner's time is over."""
        if self._spent[job.owner] >= _OWNER_SECONDS:
            self.deferred.add(job.id)
            raise _DeferredError("waits for its turn: other jobs of its owner are planned")
        begin = self._clock()
        try:
            yield
        finally:
            self._spent[job.owner] += self._clock() - begin


def unreachable_of(
    providers: Iterable[ProviderRecord], relays: Mapping[str, RelayView]
) -> dict[str, str]:
    """Return the names of the providers that others cannot reach, by id."""
    return {
        each.id: each.offer.name
        for each in providers
        if reachability(each.offer, each.checks, relays).kind == "unreachable"
    }


def strongest_first(
    providers: Iterable[ProviderRecord], unreachable: Mapping[str, str]
) -> list[ProviderRecord]:
    """Return providers by strength, those that others cannot reach last."""
    return sorted(
        providers,
        key=lambda each: (each.id in unreachable, -_strength(each), each.id),
    )


class LinkTests(Protocol):
    """Tests of links between providers, and their figures."""

    def links_between(self, offers: Mapping[str, ProviderOffer]) -> ProviderLinks:
        """Return what is known about the links between providers."""

    def needed(self, job: str, planned: PlannedJob) -> list[ProviderPair]:
        """Return the pairs to test before a job starts."""

    def begin(self, job: str, pairs: Sequence[ProviderPair]) -> None:
        """Test the links of a planned job; it returns to the queue afterwards."""

    def forget_rounds(self, job: str) -> None:
        """Count the rounds of a job anew, because it cannot start now."""


class Matching:
    """Starts jobs. Only one thread at a time may call ``run_once``."""

    def __init__(
        self,
        units: UnitOfWorkFactory,
        planner: JobPlanner,
        live_relays: Callable[[], Mapping[str, RelayView]],
        link_tests: LinkTests,
        jobs: JobService,
        slowdowns: Callable[[str], Slowdowns] = lambda _: NO_SLOWDOWNS,
    ) -> None:
        """``slowdowns`` returns how much slower the providers of a job have become."""
        self._units = units
        self._slowdowns = slowdowns
        self._jobs = jobs
        self._planner = planner
        self._live_relays = live_relays
        self._link_tests = link_tests
        self._plans: dict[str, dict[tuple[_Chosen, ProviderLinks], PlannedJob | Infeasible]] = {}
        """Last plans of each waiting job, by providers and what is known about their links: most
        changes do not affect a job."""

    def run_once(self) -> None:
        """Start every job that can start.

        A pass follows another one while jobs start, or while fewer and fewer wait for their plan.
        """
        deferred: int | None = None
        while (snapshot := self._snapshot()).waiting:
            outcome = self._pass(snapshot)
            is_less = outcome.deferred > 0 and (deferred is None or outcome.deferred < deferred)
            if not outcome.started and not is_less:
                return
            deferred = None if outcome.started else outcome.deferred

    def _snapshot(self) -> _Snapshot:
        with self._units.db.read() as db:
            waiting = db.jobs.in_state(JobState.SUBMITTED)
            running = Counter(job.owner for job in db.jobs.in_state(*RUNNING))
            present = db.providers.present()
            unreliable = db.assignments.unreliable(each.id for each in present)
            outcomes = db.assignments.outcomes(each.id for each in present)
        queue = [
            WaitingJob(
                job.id,
                job.owner,
                float(position),
                _least_providers(job),
                job.max_providers,
                job.passed_over,
            )
            for position, job in enumerate(waiting)
        ]
        idle = [provider for provider in present if provider.state is ProviderState.OFFERED]
        busy = [provider for provider in present if provider.state is not ProviderState.OFFERED]
        unreachable = unreachable_of(present, self._live_relays())
        proven = frozenset(name for name, each in outcomes.items() if each.finished)
        return _Snapshot(waiting, queue, running, idle, busy, unreachable, unreliable, proven)

    def _pass(self, snapshot: _Snapshot) -> _PassOutcome:
        """Go through the queue once; jobs that start do so before the next one is planned."""
        self._plans = {job.id: self._plans[job.id] for job in snapshot.waiting if job.id in self._plans}
        offers = {each.id: each.offer for each in snapshot.idle}
        plans: dict[str, PlannedJob] = {}
        hopeless: set[str] = set()
        broken: dict[str, str] = {}
        budget = _PlanningBudget(self._units.clock.steady)
        started = False

        def fit(job: WaitingJob, providers: tuple[str, ...]) -> tuple[str, ...] | Refusal:
            try:
                with self._units.db.read() as db:
                    barred = db.assignments.barred(job.id)
                chosen = tuple((name, offers[name]) for name in providers if name not in barred)
                plan = self._plan_reachable(job, chosen, snapshot.unreachable, budget)
                if isinstance(plan, PlannedJob):
                    plans[job.id] = plan
                    return plan.providers
                if self._is_hopeless(job, snapshot, budget):
                    hopeless.add(job.id)
            except _DeferredError as error:
                return Refusal(str(error), hopeless=True)
            except Exception as error:  # a job's files may hold anything; other jobs must go on
                broken[job.id] = _explained("planned", error)
                return Refusal(broken[job.id], hopeless=True)
            return Refusal(plan.reason, hopeless=job.id in hopeless)

        def start(decision: QueueDecision) -> None:
            nonlocal started
            started |= self._start(decision, plans[decision.job])

        idle = snapshot.idle_providers()
        for decision in decide(snapshot.queue, snapshot.running, idle, len(snapshot.busy), fit, start):
            if decision.job in broken:
                self._fail(decision.job, broken[decision.job])
            elif not decision.providers:
                self._wait(decision, snapshot, is_insufficient=decision.job in hopeless)
        return _PassOutcome(started, len(budget.deferred))

    def _plan_reachable(
        self,
        job: WaitingJob,
        chosen: _Chosen,
        unreachable: Mapping[str, str],
        budget: _PlanningBudget | None = None,
    ) -> PlannedJob | Infeasible:
        """Plan with the providers that others reach, or with one alone if it is large enough."""
        return plan_reachable(
            lambda some: self._plan(job, tuple(some), budget), chosen, unreachable, job.min_providers
        )

    def _plan(
        self, job: WaitingJob, chosen: _Chosen, budget: _PlanningBudget | None
    ) -> PlannedJob | Infeasible:
        plans = self._plans.setdefault(job.id, {})
        links = self._link_tests.links_between(dict(chosen))
        chosen, links = with_slowdowns(chosen, links, self._slowdowns(job.id))
        if (chosen, links) not in plans:
            with self._units.db.read() as db:
                spec = db.jobs.spec(job.id)
            spec = spec.model_copy(update={"min_providers": job.min_providers})
            while len(plans) >= _CACHED_PLANS:
                del plans[next(iter(plans))]
            with nullcontext() if budget is None else budget.spending(job):
                plans[chosen, links] = self._planner.plan(spec, chosen, links)
        return plans[chosen, links]

    def _is_hopeless(self, job: WaitingJob, snapshot: _Snapshot, budget: _PlanningBudget) -> bool:
        """Return whether even all connected providers together, idle and busy, cannot hold the job."""
        if not snapshot.busy:
            return True
        everybody = strongest_first((*snapshot.idle, *snapshot.busy), snapshot.unreachable)
        chosen = tuple((each.id, each.offer) for each in everybody[: job.max_providers])
        return isinstance(self._plan_reachable(job, chosen, snapshot.unreachable, budget), Infeasible)

    def plan_with(self, job: JobRecord, providers: Sequence[ProviderRecord]) -> PlannedJob | Infeasible:
        """Plan a job for given providers, idle or not; nothing is reserved."""
        with self._units.db.read() as db:
            barred = db.assignments.barred(job.id)
        providers = [each for each in providers if each.id not in barred]
        unreachable = unreachable_of(providers, self._live_relays())
        most = job.max_providers
        waiting = WaitingJob(job.id, job.owner, 0.0, 1, most, 0)
        ordered = strongest_first(providers, unreachable)
        chosen = tuple((each.id, each.offer) for each in ordered[:most])
        return self._plan_reachable(waiting, chosen, unreachable)

    def _wait(self, decision: QueueDecision, snapshot: _Snapshot, *, is_insufficient: bool) -> None:
        """Store why a job waits, or fail it if it asked for that."""
        self._link_tests.forget_rounds(decision.job)
        wanted = next(job.min_providers for job in snapshot.queue if job.id == decision.job)
        is_insufficient = is_insufficient or len(snapshot.idle) + len(snapshot.busy) < wanted
        with self._units.begin() as uow:
            record = uow.db.jobs.get(decision.job)
            if record is None or record.state is not JobState.SUBMITTED:
                return
            limit = uow.db.jobs.spec(record.id).on_insufficient if is_insufficient else "wait"
            if limit == "fail":
                uow.end_job(record, JobState.FAILED, decision.reason)
                return
            if limit == "wait":
                self._jobs.unlimit_wait(record.id)
            else:
                self._jobs.limit_wait(uow, record.id, limit)
            uow.db.jobs.set_passed_over(record.id, decision.passed_over)
            newest = newest_checkpoint(uow.db, record.id)
            safe = "" if newest is None else f"; {safe_checkpoint(newest.id.update)}"
            if decision.reason + safe != record.reason:
                uow.db.jobs.explain(record, decision.reason + safe)
                uow.topics.add(("job", record.id))

    def _fail(self, job: str, reason: str) -> None:
        with self._units.begin() as uow:
            record = uow.db.jobs.get(job)
            if record is not None and not record.state.is_final:
                uow.end_job(record, JobState.FAILED, reason)

    def _start(self, decision: QueueDecision, plan: PlannedJob) -> bool:
        """Reserve the providers, write the stages, store the assignments; return whether it began.

        If neighbours have not measured their links, they do that first, and the job is planned again.
        """
        pairs = self._link_tests.needed(decision.job, plan)
        if pairs:
            reserved = self._reserve(decision, plan)
            if reserved:
                self._link_tests.begin(decision.job, pairs)
            return reserved
        if not self._reserve(decision, plan):
            return False
        try:
            assignments = self._ship(decision.job, plan)
        except Exception as error:  # the model's files are the requester's and may hold anything
            self._fail(decision.job, _explained("shipped", error))
            return True
        self._assign(decision.job, plan, assignments)
        return True

    def _ship(self, job: str, plan: PlannedJob) -> tuple[Assignment, ...]:
        """Write the stages, with the newest checkpoint of the job that is not damaged."""
        with self._units.db.read() as db:
            record = db.jobs.get(job)
            starts = starts_of(db, job, plan)
        plan = replace(plan, attempt=0 if record is None else record.attempt)
        problem: StageFormatError | None = None
        for start in starts:
            try:
                assignments = self._planner.ship(job, replace(plan, start=start))
            except StageFormatError as error:
                problem = problem or error
                continue
            with self._units.begin() as uow:
                uow.db.events.add("recovery", job, f"{start}{_note(problem)}")
            return assignments
        if problem is not None:
            raise problem
        return self._planner.ship(job, plan)

    def _reserve(self, decision: QueueDecision, plan: PlannedJob) -> bool:
        with self._units.begin() as uow:
            record = uow.db.jobs.get(decision.job)
            providers = [uow.db.providers.get(provider) for provider in plan.providers]
            if record is None or record.state is not JobState.SUBMITTED:
                return False
            free = [each for each in providers if each and each.state is ProviderState.OFFERED]
            if len(free) < len(providers):
                return False
            for provider in free:
                reason = f"reserved for {record.name}"
                uow.db.providers.move(provider, ProviderState.RESERVED, reason, job=record.id)
            notes = " ".join(plan_notes(plan.plan))
            reason = f"{decision.reason}. {notes}" if notes else decision.reason
            shown = plain_lines(plan.explanation)  # it has names that the requester chose
            uow.db.jobs.move(record, JobState.PLANNED, reason, plan=shown)
            uow.topics |= {("job", record.id), ("relays", "")}
        return True

    def _assign(self, job: str, plan: PlannedJob, assignments: Sequence[Assignment]) -> None:
        with self._units.begin() as uow:
            record = uow.db.jobs.get(job)
            if record is None or record.state is not JobState.PLANNED:
                return
            for provider, assignment in zip(plan.providers, assignments, strict=True):
                uow.db.assignments.add(assignment, provider)
                uow.db.artifact_grants.grant(assignment.id, needed_by(assignment))
                uow.topics.add(("provider", provider))
            count = len(assignments)
            reason = (
                "1 provider fetches its assignment"
                if count == 1
                else f"{count} providers fetch their assignments"
            )
            uow.db.jobs.move(record, JobState.SHIPPING, reason)
            uow.topics |= {("job", job), ("clock", "")}  # the deadline of the fetches begins


class MatchingThread:
    """Thread that runs matching on request."""

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def request(self) -> None:
        """Request a run; thread-safe, does not block."""
        self._requested.set()

    def start(self, run_once: Callable[[], None]) -> None:
        """Start the thread; it runs until ``stop``."""
        self._thread = threading.Thread(target=self._run, args=(run_once,), name="matching", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Stop the thread; a plan that takes longer than ``timeout`` seconds ends with the process."""
        self._stopping = True
        self._requested.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self, run_once: Callable[[], None]) -> None:
        while True:
            self._requested.wait()
            self._requested.clear()
            if self._stopping:
                return
            try:
                run_once()
            except Exception:
                _log.exception("matching failed; it runs again at the next change")


def _least_providers(job: JobRecord) -> int:
    """Return the providers that a job waits for; one that lost some goes on with fewer."""
    return 1 if job.attempt else job.min_providers


def _strength(provider: ProviderRecord) -> float:
    return provider.offer.compute * provider.offer.ram


def _note(problem: StageFormatError | None) -> str:
    """Return why a job does not start from the best state that it could have."""
    match problem:
        case None:
            return ""
        case RemainderError():
            return f"; the rest of an epoch cannot be divided: {problem}"
        case _:
            return f"; a newer checkpoint is damaged: {problem}"


def _explained(action: str, error: Exception) -> str:
    """Return the reason of a failure; errors that are not Ravnest's own are logged with a traceback."""
    if isinstance(error, RavnestError):
        return f"it cannot be {action}: {error}"
    _log.exception("a job cannot be %s", action)
    return f"it cannot be {action}: {type(error).__name__}: {error}"
