"""Jobs and their states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)

from ravnest.schemas.base import clipped
from ravnest.schemas.jobs import JobResult, JobSpec, JobState
from ravnest.server.db.events import EventRepository
from ravnest.server.db.records import JobRecord
from ravnest.server.db.tables import assignments, jobs, stage_times
from ravnest.server.lifecycle import NEW, check_transition

_SHORT = [column for column in jobs.c if column.name not in ("spec", "result")]
_TICK = 1e-6
"""Smallest step between two changes of a job, so that a request that waits for a later one sees it."""

_ORDER: ColumnElement[int] = literal_column("jobs.rowid")
"""Order of submission; the wall clock may have jumped between two jobs."""

_TOUCH = (
    update(jobs)
    .where(jobs.c.id.in_(bindparam("ids", expanding=True)))
    .values(changed=func.max(bindparam("now"), jobs.c.changed + _TICK))
)
RUNNING = (JobState.PLANNED, JobState.SHIPPING, JobState.TRAINING)


class JobRepository:
    """All jobs, including those that have ended."""

    def __init__(
        self, connection: Connection, events: EventRepository, now: float, changed_jobs: set[str]
    ) -> None:
        self._connection = connection
        self._changed_jobs = changed_jobs
        self._events = events
        self._now = now

    def add(self, job: str, owner: str, spec: JobSpec, reason: str) -> None:
        """Add a submitted job."""
        check_transition("job", NEW, JobState.SUBMITTED)
        self._connection.execute(
            insert(jobs).values(
                id=job,
                name=spec.name,
                owner=owner,
                spec=spec.model_dump_json(),
                epochs=spec.training.epochs,
                min_providers=spec.min_providers,
                max_providers=spec.max_providers,
                state=JobState.SUBMITTED,
                reason=clipped(reason),
                created=self._now,
                changed=self._now,
            )
        )
        self._events.add("job", job, reason, before=NEW, after=JobState.SUBMITTED)

    def move(self, record: JobRecord, after: JobState, reason: str, **columns: Any) -> None:
        """Set a job's state and other columns; raise ``TransitionError`` if this is not allowed."""
        check_transition("job", record.state, after)
        self._changed_jobs.add(record.id)
        self._set(record.id, state=after, reason=clipped(reason), **columns)
        self._events.add("job", record.id, reason, before=record.state, after=after)

    def explain(self, record: JobRecord, reason: str) -> None:
        """Set the reason of a job whose state stays; add an event if the reason is new."""
        if clipped(reason) != record.reason:
            self._set(record.id, reason=clipped(reason))
            self._events.add("job", record.id, reason, before=record.state, after=record.state)

    def touch(self, *names: str) -> None:
        """Set the time of the last change of jobs, for news such as a loss."""
        self._connection.execute(_TOUCH, {"ids": names, "now": self._now})

    def set_passed_over(self, job: str, times: int) -> None:
        """Store the number of later jobs that started before this one."""
        self._connection.execute(update(jobs).where(jobs.c.id == job).values(passed_over=times))

    def remove(self, job: str) -> None:
        """Remove a job, its assignments and the times of its stages; records and losses are gone."""
        self._changed_jobs.add(job)
        for table in (stage_times, assignments):
            self._connection.execute(delete(table).where(table.c.job == job))
        self._connection.execute(delete(jobs).where(jobs.c.id == job))

    def get(self, job: str) -> JobRecord | None:
        """Return a job by id."""
        row = self._connection.execute(select(*_SHORT).where(jobs.c.id == job)).first()
        return None if row is None else _record(row)

    def spec(self, job: str) -> JobSpec:
        """Return the specification of a job."""
        text = self._connection.execute(select(jobs.c.spec).where(jobs.c.id == job)).scalar_one()
        return JobSpec.model_validate_json(text)

    def result(self, job: str) -> JobResult | None:
        """Return the trained files of a job that is done."""
        text = self._connection.execute(select(jobs.c.result).where(jobs.c.id == job)).scalar()
        return None if text is None else JobResult.model_validate_json(text)

    def listed(self, owner: str | None = None, limit: int = 500) -> list[JobRecord]:
        """Return the newest jobs of one owner, or of all, newest first."""
        query = select(*_SHORT).order_by(_ORDER.desc()).limit(limit)
        if owner is not None:
            query = query.where(jobs.c.owner == owner)
        return [_record(row) for row in self._connection.execute(query)]

    def shown(self, owners: Iterable[str], limit: int) -> list[JobRecord]:
        """Return the jobs that have not ended, and the newest of all and of each owner, newest first."""
        newest = select(_ORDER).select_from(jobs).order_by(_ORDER.desc()).limit(limit)
        queries = [newest, *(newest.where(jobs.c.owner == owner) for owner in owners)]
        places = {place for query in queries for place in self._connection.execute(query).scalars()}
        active = [state for state in JobState if not state.is_final]
        chosen = or_(jobs.c.state.in_(active), _ORDER.in_(places))
        query = select(*_SHORT).where(chosen).order_by(_ORDER.desc())
        return [_record(row) for row in self._connection.execute(query)]

    def in_state(self, *states: JobState) -> list[JobRecord]:
        """Return the jobs in any of these states, oldest first."""
        query = select(*_SHORT).where(jobs.c.state.in_(states)).order_by(_ORDER)
        return [_record(row) for row in self._connection.execute(query)]

    def _set(self, job: str, **columns: Any) -> None:
        changed = func.max(self._now, jobs.c.changed + _TICK)
        self._connection.execute(update(jobs).where(jobs.c.id == job).values(changed=changed, **columns))


def _record(row: Row[Any]) -> JobRecord:
    fields = dict(row._mapping)
    return JobRecord(**{**fields, "state": JobState(fields["state"])})
