"""Everything that the server must know after ``kill -9``, in one SQLite file.

A change of state and the event that tells why are one transaction: there is never one without the
other. Transactions that write take turns; those that only read do not wait for them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event

from ravnest.errors import ServerError
from ravnest.server.db import tables
from ravnest.server.db.artifact_grants import ArtifactGrantRepository
from ravnest.server.db.assignments import AssignmentRepository
from ravnest.server.db.events import EventRepository
from ravnest.server.db.jobs import JobRepository
from ravnest.server.db.members import MemberRepository
from ravnest.server.db.providers import ProviderRepository

_BUSY_SECONDS = 20.0


class Transaction:
    """The books, as one transaction sees them."""

    def __init__(self, connection: Connection, now: float) -> None:
        self.now = now
        self.events = EventRepository(connection, now)
        self.members = MemberRepository(connection, now)
        self.providers = ProviderRepository(connection, self.events, now)
        self.jobs = JobRepository(connection, self.events, now)
        self.parts = AssignmentRepository(connection)
        self.holdings = ArtifactGrantRepository(connection)


class Database:
    """The database of a server; several threads and processes may use it at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._engine = _engine(path)

    def open(self) -> None:
        """Make the tables, or bring them up to date; ``ServerError`` if they are of a later version."""
        with self._engine.connect().execution_options(writes=True) as connection, connection.begin():
            found = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            if found > tables.VERSION:
                raise ServerError(
                    f"{self._path} was made by a later version of Ravnest (layout {found}, this one "
                    f"knows {tables.VERSION}); use that version, or another folder"
                )
            for version in range(found, tables.VERSION) if found else ():
                connection.exec_driver_sql(tables.UPGRADES[version])
            tables.metadata.create_all(connection)
            connection.exec_driver_sql(f"PRAGMA user_version={tables.VERSION}")

    def close(self) -> None:
        """Give the file back."""
        self._engine.dispose()

    @contextmanager
    def change(self, now: float) -> Iterator[Transaction]:
        """A transaction that writes: all of it happens, or nothing if an exception leaves it."""
        with self._engine.connect().execution_options(writes=True) as connection, connection.begin():
            yield Transaction(connection, now)

    @contextmanager
    def look(self) -> Iterator[Transaction]:
        """A transaction that only reads: everything in it is of one moment."""
        with self._engine.connect() as connection, connection.begin():
            yield Transaction(connection, 0.0)


def _engine(path: Path) -> Engine:
    engine = create_engine(
        f"sqlite:///{path}",
        connect_args={"timeout": _BUSY_SECONDS, "check_same_thread": False},
        pool_size=8,
        max_overflow=64,
    )

    @event.listens_for(engine, "connect")
    def _prepare(connection: sqlite3.Connection, _record: Any) -> None:
        # SQLAlchemy begins transactions itself, below: sqlite3 would begin them too late.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA journal_mode=WAL")
        # With the WAL this survives the death of the process; only a power cut may lose the newest.
        connection.execute("PRAGMA synchronous=NORMAL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # Who will write says so at once: a reader that becomes a writer may find that it is too late.
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
