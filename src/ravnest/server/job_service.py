"""Jobs: submission, cancellation, and deadlines of nodes that hold a job up."""

from __future__ import annotations

import secrets
import threading

from ravnest.errors import ServerRefusedError
from ravnest.schemas.jobs import JobSpec, JobState, JobView
from ravnest.server.assignments import FETCHING, fetch_limit, needed_files
from ravnest.server.db.records import AssignmentRecord, MemberRecord
from ravnest.server.job_status import failed_clusters
from ravnest.server.settings import ServerSettings
from ravnest.server.unit_of_work import UnitOfWork, UnitOfWorkFactory
from ravnest.server.views import job_view


class JobService:
    """Operations on jobs; the methods are thread-safe and return soon."""

    def __init__(self, units: UnitOfWorkFactory, settings: ServerSettings) -> None:
        self._units = units
        self._settings = settings
        self._stop_deadlines: dict[tuple[str, int], float] = {}
        """Failed clusters, by job and number, and when their remaining nodes are stopped."""
        self._lock = threading.Lock()

    def resume(self, uow: UnitOfWork) -> int:
        """Take up the jobs after a start of the server; return how many are running."""
        for job in uow.db.jobs.in_state(JobState.PLANNED):
            uow.requeue(job, "the server stopped while it planned this job")
        running = uow.db.jobs.in_state(JobState.SHIPPING, JobState.TRAINING)
        for job in running:
            self.schedule_stops(uow, job.id)
        uow.needs_matching = True
        return len(running)

    def submit(self, member: MemberRecord, spec: JobSpec) -> str:
        """Queue a job and return its id; refuse (422) if its files were not uploaded by its owner."""
        job = f"job-{secrets.token_hex(4)}"
        files = needed_files(spec)
        with self._units.begin() as uow:
            known = uow.db.artifact_grants.sizes(member.id)
            missing = [file.sha256 for file in files if known.get(file.sha256) != file.size]
            if missing:
                raise ServerRefusedError(
                    f"{len(missing)} files were not uploaded yet, or have another size: "
                    f"{', '.join(missing[:10])}{', …' if len(missing) > 10 else ''}",
                    422,
                )
            uow.db.jobs.add(job, member.id, spec, f"submitted by {member.name}")
            uow.needs_matching = True
        return job

    def cancel(self, job: str, member: MemberRecord) -> JobView:
        """Cancel a job; refuse (409) if it is done or failed."""
        with self._units.begin() as uow:
            record = uow.db.jobs.get(job)
            if record is None:
                raise ServerRefusedError(f"there is no job {job}", 404)
            if record.state in (JobState.DONE, JobState.FAILED):
                raise ServerRefusedError(f"{job} is {record.state} already", 409)
            if record.state is not JobState.CANCELLED:
                uow.end_job(record, JobState.CANCELLED, f"cancelled by {member.name}")
            found = uow.db.jobs.get(job)
            assert found is not None
            return job_view(uow.db, found)

    def schedule_stops(self, uow: UnitOfWork, job: str) -> None:
        """Set a deadline for the remaining nodes of failed clusters.

        They usually end by themselves and report why.
        """
        assignments = uow.db.assignments.of_job(job)
        live = {each.cluster for each in assignments if not each.has_ended}
        stopping = failed_clusters(assignments) & live
        deadline = self._units.clock.steady() + self._settings.ending_grace
        with self._lock:
            for cluster in stopping:
                self._stop_deadlines.setdefault((job, cluster), deadline)
        if stopping:
            uow.topics.add(("clock", ""))

    def run_due(self) -> float | None:
        """Stop overdue nodes and fail overdue fetches; return the next deadline (steady clock)."""
        now = self._units.clock.steady()
        with self._lock:
            due = [key for key, deadline in self._stop_deadlines.items() if deadline <= now]
            for key in due:
                del self._stop_deadlines[key]
        for job, cluster in due:
            self._stop_cluster(job, cluster)
        self._fail_late_fetches()
        with self._lock:
            return min(self._stop_deadlines.values(), default=None)

    def _stop_cluster(self, job: str, cluster: int) -> None:
        with self._units.begin() as uow:
            for each in uow.db.assignments.of_job(job):
                if each.cluster != cluster or each.has_ended:
                    continue
                provider = uow.db.providers.get(each.provider)
                assert provider is not None
                uow.end_assignment(each, "stopped", "another node of its cluster failed")
                uow.release(provider, f"the remaining nodes of cluster {cluster} of {job} were stopped")
            uow.update_job_status(job)

    def _fail_late_fetches(self) -> None:
        """Fail assignments whose providers are alive but do not finish fetching."""
        now, grace = self._units.clock.wall(), self._settings.fetch_grace
        with self._units.db.read() as db:
            shipping = db.jobs.in_state(JobState.SHIPPING)
            late = [job for job in shipping if now - job.changed > grace]
        for job in late:
            with self._units.begin() as uow:
                for each in uow.db.assignments.of_job(job.id):
                    if each.phase in FETCHING:
                        self._fail_late_fetch(uow, each, now - job.changed)
                uow.update_job_status(job.id)
                self.schedule_stops(uow, job.id)

    def _fail_late_fetch(self, uow: UnitOfWork, assignment: AssignmentRecord, waited: float) -> None:
        provider = uow.db.providers.get(assignment.provider)
        assert provider is not None
        body = uow.db.assignments.body(assignment.id)
        limit = fetch_limit(body, provider.offer, self._settings.fetch_grace)
        if waited > limit:
            reason = f"it did not fetch its assignment within {limit / 60:.0f} minutes"
            uow.end_assignment(assignment, "failed", reason)
            uow.release(provider, f"{assignment.job} continues without it: {reason}")
