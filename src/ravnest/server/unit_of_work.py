"""Unit of work: one database transaction and the actions that follow its commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ravnest.schemas.jobs import BestFiles, JobResult, JobState
from ravnest.schemas.providers import ProviderState
from ravnest.server.auth.tokens import AuthService
from ravnest.server.db.database import Database, Transaction
from ravnest.server.db.records import LOST, AssignmentRecord, JobRecord, LossCause, ProviderRecord
from ravnest.server.job_status import (
    PlaceNeeds,
    can_continue,
    job_status,
    may_train,
    place_name,
    repeats_end,
    to_repeat,
    vacant,
)
from ravnest.server.notifications import Notifications, Topic
from ravnest.server.settings import Clock


@dataclass
class UnitOfWork:
    """One transaction, and what to do after its commit."""

    db: Transaction
    topics: set[Topic] = field(default_factory=set)
    """Topics whose subscribers are notified."""
    ended_jobs: list[str] = field(default_factory=list)
    needs_matching: bool = False
    """True if a waiting job may be able to start now, or a vacant place to be filled."""

    def release(self, provider: ProviderRecord, reason: str) -> None:
        """Make a provider available for other jobs."""
        self.db.providers.move(provider, ProviderState.OFFERED, reason)
        self.topics.add(("provider", provider.id))
        self.needs_matching = True

    def end_assignment(self, assignment: AssignmentRecord, phase: str, reason: str) -> None:
        """Move an assignment to a final phase and revoke its artifacts."""
        self.db.assignments.move(assignment, phase, reason)
        self.db.artifact_grants.revoke(assignment.id)
        self.topics.add(("provider", assignment.provider))

    def finish_assignment(self, assignment: AssignmentRecord, reason: str) -> None:
        """Store that a node has trained to the end.

        Its files stay granted until the job ends: if another node is lost, the end is repeated.
        """
        self.db.assignments.move(assignment, "finished", reason)
        self.topics.add(("provider", assignment.provider))
        if repeats_end(self.db.assignments.of_job(assignment.job), assignment):
            why = "it has finished, and repeats the end with a node that takes the place of a lost one"
            self.db.assignments.lose(replace(assignment, phase="finished"), why, None)

    def vacate(self, assignment: AssignmentRecord, reason: str, cause: LossCause) -> None:
        """End an assignment whose provider is gone; its cluster waits for another one if it can.

        The files stay granted, because the next provider of the place needs them. Nodes of the cluster
        that have finished already must repeat the end: their places become vacant too.
        """
        assignments = self.db.assignments.of_job(assignment.job)
        if not can_continue(assignments, assignment):
            self.db.assignments.set_cause(assignment, cause)
            self.end_assignment(assignment, "failed", reason)
            return
        self.db.assignments.lose(assignment, reason, cause)
        for each in to_repeat(assignments, assignment):
            why = f"it had finished, and repeats the end because node_{assignment.node} was lost before"
            self.db.assignments.lose(each, why, None)
        self.topics.add(("provider", assignment.provider))
        self.needs_matching = True
        name = self.db.providers.names([assignment.provider])[assignment.provider]
        what = f"{place_name(assignment)} has lost its provider {name}: {reason}"
        self.db.events.add("recovery", assignment.job, what)

    def keep_best(self, root: AssignmentRecord, before: BestFiles | None, best: BestFiles) -> None:
        """Store the best model of a Root's cluster, in place of the one before.

        Its files belong to the job until that ends; those of the model before are free.
        """
        self.db.best_models.set(root.job, root.cluster, best)
        files = [file.artifact for file in best.files]
        kept = {file.sha256 for file in files}
        others = self.db.best_models.of_job(root.job).values()
        kept |= {file.artifact.sha256 for each in others for file in each.files}
        old = [] if before is None else [file.artifact.sha256 for file in before.files]
        grants = self.db.artifact_grants
        grants.grant(root.job, files)
        grants.revoke_files(root.job, [each for each in old if each not in kept])
        grants.revoke_files(root.provider, [*kept, *old])
        self.db.jobs.touch(root.job)
        self.topics.add(("job", root.job))

    def end_job(
        self, job: JobRecord, state: JobState, reason: str, root: AssignmentRecord | None = None
    ) -> None:
        """End a job and release its providers; ``root`` is the assignment whose result it takes."""
        for assignment in self.db.assignments.of_job(job.id):
            if not assignment.has_ended:
                self.end_assignment(assignment, "stopped", reason)
            else:
                self.db.artifact_grants.revoke(assignment.id)
        for provider in self.db.providers.of_job(job.id):
            self.release(provider, f"job {job.name} is {state}")
        for best in self.db.best_models.of_job(job.id).values():
            files = [file.artifact for file in best.files]
            self.db.artifact_grants.grant(job.owner, files)
            self.db.artifact_grants.revoke_files(job.id, [file.sha256 for file in files])
        result = None if root is None else self._result(job, root)
        self.db.jobs.move(job, state, reason, result=result)
        self.topics |= {("job", job.id), ("relays", "")}
        self.ended_jobs.append(job.id)
        self.needs_matching = True

    def requeue(self, job: JobRecord, reason: str) -> None:
        """Return a planned job to the queue and release its providers."""
        for provider in self.db.providers.of_job(job.id):
            self.release(provider, f"job {job.name} returned to the queue")
        self.db.jobs.move(job, JobState.SUBMITTED, reason, plan="")
        self.topics |= {("job", job.id), ("relays", "")}
        self.needs_matching = True

    def plan_anew(self, job: JobRecord, reason: str, checkpoint: int | None) -> None:
        """Give up the plan of a running job and return it to the queue, to start from a checkpoint."""
        for assignment in self.db.assignments.of_job(job.id):
            if not assignment.has_ended or assignment.phase == LOST:
                self.end_assignment(assignment, "stopped", reason)
            else:
                self.db.artifact_grants.revoke(assignment.id)
        for provider in self.db.providers.of_job(job.id):
            self.release(provider, f"job {job.name} is planned anew")
        update = -1 if checkpoint is None else checkpoint
        self.db.jobs.move(
            job,
            JobState.SUBMITTED,
            reason,
            plan="",
            attempt=job.attempt + 1,
            replans=1 if update > job.resumed else job.replans + 1,
            resumed=max(update, job.resumed),
        )
        self.db.events.add("recovery", job.id, reason)
        self.topics |= {("job", job.id), ("relays", "")}
        self.needs_matching = True

    def update_job_status(self, job: str) -> None:
        """Set the state and the reason of a running job from the phases of its assignments."""
        record = self.db.jobs.get(job)
        if record is None or record.state not in (JobState.SHIPPING, JobState.TRAINING):
            return
        assignments = self.db.assignments.of_job(job)
        names = self.db.providers.names(each.provider for each in assignments)
        status = job_status(assignments, names, self._needs(assignments), evaluates=record.epochs == 0)
        self.topics.add(("job", job))
        starts = may_train(assignments)
        self.topics |= {("provider", each.provider) for each in assignments if each.id in starts}
        if status.state.is_final:
            self.end_job(record, status.state, status.reason, status.root)
        elif status.state is JobState.TRAINING and record.state is JobState.SHIPPING:
            self.db.jobs.move(record, JobState.TRAINING, status.reason)
        else:
            self.db.jobs.explain(record, status.reason)

    def _needs(self, assignments: Sequence[AssignmentRecord]) -> dict[int, PlaceNeeds]:
        """Return what the vacant places of a job need, by node."""
        return {
            each.node: PlaceNeeds(
                self.db.assignments.body(each.id).needs.ram,
                self.db.telemetry.common_checkpoint(assignments, each.cluster),
            )
            for each in vacant(assignments)
        }

    def _result(self, job: JobRecord, root: AssignmentRecord) -> str:
        files = tuple(self.db.assignments.result(root))
        self.db.artifact_grants.grant(job.owner, [file.artifact for file in files])
        return JobResult(job=job.id, cluster=root.cluster, files=files).model_dump_json()


class UnitOfWorkFactory:
    """Opens units of work; notifies subscribers and requests matching after each commit."""

    def __init__(
        self,
        db: Database,
        auth: AuthService,
        notifications: Notifications,
        clock: Clock,
        request_matching: Callable[[], None],
    ) -> None:
        """``request_matching`` is called after a commit when a job may be able to start, or a vacant
        place to be filled; it must not wait for plans.
        """
        self.db = db
        self.clock = clock
        self._auth = auth
        self._notifications = notifications
        self._request_matching = request_matching

    def wake_timers(self) -> None:
        """Have the timers look at the deadlines: there is a new one."""
        self._notifications.notify(("clock", ""))

    def notify_providers(self, providers: Iterable[str]) -> None:
        """Wake the heartbeats of providers that wait."""
        for provider in providers:
            self._notifications.notify(("provider", provider))

    @contextmanager
    def begin(self) -> Iterator[UnitOfWork]:
        """Open a unit of work; its follow-up actions run after the commit."""
        with self.db.write(self.clock.wall()) as transaction:
            uow = UnitOfWork(transaction)
            yield uow
        for job in uow.ended_jobs:
            self._auth.forget_job(job)
        for topic in uow.topics:
            self._notifications.notify(topic)
        self._notifications.notify(("page", ""))
        if uow.needs_matching:
            self._request_matching()
