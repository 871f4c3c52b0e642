"""New plans for jobs that have lost nodes which no spare can replace.

The remaining nodes upload their checkpoints, then the job returns to the queue, and the newest complete
checkpoint is cut anew for the providers that it gets. If other clusters train, they go on until a new
plan is due, and upload their checkpoints first. All of that follows from the database; only the time for
which places were vacant counts anew after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ravnest.plan.infeasible import Infeasible
from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import ProviderOffer, ProviderState
from ravnest.server.checkpoint_service import CheckpointService
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import AssignmentRecord, JobRecord, ProviderRecord
from ravnest.server.deadline_table import DeadlineTable
from ravnest.server.job_status import failed_clusters, has_delivered, holders, roots, vacant
from ravnest.server.resume_state import newest_checkpoint
from ravnest.server.scheduling.matching import Matching
from ravnest.server.scheduling.replanning import (
    GatherCheckpoints,
    GiveUp,
    GiveUpClusters,
    KeepWaiting,
    PlanAnew,
    PlanAnswer,
    ReplanDecision,
    ReplanLimits,
    VacantJob,
    decide_replan,
    needs_answer,
)
from ravnest.server.settings import ServerSettings
from ravnest.server.unit_of_work import UnitOfWork, UnitOfWorkFactory

_log = logging.getLogger(__name__)

_UPLOADED = 16
"""Most bytes that a node uploads in a rescue, in terms of its weights: two checkpoints of its own stage
and two of a neighbour's, each with up to four tensors for a weight."""
_SLACK = 4.0
"""Allowed multiple of the time predicted from the bandwidth."""

_Asked = tuple[tuple[str, ProviderOffer], ...]


@dataclass(frozen=True)
class _Vacancy:
    """A job with vacant places, as the database has it."""

    job: JobRecord
    held: Sequence[AssignmentRecord]
    """Assignments that stand for the nodes."""
    empty: Sequence[AssignmentRecord]

    @property
    def clusters(self) -> set[int]:
        """Clusters with a vacant place."""
        return {each.cluster for each in self.empty}

    @property
    def lost(self) -> str:
        return ", ".join(f"node_{each.node}" for each in self.empty)

    def cluster(self, number: int) -> list[AssignmentRecord]:
        return [each for each in self.held if each.cluster == number]

    @property
    def others(self) -> set[int]:
        """Clusters without a vacant place that have not failed."""
        return {each.cluster for each in self.held} - self.clusters - failed_clusters(self.held)

    @property
    def training(self) -> set[int]:
        """Clusters that train on."""
        live = {each.cluster for each in self.held if not each.has_ended}
        return self.others & live

    @property
    def is_delivered(self) -> bool:
        """True if the server has the trained model of a cluster."""
        return any(has_delivered(root) for root in roots(self.held))


class ReplanningService:
    """Plans jobs anew; ``run_once`` belongs to the thread that runs matching."""

    def __init__(
        self,
        units: UnitOfWorkFactory,
        matching: Matching,
        checkpoints: CheckpointService,
        settings: ServerSettings,
        request: Callable[[], None],
        give_up: Callable[[UnitOfWork, AssignmentRecord, str], None],
    ) -> None:
        """``request``: has ``run_once`` called soon. ``give_up``: fails the cluster of a lost node."""
        self._units = units
        self._give_up = give_up
        self._matching = matching
        self._checkpoints = checkpoints
        self._settings = settings
        self._request = request
        self._since: dict[str, float] = {}
        """Jobs with vacant places, and when this server noticed it (steady clock)."""
        self._again: DeadlineTable[str] = DeadlineTable()
        """Jobs about which to decide again."""
        self._answers: dict[str, tuple[_Asked, PlanAnswer]] = {}
        """Last answer of the planner for each job, and the providers that it was for."""
        self._gathering: dict[str, float] = {}
        """Jobs whose other clusters upload their checkpoints, and since when (steady clock)."""

    def run_once(self) -> None:
        """Decide about every job that has vacant places."""
        with self._units.db.read() as db:
            found = [self._vacancy(db, job) for job in {each.job for each in db.assignments.lost()}]
        vacancies = [each for each in found if each is not None]
        self._forget_others({each.job.id for each in vacancies})
        for each in vacancies:
            try:
                self._consider(each)
            except Exception:  # a job's files may hold anything; other jobs must go on
                _log.exception("%s could not be planned anew", each.job.id)

    def run_due(self) -> float | None:
        """Request a decision about jobs whose time is over; return the next deadline."""
        if self._again.take_due(self._units.clock.steady()):
            self._request()
        return self._again.next

    def _forget_others(self, jobs: set[str]) -> None:
        for job in set(self._since) - jobs:
            del self._since[job]
            self._answers.pop(job, None)
            self._gathering.pop(job, None)
            self._checkpoints.end_rescues(job)
        self._again.keep_only(jobs)

    def _vacancy(self, db: Transaction, job: str) -> _Vacancy | None:
        record = db.jobs.get(job)
        if record is None or record.state not in (JobState.SHIPPING, JobState.TRAINING):
            return None
        assignments = db.assignments.of_job(job)
        empty = vacant(assignments)
        return _Vacancy(record, holders(assignments), empty) if empty else None

    def _consider(self, vacancy: _Vacancy) -> None:
        job, now = vacancy.job, self._units.clock.steady()
        since = self._since.setdefault(job.id, now)
        with self._units.begin() as uow:
            for cluster in vacancy.clusters:
                self._rescue(uow, vacancy, cluster)
        limits = ReplanLimits(self._settings.replan_after, self._settings.requeue_after)
        state, deadline = self._state(vacancy, now - since)
        answer = self._ask(vacancy) if needs_answer(state, limits) else None
        decision = decide_replan(state, answer, limits)
        if isinstance(decision, GatherCheckpoints):
            deadline = self._gather(vacancy, now) - since
        elif isinstance(decision, KeepWaiting) and self._gathering.pop(job.id, None) is not None:
            self._checkpoints.end_rescues(job.id)  # the clusters that train upload from time to time
        self._apply(vacancy, decision)
        if isinstance(decision, (KeepWaiting, GatherCheckpoints)):
            until = decision.until if isinstance(decision, KeepWaiting) else None
            wait = deadline if until is None else until
            self._again.remove(job.id)
            if wait > state.waited:
                self._again.add(job.id, since + wait)
                self._units.wake_timers()

    def _gather(self, vacancy: _Vacancy, now: float) -> float:
        """Have the clusters that train upload their checkpoints; return the deadline of that."""
        job = vacancy.job.id
        since = self._gathering.setdefault(job, now)
        with self._units.begin() as uow:
            for cluster in sorted(vacancy.training):
                self._checkpoints.gather(uow, vacancy.cluster(cluster))
            return since + self._upload_limit(uow.db, vacancy, vacancy.training)

    def _is_gathered(self, db: Transaction, vacancy: _Vacancy) -> bool:
        since = self._gathering.get(vacancy.job.id)
        if since is None:
            return not vacancy.training
        if self._units.clock.steady() >= since + self._upload_limit(db, vacancy, vacancy.training):
            return True
        return all(self._checkpoints.is_rescued(db, vacancy.cluster(each)) for each in vacancy.training)

    def _rescue(self, uow: UnitOfWork, vacancy: _Vacancy, cluster: int) -> None:
        members = vacancy.cluster(cluster)
        lost = {
            uow.db.assignments.body(each.id).node_spec.stage
            for each in vacancy.empty
            if each.cluster == cluster
        }
        self._checkpoints.rescue(uow, members, lost)

    def _state(self, vacancy: _Vacancy, waited: float) -> tuple[VacantJob, float]:
        """Return the situation, and the time at which the uploads are not waited for any more."""
        job = vacancy.job
        with self._units.db.read() as db:
            newest = newest_checkpoint(db, job.id)
            rescued = all(
                self._checkpoints.is_rescued(db, vacancy.cluster(each)) for each in vacancy.clusters
            )
            limit = self._upload_limit(db, vacancy, vacancy.clusters)
            is_gathered = self._is_gathered(db, vacancy)
            names = db.providers.names(each.provider for each in vacancy.empty)
            on_insufficient = db.jobs.spec(job.id).on_insufficient
        update = None if newest is None else newest.id.update
        state = VacantJob(
            lost=vacancy.lost,
            why="; ".join(
                f"node_{each.node} of cluster {each.cluster} ({names[each.provider]}): {each.reason}"
                for each in vacancy.empty
            ),
            waited=waited,
            checkpoint=update,
            is_rescued=rescued or waited >= limit,
            others_train=bool(vacancy.training),
            is_delivered=vacancy.is_delivered,
            is_gathered=is_gathered,
            replans=0 if update is not None and update > job.resumed else job.replans,
            on_insufficient=on_insufficient,
        )
        return state, limit

    def _upload_limit(self, db: Transaction, vacancy: _Vacancy, clusters: set[int]) -> float:
        """Return the seconds that the nodes of these clusters have to upload their checkpoints."""
        seconds = 0.0
        for each in vacancy.held:
            provider = db.providers.get(each.provider)
            if each.cluster in clusters and not each.has_ended and provider is not None:
                size = _UPLOADED * db.assignments.body(each.id).weights.size
                seconds = max(seconds, _SLACK * 8 * size / (provider.offer.bandwidth * 1e6))
        most = 2 * self._settings.requeue_after
        return min(self._settings.rescue_grace + seconds, most)

    def _ask(self, vacancy: _Vacancy) -> PlanAnswer:
        """Ask the planner for a plan with the remaining and the idle providers."""
        with self._units.db.read() as db:
            present = db.providers.present()
        live = {each.provider for each in vacancy.held if not each.has_ended}
        usable = [each for each in present if each.id in live or each.state is ProviderState.OFFERED]
        asked = tuple((each.id, each.offer) for each in usable)
        known = self._answers.get(vacancy.job.id)
        if known is not None and known[0] == asked:
            return known[1]
        answer = self._answer(vacancy, usable)
        self._answers[vacancy.job.id] = (asked, answer)
        return answer

    def _answer(self, vacancy: _Vacancy, usable: Sequence[ProviderRecord]) -> PlanAnswer:
        if not usable:
            return PlanAnswer(False, "no provider is connected")
        planned = self._matching.plan_with(vacancy.job, usable)
        if isinstance(planned, Infeasible):
            return PlanAnswer(False, planned.reason)
        count = len(planned.providers)
        reason = f"{count} provider{'s' if count > 1 else ''} can train it"
        training = {
            each.provider
            for each in vacancy.held
            if each.cluster in vacancy.training and not each.has_ended
        }
        if not training:
            return PlanAnswer(True, reason)
        now = self._matching.plan_with(vacancy.job, [each for each in usable if each.id in training])
        if isinstance(now, Infeasible) or not now.plan.samples_per_second:
            return PlanAnswer(True, reason)
        return PlanAnswer(True, reason, planned.plan.samples_per_second / now.plan.samples_per_second)

    def _apply(self, vacancy: _Vacancy, decision: ReplanDecision) -> None:
        if isinstance(decision, (KeepWaiting, GatherCheckpoints)):
            return
        with self._units.begin() as uow:
            current = self._vacancy(uow.db, vacancy.job.id)
            if current is None or current.empty != vacancy.empty:
                return  # a spare has taken the place meanwhile, or more nodes are lost
            match decision:
                case PlanAnew(reason):
                    newest = newest_checkpoint(uow.db, current.job.id)
                    uow.plan_anew(current.job, reason, None if newest is None else newest.id.update)
                case GiveUpClusters(reason):
                    for each in current.empty:
                        self._give_up(uow, each, reason)
                    uow.update_job_status(current.job.id)
                case GiveUp(reason):
                    uow.end_job(current.job, JobState.FAILED, reason)
        self._gathering.pop(vacancy.job.id, None)
        self._checkpoints.end_rescues(vacancy.job.id)
