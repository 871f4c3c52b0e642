"""Times of the stages of jobs, at first and now: what makes a straggler."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, select
from sqlalchemy.dialects.sqlite import insert

from ravnest.server.db.records import StageTimesRecord
from ravnest.server.db.tables import stage_times


class StageTimesRepository:
    """Times of the stages of all jobs and all their plans."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, times: Iterable[StageTimesRecord]) -> None:
        """Store the times of stages instead of earlier ones."""
        rows = [vars(each) for each in times]
        if rows:
            self._connection.execute(insert(stage_times).prefix_with("OR REPLACE"), rows)

    def of_job(self, job: str) -> list[StageTimesRecord]:
        """Return the times of a job's stages under all its plans, by plan, cluster and stage."""
        c = stage_times.c
        query = select(stage_times).where(c.job == job).order_by(c.attempt, c.cluster, c.stage)
        return [StageTimesRecord(**row._mapping) for row in self._connection.execute(query)]
