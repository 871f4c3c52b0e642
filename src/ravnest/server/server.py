"""The server as a whole: its folder, its books, and those who act on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ravnest.errors import ServerRefusedError
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobView
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.auth.tokens import AuthService
from ravnest.server.db.database import Database
from ravnest.server.db.records import JobRecord, MemberRecord
from ravnest.server.folder import ServerFolder
from ravnest.server.job_service import JobService
from ravnest.server.notifications import Notifications
from ravnest.server.scheduling.matching import Matching, MatchingThread
from ravnest.server.scheduling.planning import JobPlanner, ShippingPlanner
from ravnest.server.settings import Clock, ServerSettings
from ravnest.server.unit_of_work import UnitOfWorkFactory
from ravnest.server.views import job_view

_STOP_SECONDS = 2.0


class Server:
    """Everything but HTTP."""

    def __init__(
        self,
        folder: Path,
        *,
        planner: JobPlanner | None = None,
        settings: ServerSettings | None = None,
        clock: Clock | None = None,
        tls: bool = False,
    ) -> None:
        self.settings = settings or ServerSettings()
        self.clock = clock or Clock()
        self.tls = tls
        self.folder = ServerFolder(folder)
        self.store = Database(self.folder.database)
        self.trust = AuthService(self.store, self.folder, self.clock)
        self.artifacts = ArtifactFolder(
            self.folder.artifacts,
            largest=self.settings.largest_artifact,
            reserve=self.settings.disk_reserve,
        )
        self.wakes = Notifications()
        self._thread = MatchingThread()
        self._office = UnitOfWorkFactory(
            self.store, self.trust, self.wakes, self.clock, self._thread.want
        )
        self.steward = JobService(self._office, self.trust, self.settings)
        self.matching = Matching(
            self._office, planner or ShippingPlanner(self.artifacts, self.folder.scratch)
        )

    @contextmanager
    def opened(self) -> Iterator[Server]:
        """The folder is this server's, and the state that it left there is taken up."""
        with self.folder.held():
            self.store.open()
            try:
                self.trust.open()
                with self.store.look() as books:
                    wanted = books.holdings.all()
                self.artifacts.sweep(wanted, self.clock.wall() - self.settings.kept_parts)
                self.steward.start()
                yield self
            finally:
                self.store.close()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Jobs are matched in the background."""
        self._thread.start(self.matching)
        try:
            yield
        finally:
            self._thread.stop(_STOP_SECONDS)

    def job_of(self, member: MemberRecord, job: str) -> JobRecord:
        """A job that the member may see; 404 if there is none, 403 if it is another's."""
        with self.store.look() as books:
            record = books.jobs.get(job)
        if record is None:
            raise ServerRefusedError(f"there is no job {job}", 404)
        if member.role is ApiRole.REQUESTER and record.owner != member.id:
            raise self.trust.refused(member.id, f"{member.name} wanted to see {job}, which is another's")
        return record

    def jobs_of(self, member: MemberRecord, limit: int = 500) -> list[JobView]:
        """All jobs that the member may see, newest first."""
        if member.role is ApiRole.PROVIDER:
            return []
        owner = member.id if member.role is ApiRole.REQUESTER else None
        with self.store.look() as books:
            return [job_view(books, record) for record in books.jobs.listed(owner, limit)]
