"""Events: every change of state and every refusal, in order, with its reason."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, delete, insert, or_, select

from ravnest.schemas.base import clipped
from ravnest.schemas.jobs import EventKind, EventView
from ravnest.server.db.tables import events

_AT_ONCE = 1000
"""Events in one answer."""
FORGETTABLE: tuple[EventKind, ...] = ("refusal", "warning", "round", "recovery")
"""Kinds that others can cause in any number; only the newest of each are kept."""


class EventRepository:
    """The list of events."""

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
        """Add an event with the time of the transaction."""
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
        """Return the events after number ``sequence``, oldest first.

        With ``job``: the job's own events and those of its providers that concern it.
        """
        query = select(events).where(events.c.sequence > sequence).order_by(events.c.sequence)
        if job is not None:
            query = query.where(or_(events.c.subject == job, events.c.job == job))
        return [_event(row) for row in self._connection.execute(query.limit(limit))]

    def last_entry(self, job: str, state: str) -> float | None:
        """Return the time at which a job last came into a state."""
        query = (
            select(events.c.time)
            .where(events.c.subject == job, events.c.kind == "job")
            .where(events.c.after == state, events.c.before != state)
            .order_by(events.c.sequence.desc())
            .limit(1)
        )
        return self._connection.execute(query).scalar()

    def forget(self, keep: int) -> None:
        """Delete all but the newest ``keep`` events of each kind in ``FORGETTABLE``."""
        for kind in FORGETTABLE:
            numbers = select(events.c.sequence).where(events.c.kind == kind)
            newest_surplus = numbers.order_by(events.c.sequence.desc()).offset(keep).limit(1)
            limit = self._connection.execute(newest_surplus).scalar()
            if limit is not None:
                old = (events.c.kind == kind) & (events.c.sequence <= limit)
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
