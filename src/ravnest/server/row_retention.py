"""Retention of rows: old events, and old jobs that have ended, are removed from the database.

Events of jobs that have not ended stay, and so do jobs that can be resumed. Rows are removed in small
transactions, because heartbeats wait for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ravnest.schemas.jobs import JobState
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import JobRecord
from ravnest.server.db.removals import ALL, Removal
from ravnest.server.settings import ServerSettings
from ravnest.server.unit_of_work import UnitOfWorkFactory

_AT_ONCE = 2000
"""Rows that are removed in one transaction."""
_DAY = 86400.0


def expired_jobs(ended: Sequence[JobRecord], now: float, *, kept: float, most: int) -> list[JobRecord]:
    """Return the ended jobs to remove, oldest submission first.

    ``ended``: oldest submission first. ``kept``: seconds after its end for which a job stays. ``most``:
    jobs of one requester that stay, the newest ones; nobody can push out the jobs of others.
    """
    by_owner: dict[str, list[JobRecord]] = defaultdict(list)
    for job in ended:
        by_owner[job.owner].append(job)
    surplus = {job.id for jobs in by_owner.values() for job in jobs[: max(len(jobs) - most, 0)]}
    return [job for job in ended if job.id in surplus or now - job.changed > kept]


class RowRetention:
    """Removes old rows; ``run_once`` takes long if there are many."""

    def __init__(self, units: UnitOfWorkFactory, settings: ServerSettings) -> None:
        self._units = units
        self._settings = settings

    def run_once(self) -> None:
        """Remove ended jobs, then events, that are too old or too many."""
        settings, now = self._settings, self._units.clock.wall()
        with self._units.db.read() as db:
            ended = db.jobs.in_state(*(state for state in JobState if state.is_final))
            resumable = set(db.checkpoints.jobs())
        old = expired_jobs(ended, now, kept=settings.ended_jobs_kept, most=settings.most_ended_jobs)
        jobs = sum(self._remove_job(job) for job in old if job.id not in resumable)
        events = self._remove_events(now)
        if jobs or events:
            what = (
                f"{jobs} ended jobs and {events} events were removed: they are kept for "
                f"{settings.ended_jobs_kept / _DAY:.0f} and {settings.events_kept / _DAY:.0f} days, the "
                f"newest {settings.most_ended_jobs} jobs of each requester and "
                f"{settings.most_events} events"
            )
            with self._units.begin() as uow:
                uow.db.events.add("server", "server", what)

    def _remove_job(self, job: JobRecord) -> bool:
        """Remove a job with all its rows; return whether it is gone."""
        while self._remove_some(job.id):
            pass
        with self._units.db.write(self._units.clock.wall()) as db:
            if not _is_removable(db, job.id):
                return False
            db.jobs.remove(job.id)
            db.removals.forget("events", job.id)
            db.removals.add(Removal("jobs", subject, 1, 0, job.changed) for subject in (ALL, job.owner))
        return True

    def _remove_some(self, job: str) -> bool:
        """Remove some of the records, losses and events of a job; return whether there were any."""
        with self._units.db.write(self._units.clock.wall()) as db:
            if not _is_removable(db, job):
                return False
            return bool(db.telemetry.remove(job, _AT_ONCE) or db.events.remove_job(job, _AT_ONCE))

    def _remove_events(self, now: float) -> int:
        before, most = now - self._settings.events_kept, self._settings.most_events
        total = 0
        while True:
            with self._units.db.read() as db:
                old = db.events.expired(before, most, _AT_ONCE)
            if not old:
                return total
            with self._units.db.write(self._units.clock.wall()) as db:
                total += db.events.remove(old)


def _is_removable(db: Transaction, job: str) -> bool:
    """Return whether a job has ended and nothing refers to it any more."""
    record = db.jobs.get(job)
    if record is None or not record.state.is_final:
        return False
    return not db.checkpoints.of_job(job) and not db.providers.of_job(job)
