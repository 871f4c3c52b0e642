"""Events: every change of state and every refusal, in order, with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, or_, select

from ravnest.schemas.base import clipped
from ravnest.schemas.jobs import EventKind, EventView, JobState
from ravnest.server.db.removals import ALL, Removal, RemovalRepository
from ravnest.server.db.tables import events, jobs

_AT_ONCE = 1000
"""Events in one answer."""
FORGETTABLE: tuple[EventKind, ...] = ("refusal", "warning", "round", "recovery")
"""Kinds that others can cause in any number; only the newest of each are kept."""

_FINAL = tuple(state for state in JobState if state.is_final)


class EventRepository:
    """The list of events."""

    def __init__(self, connection: Connection, now: float, removals: RemovalRepository) -> None:
        self._connection = connection
        self._now = now
        self.added: list[EventView] = []
        """Events of this transaction, without their numbers; for those who watch."""
        self._removals = removals

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
        event = EventView(
            sequence=0,
            time=self._now,
            kind=kind,
            subject=subject,
            before=before,
            after=after,
            reason=clipped(reason),
        )
        values = event.model_dump(exclude={"sequence"})
        self._connection.execute(insert(events).values(job=job, **values))
        self.added.append(event)

    def after(self, sequence: int, *, job: str | None = None, limit: int = _AT_ONCE) -> list[EventView]:
        """Return the events after number ``sequence``, oldest first.

        With ``job``: the job's own events and those of its providers that concern it. Where events were
        removed, an event says so.
        """
        query = select(events).where(events.c.sequence > sequence).order_by(events.c.sequence)
        if job is not None:
            query = query.where(or_(events.c.subject == job, events.c.job == job))
        found = [_event(row) for row in self._connection.execute(query.limit(limit))]
        removed = self._removals.get("events", job or ALL)
        is_within = len(found) < limit or (removed is not None and removed.last < found[-1].sequence)
        if removed is not None and removed.last > sequence and is_within:
            found = sorted([*found, _removed_event(removed)], key=lambda each: each.sequence)
        return found

    def newest(self, limit: int, *, job: str = "", subject: str = "") -> list[EventView]:
        """Return the newest events of a job, or those about a subject, newest first."""
        query = select(events).order_by(events.c.sequence.desc()).limit(limit)
        if job:
            query = query.where(or_(events.c.subject == job, events.c.job == job))
        else:
            query = query.where(events.c.subject == subject)
        return [_event(row) for row in self._connection.execute(query)]

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
        """Delete the surplus of each kind in ``FORGETTABLE`` beyond ``keep`` events.

        All subjects keep the same number of their newest events, those with fewer all of them: nobody
        can push out the events of others.
        """
        for kind in FORGETTABLE:
            numbers = select(events.c.sequence).where(events.c.kind == kind)
            surplus = numbers.order_by(events.c.sequence.desc()).offset(keep).limit(1)
            if self._connection.execute(surplus).first() is not None:
                self._forget_kind(kind, keep)

    def _forget_kind(self, kind: EventKind, keep: int) -> None:
        own = events.c.kind == kind
        counts = select(events.c.subject, func.count()).where(own).group_by(events.c.subject)
        found = {row[0]: row[1] for row in self._connection.execute(counts)}
        most = fair_share(list(found.values()), keep)
        rank = func.row_number().over(partition_by=events.c.subject, order_by=events.c.sequence.desc())
        ranked = select(events.c.sequence, rank.label("rank")).where(own).subquery()
        old = select(ranked.c.sequence).where(ranked.c.rank > most)
        self._remove(events.c.sequence.in_(old))

    def expired(self, before: float, most: int, limit: int) -> list[int]:
        """Return events from before a time, or beyond the newest ``most``, by number; oldest first.

        Events of jobs that have not ended are left out: the server reads them again.
        """
        numbers = select(events.c.sequence).order_by(events.c.sequence.desc())
        surplus = self._connection.execute(numbers.offset(most).limit(1)).scalar() or 0
        unfinished = select(jobs.c.id).where(jobs.c.state.not_in(_FINAL))
        query = (
            select(events.c.sequence)
            .where(or_(events.c.time < before, events.c.sequence <= surplus))
            .where(events.c.subject.not_in(unfinished))
            .where(or_(events.c.job.is_(None), events.c.job.not_in(unfinished)))
        )
        ordered = query.order_by(events.c.sequence).limit(limit)
        return list(self._connection.execute(ordered).scalars())

    def remove(self, sequences: Sequence[int]) -> int:
        """Remove events by number; return how many there were."""
        return self._remove(events.c.sequence.in_(sequences))

    def remove_job(self, job: str, limit: int) -> int:
        """Remove some events of a job that is removed too; return how many."""
        own = or_(events.c.subject == job, events.c.job == job)
        chosen = select(events.c.sequence).where(own).limit(limit)
        found = self._connection.execute(delete(events).where(events.c.sequence.in_(chosen)))
        return found.rowcount

    def _remove(self, chosen: ColumnElement[bool]) -> int:
        """Remove events, and store of which jobs they were."""
        subject = func.coalesce(events.c.job, events.c.subject)
        figures = (func.count(), func.max(events.c.sequence), func.max(events.c.time))
        by_job = select(subject, *figures).join(jobs, jobs.c.id == subject).where(chosen)
        found = self._connection.execute(by_job.group_by(subject)).all()
        count, last, time = self._connection.execute(select(*figures).where(chosen)).one()
        if count:
            self._removals.add([Removal("events", *row) for row in ((ALL, count, last, time), *found)])
            self._connection.execute(delete(events).where(chosen))
        return int(count)


def fair_share(counts: Sequence[int], total: int) -> int:
    """Return the largest number that each may keep of its count, so that all keep ``total`` at most."""
    left = total
    for position, count in enumerate(sorted(counts)):
        share = left // (len(counts) - position)
        if count > share:
            return share
        left -= count
    return total


def _removed_event(removed: Removal) -> EventView:
    return EventView(
        sequence=removed.last,
        time=removed.time,
        kind="server",
        subject=removed.subject or "server",
        before="",
        after="",
        reason=f"{removed.count} events up to here were removed: the server keeps the newest ones",
    )


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
