"""What happened, in order, with its reason."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import Connection, Row, delete, insert, or_, select

from ravnest.schemas.jobs import EventView
from ravnest.server.db.tables import events

EventKind = Literal["provider", "job", "server", "refusal"]

REASON_LIMIT = 4000
_AT_ONCE = 1000


def clipped(reason: str) -> str:
    """A reason that fits into a message."""
    return reason if len(reason) <= REASON_LIMIT else f"{reason[: REASON_LIMIT - 2]} …"


class EventRepository:
    """The list of events; it only grows, but for old refusals."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._connection = connection
        self._now = now

    def add(
        self,
        kind: EventKind,
        subject: str,
        reason: str,
        *,
        before: str = "",
        after: str = "",
        job: str | None = None,
    ) -> None:
        """Write down what happens now."""
        self._connection.execute(
            insert(events).values(
                time=self._now,
                kind=kind,
                subject=subject,
                job=job,
                before=before,
                after=after,
                reason=clipped(reason),
            )
        )

    def after(self, sequence: int, *, job: str | None = None, limit: int = _AT_ONCE) -> list[EventView]:
        """Events after one of them, oldest first; of a job: its own and those of its providers."""
        query = select(events).where(events.c.sequence > sequence).order_by(events.c.sequence)
        if job is not None:
            query = query.where(or_(events.c.subject == job, events.c.job == job))
        return [_event(row) for row in self._connection.execute(query.limit(limit))]

    def newest(self, limit: int) -> list[EventView]:
        """The last events, newest first."""
        query = select(events).order_by(events.c.sequence.desc()).limit(limit)
        return [_event(row) for row in self._connection.execute(query)]

    def forget_refusals(self, keep: int) -> None:
        """Keep the newest refusals only."""
        refusals = select(events.c.sequence).where(events.c.kind == "refusal")
        oldest_kept = refusals.order_by(events.c.sequence.desc()).offset(keep).limit(1)
        limit = self._connection.execute(oldest_kept).scalar()
        if limit is not None:
            old = (events.c.kind == "refusal") & (events.c.sequence <= limit)
            self._connection.execute(delete(events).where(old))


def _event(row: Row[Any]) -> EventView:
    return EventView(
        sequence=row.sequence,
        time=row.time,
        kind=row.kind,
        subject=row.subject,
        before=row.before,
        after=row.after,
        reason=row.reason,
    )
