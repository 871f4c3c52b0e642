"""Jobs: submission, cancellation, and deadlines of nodes that hold a job up."""

from __future__ import annotations

import secrets

from ravnest.errors import ServerRefusedError
from ravnest.jobs.model import UNITS_LIMIT
from ravnest.schemas.jobs import JobResult, JobSpec, JobState, JobView
from ravnest.schemas.providers import ProviderState
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.assignments import FETCHING, fetch_limit, needed_files
from ravnest.server.db.records import AssignmentRecord, JobRecord, MemberRecord
from ravnest.server.deadline_table import DeadlineTable
from ravnest.server.job_resume import add_resumed, check_resumed, find_resumed
from ravnest.server.job_status import failed_clusters, has_delivered, roots
from ravnest.server.settings import ServerSettings
from ravnest.server.unit_of_work import UnitOfWork, UnitOfWorkFactory
from ravnest.server.views import job_view

_DAY = 86400.0
_JOB_PAUSE = 60.0
"""Seconds after which a member with too many jobs may try again."""


class JobService:
    """Operations on jobs; the methods are thread-safe and return soon."""

    def __init__(
        self, units: UnitOfWorkFactory, settings: ServerSettings, artifacts: ArtifactFolder
    ) -> None:
        self._units = units
        self._artifacts = artifacts
        self._settings = settings
        self._stops: DeadlineTable[tuple[str, int]] = DeadlineTable()
        """Failed clusters, by job and number, and when their remaining nodes are stopped."""
        self._results: DeadlineTable[str] = DeadlineTable()
        """Assignments whose providers are away with a result, and when they are given up."""
        self._starts: DeadlineTable[str] = DeadlineTable()
        """Jobs that do not wait without a limit for enough providers, and when they fail."""
        self._fetching_since: dict[str, float] = {}
        """Assignments whose providers fetch, and when this server noticed it first."""

    def resume(self, uow: UnitOfWork) -> int:
        """Take up the jobs after a start of the server; return how many are running."""
        for job in uow.db.jobs.in_state(JobState.PLANNED):
            uow.requeue(job, "the server stopped while it planned this job")
        running = uow.db.jobs.in_state(JobState.SHIPPING, JobState.TRAINING)
        for job in running:
            self.schedule_stops(uow, job.id)
            for each in uow.db.assignments.of_job(job.id):
                provider = uow.db.providers.get(each.provider)
                if not each.has_ended and provider and provider.state is ProviderState.LOST:
                    self.await_result(uow, each)
        uow.needs_matching = True
        return len(running)

    def submit(self, member: MemberRecord, spec: JobSpec, *, how: str = "") -> str:
        """Queue a job and return its id; ``how`` is added to the first event.

        Refuse if its graph is too large (413), its files were not uploaded by its owner (422), or its
        owner has too many jobs that have not ended (429).
        """
        _check_graph(spec)
        job = f"job-{secrets.token_hex(4)}"
        files = needed_files(spec)
        with self._units.db.read() as db:
            check_resumed(db, self._artifacts, member, spec)  # reads files: not while others wait
        with self._units.begin() as uow:
            known = uow.db.artifact_grants.sizes(member.id, [file.sha256 for file in files])
            missing = [file.sha256 for file in files if known.get(file.sha256) != file.size]
            if missing:
                raise ServerRefusedError(
                    f"{len(missing)} files were not uploaded yet, or have another size: "
                    f"{', '.join(missing[:10])}{', …' if len(missing) > 10 else ''}",
                    422,
                )
            self._check_count(uow, member)
            how += "" if spec.resume_from is None else f", to continue {spec.resume_from}"
            uow.db.jobs.add(job, member.id, spec, f"submitted by {member.name}{how}")
            add_resumed(uow.db, job, find_resumed(uow.db, member, spec))
            uow.needs_matching = True
        for file in files:
            self._artifacts.touch(file.sha256)  # they stay for as long as those of a new upload
        return job

    def unknown(self, job: str) -> ServerRefusedError:
        """Return the refusal (404) of a request about a job that does not exist."""
        days = self._settings.ended_jobs_kept / _DAY
        kept = f"jobs are removed {days:.0f} days after their end, and earlier if there are many"
        return ServerRefusedError(f"there is no job {job}; {kept}", 404)

    def _check_count(self, uow: UnitOfWork, member: MemberRecord) -> None:
        most = self._settings.unfinished_jobs
        states = [state for state in JobState if not state.is_final]
        if sum(job.owner == member.id for job in uow.db.jobs.in_state(*states)) >= most:
            raise ServerRefusedError(
                f"{member.name} has {most} jobs that have not ended, more are not allowed: wait for one "
                "of them, or cancel one",
                429,
                _JOB_PAUSE,
            )

    def resume_job(self, member: MemberRecord, job: str) -> str:
        """Queue a job with the specification of an ended one, which starts from its checkpoint."""
        with self._units.db.read() as db:
            spec = db.jobs.spec(job)
        return self.submit(member, spec.model_copy(update={"resume_from": job}))

    def cancel(self, job: str, member: MemberRecord) -> JobView:
        """Cancel a job; refuse (409) if it is done or failed."""
        with self._units.begin() as uow:
            record = uow.db.jobs.get(job)
            if record is None:
                raise self.unknown(job)
            if record.state in (JobState.DONE, JobState.FAILED):
                raise ServerRefusedError(f"{job} is {record.state} already", 409)
            if record.state is not JobState.CANCELLED:
                uow.end_job(record, JobState.CANCELLED, f"cancelled by {member.name}")
            found = uow.db.jobs.get(job)
            assert found is not None
            return job_view(uow.db, found)

    def best_model(self, record: JobRecord) -> JobResult:
        """Return the files of the best model so far, which the owner may read from now on."""
        job = record.id
        with self._units.begin() as uow:
            models = uow.db.best_models.of_job(job)
            if not models:
                raise ServerRefusedError(
                    f"{job} has no best model: it needs keep_best, and a validation that is over", 409
                )
            files = models[min(models)].files
            digests = [file.artifact.sha256 for file in files]
            if all(uow.db.artifact_grants.missing(owner, digests) for owner in (record.owner, job)):
                raise ServerRefusedError(f"the best model of {job} was deleted: it is too old", 409)
            uow.db.artifact_grants.grant(record.owner, [file.artifact for file in files])
        return JobResult(job=job, cluster=min(models), files=files)

    def schedule_stops(self, uow: UnitOfWork, job: str) -> None:
        """Set a deadline for the remaining nodes of failed clusters.

        They usually end by themselves and report why.
        """
        assignments = uow.db.assignments.of_job(job)
        live = {each.cluster for each in assignments if not each.has_ended}
        stopping = failed_clusters(assignments) & live
        deadline = self._units.clock.steady() + self._settings.ending_grace
        for cluster in stopping:
            self._stops.add((job, cluster), deadline)
        if stopping:
            uow.topics.add(("clock", ""))

    def await_result(self, uow: UnitOfWork, assignment: AssignmentRecord) -> None:
        """Set a deadline for a lost provider that has trained to the end, to return with its result."""
        self._results.remove(assignment.id)
        self._results.add(assignment.id, self._units.clock.steady() + self._settings.result_wait)
        uow.topics.add(("clock", ""))

    def limit_wait(self, uow: UnitOfWork, job: str, seconds: float) -> None:
        """Set a deadline for a job that cannot start, unless it has one already."""
        self._starts.add(job, self._units.clock.steady() + seconds)
        uow.topics.add(("clock", ""))

    def unlimit_wait(self, job: str) -> None:
        """Remove the deadline of a job that waits for its turn only."""
        self._starts.remove(job)

    def run_due(self) -> float | None:
        """Stop overdue nodes, fail overdue jobs and fetches; return the next deadline (steady clock)."""
        now = self._units.clock.steady()
        for job, cluster in self._stops.take_due(now):
            self._stop_cluster(job, cluster)
        for name in self._results.take_due(now):
            self._give_up_result(name)
        for job in self._starts.take_due(now):
            self._fail_waiting(job)
        self._fail_late_fetches(now)
        deadlines = (self._stops.next, self._results.next, self._starts.next)
        return min((each for each in deadlines if each is not None), default=None)

    def _fail_waiting(self, job: str) -> None:
        """Fail a job that has waited for enough providers for as long as it asked for."""
        with self._units.begin() as uow:
            record = uow.db.jobs.get(job)
            if record is not None and record.state is JobState.SUBMITTED:
                reason = f"{record.reason}; the job has waited for as long as it wanted to"
                uow.end_job(record, JobState.FAILED, reason)

    def _stop_cluster(self, job: str, cluster: int) -> None:
        with self._units.begin() as uow:
            assignments = uow.db.assignments.of_job(job)
            if cluster not in failed_clusters(assignments):
                return  # its Root has the trained stages by now
            for each in assignments:
                if each.cluster != cluster or each.has_ended:
                    continue
                provider = uow.db.providers.get(each.provider)
                assert provider is not None
                uow.end_assignment(each, "stopped", "another node of its cluster failed")
                uow.release(provider, f"the remaining nodes of cluster {cluster} of {job} were stopped")
            uow.update_job_status(job)

    def _give_up_result(self, name: str) -> None:
        """Give up the result of a provider that has not returned with it.

        Its cluster repeats the end of the training, unless another cluster has delivered a result.
        """
        with self._units.begin() as uow:
            assignment = uow.db.assignments.get(name)
            provider = None if assignment is None else uow.db.providers.get(assignment.provider)
            if assignment is None or assignment.has_ended or provider is None:
                return
            if provider.state is ProviderState.LOST:
                minutes = f"{self._settings.result_wait / 60:.0f} minutes"
                reason = f"the provider was lost with the result, and was away for {minutes}"
                if any(map(has_delivered, roots(uow.db.assignments.of_job(assignment.job)))):
                    uow.end_assignment(assignment, "failed", reason)
                else:
                    uow.vacate(assignment, reason, "passing")
                uow.update_job_status(assignment.job)
                self.schedule_stops(uow, assignment.job)

    def _fail_late_fetches(self, now: float) -> None:
        """Vacate the places of providers that are alive but do not finish fetching."""
        with self._units.db.read() as db:
            jobs = db.jobs.in_state(JobState.SHIPPING, JobState.TRAINING)
            found = [each for job in jobs for each in db.assignments.of_job(job.id)]
        fetching = [each for each in found if each.phase in FETCHING]
        since = self._fetching_since = {e.id: self._fetching_since.get(e.id, now) for e in fetching}
        for each in fetching:
            if now - since[each.id] > self._settings.fetch_grace:
                with self._units.begin() as uow:
                    self._fail_late_fetch(uow, each, now - since[each.id])
                    uow.update_job_status(each.job)
                    self.schedule_stops(uow, each.job)

    def _fail_late_fetch(self, uow: UnitOfWork, assignment: AssignmentRecord, waited: float) -> None:
        current = uow.db.assignments.get(assignment.id)
        provider = uow.db.providers.get(assignment.provider)
        if current is None or current.phase not in FETCHING or provider is None:
            return
        body = uow.db.assignments.body(assignment.id)
        limit = fetch_limit(body, provider.offer, self._settings.fetch_grace)
        if waited > limit:
            reason = f"it did not fetch its assignment within {limit / 60:.0f} minutes"
            uow.vacate(assignment, reason, "machine")
            uow.release(provider, f"{assignment.job} continues without it: {reason}")


def _check_graph(spec: JobSpec) -> None:
    size = spec.model.units.size
    if size > UNITS_LIMIT:
        raise ServerRefusedError(
            f"the graph of the model has {size / 1e6:.0f} MB, a job may have {UNITS_LIMIT / 1e6:.0f} MB"
            ": use fewer operations, such as fewer iterations of a loop in forward",
            413,
        )
