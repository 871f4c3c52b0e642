"""New plans for jobs that train well, because other providers are idle or a provider has become slower.

The planner is asked when the idle providers or the stragglers have changed, and not often. If another
plan pays for its move, the nodes upload a checkpoint, and the job returns to the queue with it. Stage
times, checkpoints and events are in the database; after a restart the decision is made again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ravnest.plan.infeasible import Infeasible
from ravnest.schemas.jobs import JobState
from ravnest.server.checkpoint_service import CheckpointService
from ravnest.server.complete_checkpoints import CompleteCheckpoint
from ravnest.server.db.database import Transaction
from ravnest.server.plan_review import PlanQuestion, PlanReview, PlanReviewer
from ravnest.server.scheduling.improvement import (
    KeepPlan,
    OtherPlan,
    ReplacePlan,
    decide_before_plan,
    decide_improvement,
    predicted_gain,
)
from ravnest.server.scheduling.matching import LinkTests, Matching
from ravnest.server.settings import ServerSettings
from ravnest.server.speed_service import SpeedService
from ravnest.server.straggler_service import StragglerService
from ravnest.server.unit_of_work import UnitOfWorkFactory

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Asked:
    """Last question to the planner about a job."""

    question: PlanQuestion | None
    """None: its answer does not count any more."""
    time: float
    """Steady clock."""


@dataclass(frozen=True)
class _Move:
    """Decision to replace a plan, which waits for a checkpoint."""

    question: PlanQuestion
    reason: str
    since: float
    """Wall clock; older checkpoints are not used."""
    at_epoch_end: bool


class ImprovementService:
    """Replaces plans; ``run_once`` belongs to the thread that runs matching."""

    def __init__(
        self,
        units: UnitOfWorkFactory,
        matching: Matching,
        checkpoints: CheckpointService,
        stragglers: StragglerService,
        speeds: SpeedService,
        reviewer: PlanReviewer,
        link_tests: LinkTests,
        settings: ServerSettings,
        request: Callable[[], None],
    ) -> None:
        """``request``: has ``run_once`` called soon."""
        self._units = units
        self._matching = matching
        self._checkpoints = checkpoints
        self._stragglers = stragglers
        self._speeds = speeds
        self._reviewer = reviewer
        self._link_tests = link_tests
        self._settings = settings
        self._request = request
        self._next: float | None = None
        """Time of the next look at the jobs that train (steady clock)."""
        self._asked: dict[str, _Asked] = {}
        self._moves: dict[str, _Move] = {}
        self._told: dict[str, tuple[PlanQuestion, str]] = {}
        """Last decision of each job that became an event."""

    def run_due(self) -> float | None:
        """Request a look at the jobs that train, from time to time; return the next deadline."""
        now = self._units.clock.steady()
        if self._next is None or now >= self._next:
            if self._next is not None:
                with self._units.db.read() as db:
                    is_training = bool(db.jobs.in_state(JobState.TRAINING))
                if is_training:
                    self._request()
            self._next = now + self._settings.improvement_check
        return self._next

    def run_once(self) -> None:
        """Decide about every job that trains; jobs that wait have the idle providers first."""
        with self._units.db.read() as db:
            training = [job.id for job in db.jobs.in_state(JobState.TRAINING)]
            is_queued = _is_queued(db)
        for known in (self._asked, self._moves, self._told):
            for job in set(known) - set(training):
                del known[job]
        self._speeds.keep(training)
        for job in training:
            try:
                self._stragglers.measure(job)
                self._speeds.check(job)
                if not is_queued:
                    self._look(job)
            except Exception:  # a job's files may hold anything; other jobs must go on
                _log.exception("another plan for %s could not be considered", job)

    def _look(self, job: str) -> None:
        slow = self._stragglers.slowdowns(job)
        with self._units.db.read() as db:
            review = self._reviewer.review(db, job, slow, self._units.clock.wall())
        if review is None or not (review.idle or slow):
            self._drop_move(job)
            return
        early = decide_before_plan(review.running, review.cost)
        if early is not None:
            self._drop_move(job)
            self._tell(review, early)
            return
        move = self._moves.get(job)
        if move is not None and move.question == review.question:
            self._advance(review, move)
            return
        self._drop_move(job)
        self._consider(review)

    def _drop_move(self, job: str) -> None:
        if self._moves.pop(job, None) is not None:
            self._asked[job] = _Asked(None, self._asked[job].time)
            self._checkpoints.end_requests(job)

    def _consider(self, review: PlanReview) -> None:
        """Ask the planner, unless it has answered this question, or another one a short time ago."""
        job, now = review.job.id, self._units.clock.steady()
        asked = self._asked.get(job)
        if asked is not None and (
            asked.question == review.question or now < asked.time + self._settings.improvement_pause
        ):
            return
        self._asked[job] = _Asked(review.question, now)
        other = self._ask(review)
        decision = decide_improvement(review.running, review.cost, other)
        self._tell(review, decision)
        if isinstance(decision, ReplacePlan):
            assert isinstance(other, OtherPlan)
            at_end = max(other.clusters, len(review.paces)) > 1
            move = _Move(review.question, decision.reason, self._units.clock.wall(), at_end)
            self._moves[job] = move
            self._advance(review, move)

    def _ask(self, review: PlanReview) -> OtherPlan | str:
        """Return the best plan for the job's own and the idle providers, or why there is none."""
        new = self._matching.plan_with(review.job, (*review.own, *review.idle))
        if isinstance(new, Infeasible):
            return new.reason
        own = self._matching.plan_with(review.job, review.own)
        if isinstance(own, Infeasible):
            return own.reason
        links = self._link_tests.links_between({each.id: each.offer for each in review.own})
        gain = predicted_gain(new.plan, own.plan, review.stages(links))
        return OtherPlan(len(new.plan.clusters), len(new.providers), gain, len(review.paces))

    def _tell(self, review: PlanReview, decision: KeepPlan | ReplacePlan) -> None:
        """Add an event about a decision, unless the same one was made before."""
        kind = decision.kind if isinstance(decision, KeepPlan) else "replace"
        job = review.job
        if self._told.get(job.id) == (review.question, kind):
            return
        self._told[job.id] = (review.question, kind)
        with self._units.begin() as uow:
            state = job.state
            uow.db.events.add("job", job.id, decision.reason, before=state, after=state)
            uow.topics.add(("job", job.id))

    def _advance(self, review: PlanReview, move: _Move) -> None:
        """Replace the plan if there is a checkpoint for that; otherwise have one uploaded."""
        start = review.start(move.since, at_epoch_end=move.at_epoch_end)
        if start is not None:
            self._replace(review, move, start)
            return
        with self._units.begin() as uow:
            for pace in review.paces:
                # An order that waits for the end of an epoch keeps other uploads from being made.
                soon = pace.epoch_seconds_left < self._settings.checkpoint_upload
                if soon or not move.at_epoch_end:
                    cluster = [each for each in review.held if each.cluster == pace.cluster]
                    self._checkpoints.request(uow, cluster, at_phase_end=move.at_epoch_end)

    def _replace(self, review: PlanReview, move: _Move, start: list[CompleteCheckpoint]) -> None:
        job = review.job.id
        with self._units.begin() as uow:
            now = self._reviewer.review(uow.db, job, review.slow, self._units.clock.wall())
            if now is None or (now.held, now.question) != (review.held, review.question):
                return  # the next run decides again
            if _is_queued(uow.db):
                return
            newest = max(each.id for each in start)
            self._checkpoints.drop_other_checkpoints(uow, job, start)
            where = f"{newest}, the end of an epoch" if move.at_epoch_end else f"{newest}"
            reason = f"planned anew: {move.reason}; training continues from {where}"
            uow.plan_anew(now.job, reason, newest.update)
        self._checkpoints.end_requests(job)
        self._moves.pop(job, None)


def _is_queued(db: Transaction) -> bool:
    """Return whether a job waits, which would get the providers of one that is planned anew."""
    return bool(db.jobs.in_state(JobState.SUBMITTED, JobState.PLANNED))
