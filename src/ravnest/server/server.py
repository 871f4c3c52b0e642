"""The server: its folder, its database, and the services that use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ravnest.errors import ServerRefusedError
from ravnest.relay.sockets import network_of
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobView
from ravnest.server.artifacts import ArtifactFolder, FileTotals
from ravnest.server.auth.tokens import AuthService
from ravnest.server.checkpoint_check import ManifestCheck
from ravnest.server.checkpoint_service import CheckpointService
from ravnest.server.cluster_activity import ClusterActivity
from ravnest.server.connection_table import ConnectionTable
from ravnest.server.db.database import Database
from ravnest.server.db.records import JobRecord, MemberRecord
from ravnest.server.db.removals import ALL, Removal
from ravnest.server.disk_ballast import DiskBallast
from ravnest.server.estimate_service import EstimateService, JobEstimator
from ravnest.server.folder import ServerFolder
from ravnest.server.heartbeat_queue import HeartbeatQueue
from ravnest.server.heartbeat_replies import HeartbeatReplies
from ravnest.server.improvement_service import ImprovementService
from ravnest.server.job_pace import PaceReader
from ravnest.server.job_service import JobService
from ravnest.server.job_snapshots import JobSnapshots
from ravnest.server.link_test_service import LinkTestService
from ravnest.server.notifications import Notifications
from ravnest.server.partial_service import PartialService
from ravnest.server.plan_review import PlanReviewer
from ravnest.server.provider_service import ProviderService
from ravnest.server.rate_limits import RateLimits
from ravnest.server.reachability.dial_back import DialBackService
from ravnest.server.reachability.relays import RelayService
from ravnest.server.replanning_service import ReplanningService
from ravnest.server.report_service import ReportService
from ravnest.server.resubmission_service import ResubmissionService
from ravnest.server.result_check import ResultCheck
from ravnest.server.retention_service import RetentionService
from ravnest.server.routine_heartbeats import RoutineHeartbeats
from ravnest.server.row_retention import RowRetention
from ravnest.server.scheduling.check_process import ForwardChecker, SandboxedChecker
from ravnest.server.scheduling.file_checks import FileCheckingProcess
from ravnest.server.scheduling.matching import Matching, MatchingThread
from ravnest.server.scheduling.planner_process import EstimatingProcess, ProcessPlanner
from ravnest.server.scheduling.planning import JobPlanner
from ravnest.server.settings import Clock, ServerSettings
from ravnest.server.speed_service import SpeedService
from ravnest.server.spot_check_service import SpotCheckService
from ravnest.server.straggler_service import StragglerService
from ravnest.server.takeover_service import TakeoverService
from ravnest.server.trace_requests import TraceRequests
from ravnest.server.unit_of_work import UnitOfWorkFactory
from ravnest.server.views import job_view

_STOP_SECONDS = 2.0
_SHORTEST_PAUSE = 0.05
_DAY = 86400.0
_REQUEST_BYTES = 64 << 10
"""Bytes of a message that count as one more request."""


class Server:
    """The whole server except HTTP."""

    def __init__(
        self,
        folder: Path,
        *,
        planner: JobPlanner | None = None,
        estimator: JobEstimator | None = None,
        settings: ServerSettings | None = None,
        clock: Clock | None = None,
        tls: bool = False,
        check_result: ResultCheck | None = None,
        check_manifest: ManifestCheck | None = None,
        checker: ForwardChecker | None = None,
    ) -> None:
        self.settings = settings or ServerSettings()
        self.clock = clock or Clock()
        self.tls = tls
        self.folder = ServerFolder(folder)
        snapshots = JobSnapshots()
        self.db = Database(self.folder.database, snapshots.forget)
        self.auth = AuthService(self.db, self.folder, self.clock)
        self.artifacts = ArtifactFolder(
            self.folder.artifacts,
            largest=self.settings.largest_artifact,
            reserve=self.settings.disk_reserve,
            quota=FileTotals(self.settings.member_bytes, self.settings.member_files),
            complete=self._complete_files,
            clock=self.clock.steady,
        )
        self._requests = RateLimits(self.settings.requests)
        self._strangers = RateLimits(self.settings.strangers)
        self.connections = ConnectionTable(self.settings.connections)
        self.ballast = DiskBallast(self.folder.ballast, self.settings.disk_ballast)
        self.notifications = Notifications()
        self._matching_thread = MatchingThread()
        self._units = UnitOfWorkFactory(
            self.db, self.auth, self.notifications, self.clock, self._use_idle_providers
        )
        self.dial_backs = DialBackService(self.clock.steady)
        self.relay_service = RelayService(self._units, self.folder, self.settings)
        self.job_service = JobService(self._units, self.settings, self.artifacts)
        self.resubmission_service = ResubmissionService(self._units, self.job_service, self.artifacts)
        self.partial_service = PartialService(self._units, self.settings)
        self.link_test_service = LinkTestService(
            self._units, self.auth, self.settings, self.relay_service
        )
        leaving: set[str] = set()
        self.takeover_service = TakeoverService(
            self._units, self.job_service, self.relay_service, self.link_test_service, leaving
        )
        file_checks = FileCheckingProcess(self.folder.artifacts, self.settings.planning)
        self.checkpoint_service = CheckpointService(
            self._units,
            self.artifacts,
            self.settings,
            check_manifest or file_checks.check_manifest,
        )
        self.spot_check_service = SpotCheckService(
            self._units,
            self.artifacts,
            self.job_service,
            checker or SandboxedChecker(self.settings.spot_check_seconds),
            self.settings,
        )
        activity = ClusterActivity()
        reports = ReportService(
            self._units,
            self.auth,
            self.job_service,
            activity,
            check_result or file_checks.check_result,
            self.spot_check_service,
        )
        self.trace_requests = TraceRequests(self.notifications, self.clock.wall)
        replies = HeartbeatReplies(
            self.checkpoint_service, self.link_test_service, snapshots, self.trace_requests, leaving
        )
        self.provider_service = ProviderService(
            self._units,
            reports,
            self.takeover_service,
            self.checkpoint_service,
            activity,
            self.job_service,
            self.settings,
            self.dial_backs,
            self.relay_service,
            replies,
        )
        routine = RoutineHeartbeats(
            self._units, reports, self.checkpoint_service, replies, self.provider_service.see
        )
        self.heartbeats = HeartbeatQueue(routine.answer, self.provider_service.answer)
        self.retention_service = RetentionService(self._units, self.artifacts, self.settings)
        self.row_retention = RowRetention(self._units, self.settings)
        self.straggler_service = StragglerService(self._units)
        self.matching = Matching(
            self._units,
            planner
            or ProcessPlanner(
                self.folder.artifacts,
                self.folder.scratch,
                self.settings.planning,
                self.relay_service,
                check_interval=self.spot_check_service.interval,
            ),
            self.relay_service.live,
            self.link_test_service,
            self.job_service,
            self.straggler_service.slowdowns,
        )
        self.estimate_service = EstimateService(
            self.db,
            estimator or EstimatingProcess(self.settings.planning),
            self.relay_service.live,
            self.link_test_service.links_between,
        )
        self.replanning_service = ReplanningService(
            self._units,
            self.matching,
            self.checkpoint_service,
            self.settings,
            self._matching_thread.request,
            self.takeover_service.give_up,
        )
        self.improvement_service = ImprovementService(
            self._units,
            self.matching,
            self.checkpoint_service,
            self.straggler_service,
            SpeedService(self._units),
            PlanReviewer(PaceReader(self.artifacts.path)),
            self.link_test_service,
            self.settings,
            self._matching_thread.request,
        )

    @contextmanager
    def opened(self) -> Iterator[Server]:
        """Lock the folder, open the database and take up its state."""
        with self.folder.held():
            self.ballast.release()
            self.db.open()
            try:
                self.auth.open()
                self.relay_service.open()
                with self.db.read() as db:
                    needed = db.artifact_grants.all()
                self.artifacts.sweep(needed)
                self.artifacts.sweep_partial(self.clock.wall() - self.settings.kept_uploads)
                self._resume()
                yield self
            finally:
                self.db.close()

    @contextmanager
    def matching_in_background(self) -> Iterator[None]:
        """Match jobs with providers in a thread."""
        self._matching_thread.start(self.run_matching)
        try:
            yield
        finally:
            self._matching_thread.stop(_STOP_SECONDS)

    def run_matching(self) -> None:
        """Plan jobs anew that cannot go on or could be faster, then start every job that can start."""
        self.replanning_service.run_once()
        self.improvement_service.run_once()
        self.matching.run_once()

    def clean_up(self) -> None:
        """Delete rows and files that nobody needs any more; takes seconds if there are many."""
        self.ballast.restore()
        self.row_retention.run_once()
        self.retention_service.run_once()

    def run_due(self) -> float:
        """Carry out what is due; return the seconds until the next call is needed."""
        services = (
            self.provider_service,
            self.job_service,
            self.takeover_service,
            self.link_test_service,
            self.checkpoint_service,
            self.spot_check_service,
            self.replanning_service,
            self.improvement_service,
        )
        self.ballast.release()
        deadlines = [service.run_due() for service in services]
        with self.db.write(self.clock.wall()) as db:
            db.events.forget(self.settings.kept_events)
            db.members.forget_tokens(db.now - _DAY)
        now = self.clock.steady()
        latest = now + self.settings.lost_after
        return max(_SHORTEST_PAUSE, min(*(latest if d is None else d for d in deadlines), latest) - now)

    def count_request(self, member: MemberRecord) -> None:
        """Count a request of a member; refuse it (429) if there were too many."""
        wait = self._requests.take(member.id, self.clock.steady())
        if wait > 0:
            most = self.settings.requests.per_second
            raise ServerRefusedError(f"{member.name} sends over {most:g} requests per second", 429, wait)

    def stranger_wait(self, source: str) -> float:
        """Return the seconds for which an address may send no request without a credential."""
        return self._strangers.wait(network_of(source), self.clock.steady())

    def count_stranger(self, source: str) -> None:
        """Count a request that had no valid credential."""
        self._strangers.spend(network_of(source), self.clock.steady(), 1.0)

    def count_bytes(self, member: MemberRecord, count: int) -> None:
        """Count the body of a member's message: a long one costs as much as many requests."""
        self._requests.spend(member.id, self.clock.steady(), count / _REQUEST_BYTES)

    def check_health(self) -> tuple[str, ...]:
        """Return what is wrong with the server; empty if nothing is."""
        problems = [self.db.check(self.clock.wall())]
        if self.artifacts.is_full:
            problems.append("the disk is full: uploads are refused until its operator frees some space")
        return tuple(filter(None, problems))

    def revoke(self, member: str) -> None:
        """End the credential of a member; requests that wait are answered, and its offers end.

        Uploads and downloads in progress end with their connections.
        """
        found = self.auth.revoke(member)
        self.connections.close_member(member)
        self.notifications.notify(("page", ""))
        reason = "its credential was revoked"
        if found.role is ApiRole.PROVIDER:
            self.provider_service.revoke(member, reason)
            self.notifications.notify(("provider", member))
        elif found.role is ApiRole.RELAY:
            self.relay_service.leave(member, f"the relay {found.name} left: {reason}")
            self.notifications.notify(("relays", ""))
        else:
            for job in self.visible_jobs(found):
                self.notifications.notify(("job", job.id))

    def visible_job(self, member: MemberRecord, job: str) -> JobRecord:
        """Return a job; refuse if it does not exist (404) or the member may not see it (403)."""
        with self.db.read() as db:
            record = db.jobs.get(job)
        if record is None:
            raise self.job_service.unknown(job)
        if member.role is ApiRole.REQUESTER and record.owner != member.id:
            raise self.auth.refused(member.id, f"{member.name} requested {job} of another requester")
        return record

    def visible_jobs(self, member: MemberRecord, limit: int = 500) -> list[JobView]:
        """Return the jobs that the member may see, newest first, without the records of their nodes."""
        if member.role in (ApiRole.PROVIDER, ApiRole.RELAY):
            return []
        owner = member.id if member.role is ApiRole.REQUESTER else None
        with self.db.read() as db:
            return [job_view(db, job, with_records=False) for job in db.jobs.listed(owner, limit)]

    def removed_jobs(self, member: MemberRecord) -> Removal | None:
        """Return how many jobs were removed that the member could see; ``None`` if none was."""
        if member.role in (ApiRole.PROVIDER, ApiRole.RELAY):
            return None
        with self.db.read() as db:
            return db.removals.get("jobs", member.id if member.role is ApiRole.REQUESTER else ALL)

    def _complete_files(self, owner: str) -> FileTotals:
        """Return the size and number of the files that a member has uploaded."""
        with self.db.read() as db:
            return FileTotals(*db.artifact_grants.totals(owner))

    def _use_idle_providers(self) -> None:
        """Fill vacant places at once; the matching thread starts jobs with the providers that remain."""
        self.takeover_service.fill()
        self._matching_thread.request()

    def _resume(self) -> None:
        with self._units.begin() as uow:
            running = self.job_service.resume(uow)
            present = self.provider_service.resume(uow)
            what = f"the server started: {present} providers, {running} running jobs"
            uow.db.events.add("server", "server", what)
