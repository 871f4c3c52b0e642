"""Sums of what was removed from the database because it was old, so that its readers can be told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, bindparam, delete, func, select
from sqlalchemy.dialects.sqlite import insert

from ravnest.server.db.tables import removals

RemovedKind = Literal["events", "jobs"]
ALL = ""
"""Subject of the sum of all removals of a kind."""


@dataclass(frozen=True)
class Removal:
    """Rows that were removed."""

    kind: RemovedKind
    subject: str
    """Job whose events they were, requester whose jobs they were, or ``ALL``."""
    count: int
    last: int
    """Highest sequence of the events; 0 for jobs."""
    time: float
    """Time of the last event, or at which the last job ended."""


_NEW = insert(removals)
_ADD = _NEW.on_conflict_do_update(
    index_elements=[removals.c.kind, removals.c.subject],
    set_={
        "count": removals.c.count + _NEW.excluded.count,
        "last": func.max(removals.c.last, _NEW.excluded.last),
        "time": func.max(removals.c.time, _NEW.excluded.time),
    },
)
_GET = select(removals).where(
    removals.c.kind == bindparam("kind"), removals.c.subject == bindparam("subject")
)


class RemovalRepository:
    """Sums of all removals."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add(self, removed: Iterable[Removal]) -> None:
        """Add removals to those before."""
        rows = [vars(each) for each in removed]
        if rows:
            self._connection.execute(_ADD, rows)

    def get(self, kind: RemovedKind, subject: str = ALL) -> Removal | None:
        """Return what was removed; ``None`` if nothing was."""
        row = self._connection.execute(_GET, {"kind": kind, "subject": subject}).first()
        return None if row is None else Removal(**row._mapping)

    def forget(self, kind: RemovedKind, subject: str) -> None:
        """Forget the removals of a subject that does not exist any more."""
        own = (removals.c.kind == kind) & (removals.c.subject == subject)
        self._connection.execute(delete(removals).where(own))
