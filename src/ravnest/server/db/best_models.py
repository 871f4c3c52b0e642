"""Best models of jobs so far: which files they are, and by which value of a metric."""

from __future__ import annotations

from sqlalchemy import Connection, select
from sqlalchemy.dialects.sqlite import insert

from ravnest.schemas.jobs import BestFiles
from ravnest.server.db.tables import best_models


class BestModelRepository:
    """Best model of each cluster of a job."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def set(self, job: str, cluster: int, best: BestFiles) -> None:
        """Store the best model of a cluster, in place of an earlier one."""
        body = best.model_dump_json()
        values = insert(best_models).values(job=job, cluster=cluster, body=body)
        self._connection.execute(
            values.on_conflict_do_update(index_elements=["job", "cluster"], set_={"body": body})
        )

    def of_job(self, job: str) -> dict[int, BestFiles]:
        """Return the best models of a job by cluster, the lowest first."""
        query = (
            select(best_models.c.cluster, best_models.c.body)
            .where(best_models.c.job == job)
            .order_by(best_models.c.cluster)
        )
        rows = self._connection.execute(query)
        return {row.cluster: BestFiles.model_validate_json(row.body) for row in rows}
