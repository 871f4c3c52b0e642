"""Persistent state of the server, in one SQLite file that survives ``kill -9``.

A change of state and its event are written in one transaction, so that neither exists without the
other. Transactions that write run one at a time; those that only read do not wait for them.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import OperationalError

from ravnest.deadlines import DATABASE_BUSY
from ravnest.errors import ServerError
from ravnest.schemas.jobs import EventView
from ravnest.server.db import tables
from ravnest.server.db.artifact_grants import ArtifactGrantRepository
from ravnest.server.db.assignments import AssignmentRepository
from ravnest.server.db.best_models import BestModelRepository
from ravnest.server.db.checkpoints import CheckpointRepository
from ravnest.server.db.events import EventRepository
from ravnest.server.db.jobs import JobRepository
from ravnest.server.db.links import LinkRepository
from ravnest.server.db.members import MemberRepository
from ravnest.server.db.providers import ProviderRepository
from ravnest.server.db.removals import RemovalRepository
from ravnest.server.db.stage_times import StageTimesRepository
from ravnest.server.db.telemetry import TelemetryRepository

_PROBLEM_SHOWN = 60.0
"""Seconds for which a change that could not be stored counts as a problem: smaller ones may succeed."""
_LONGEST_LOG = 16384
"""Pages of the write-ahead log (64 MB) at which a commit copies them into the database by itself.

SQLite begins its log anew only when all of it is copied and nobody writes meanwhile. On a busy server
``copy_log`` never finds that moment, but leaves so little that such a commit is short.
"""


class Transaction:
    """The repositories, within one transaction."""

    def __init__(self, connection: Connection, now: float, *, only_reads: bool = False) -> None:
        self.now = now
        self.changed_jobs: set[str] = set()
        """Jobs whose plan, assignments or checkpoints this transaction changes."""
        self.removals = RemovalRepository(connection)
        self.events = EventRepository(connection, now, self.removals)
        self.members = MemberRepository(connection, now)
        self.providers = ProviderRepository(connection, self.events, now)
        self.jobs = JobRepository(connection, self.events, now, self.changed_jobs)
        self.links = LinkRepository(connection)
        self.assignments = AssignmentRepository(connection, self.changed_jobs, only_reads=only_reads)
        self.checkpoints = CheckpointRepository(connection, self.changed_jobs)
        self.best_models = BestModelRepository(connection)
        self.telemetry = TelemetryRepository(connection, now)
        self.stage_times = StageTimesRepository(connection)
        self.artifact_grants = ArtifactGrantRepository(connection)


class Database:
    """Database of a server; safe for several threads and processes."""

    def __init__(
        self, path: Path, jobs_changed: Callable[[Iterable[str]], None] = lambda _jobs: None
    ) -> None:
        """``jobs_changed`` is called after each commit that changed a plan, assignment or checkpoint."""
        self._path = path
        self._jobs_changed = jobs_changed
        self.on_events: Callable[[Sequence[EventView]], None] = lambda _events: None
        """Called with the events of each transaction after its commit; must return at once."""
        self._engine = _engine(path)
        self._writing = threading.RLock()
        """Held by the thread that writes. SQLite lets waiting threads sleep and try again, so that one
        of many could wait until its time was over; other processes write rarely."""
        self._problem = ""
        """Why the last change failed that could not be stored."""
        self._failed = -_PROBLEM_SHOWN
        """Time of that change."""

    def open(self) -> None:
        """Create or upgrade the tables; raise ``ServerError`` if their layout is of a later version."""
        with self._engine.connect().execution_options(writes=True) as connection, connection.begin():
            found = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            if found > tables.VERSION:
                raise ServerError(
                    f"{self._path} was written by a later version of Ravnest (layout {found}, this "
                    f"version knows {tables.VERSION}); use that version, or another folder"
                )
            tables.metadata.create_all(connection)
            for index in (each for table in tables.metadata.sorted_tables for each in table.indexes):
                index.create(connection, checkfirst=True)  # of a table that existed already
            for version in range(found, tables.VERSION) if found else ():
                for statement in tables.UPGRADES[version]:
                    connection.exec_driver_sql(statement)
            connection.exec_driver_sql(f"PRAGMA user_version={tables.VERSION}")

    def copy_log(self) -> None:
        """Copy the write-ahead log into the database, while others read and write.

        To be called every second or so. By default a commit does this for each 4 MB, and all that write
        wait for the disk meanwhile: for seconds if it is slow.
        """
        connection = self._engine.raw_connection()
        try:
            connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)")
        finally:
            connection.close()

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def write(self, now: float) -> Iterator[Transaction]:
        """Open a transaction that writes; it is rolled back if an exception leaves the block."""
        try:
            with (
                self._writing,
                self._engine.connect().execution_options(writes=True) as connection,
                connection.begin(),
            ):
                transaction = Transaction(connection, now)
                yield transaction
        except OperationalError as error:
            self._problem, self._failed = f"a change could not be stored: {error.orig}", now
            raise
        if transaction.changed_jobs:
            self._jobs_changed(transaction.changed_jobs)
        if transaction.events.added:
            self.on_events(transaction.events.added)

    def check(self, now: float) -> str:
        """Return why the database cannot be used now, or could not a short time ago; else nothing."""
        try:
            with self._engine.connect() as connection, connection.begin():
                connection.exec_driver_sql("SELECT count(*) FROM jobs")
        except OperationalError as error:
            return f"the database cannot be read: {error.orig}"
        return self._problem if abs(now - self._failed) < _PROBLEM_SHOWN else ""

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """Open a transaction that only reads; it sees one consistent snapshot."""
        with self._engine.connect() as connection, connection.begin():
            yield Transaction(connection, 0.0, only_reads=True)


def _engine(path: Path) -> Engine:
    engine = create_engine(
        f"sqlite:///{path}",
        connect_args={"timeout": DATABASE_BUSY, "check_same_thread": False},
        pool_size=8,
        max_overflow=64,
    )

    @event.listens_for(engine, "connect")
    def _prepare(connection: sqlite3.Connection, _record: Any) -> None:
        # SQLAlchemy begins the transactions, below: sqlite3 would begin them too late.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA journal_mode=WAL")
        # With a WAL this survives the death of the process; only a power cut can lose the last commits.
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint={_LONGEST_LOG}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # Take the write lock at once: upgrading a read transaction fails if another one wrote meanwhile.
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
