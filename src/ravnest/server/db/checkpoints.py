"""Uploaded checkpoints: which files hold the state of which stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, select
from sqlalchemy.dialects.sqlite import insert

from ravnest.schemas.base import Artifact
from ravnest.server.db.records import StageCheckpointRecord
from ravnest.server.db.tables import checkpoints
from ravnest.types import CheckpointId

_OF_JOB = (
    select(checkpoints)
    .where(checkpoints.c.job == bindparam("job"))
    .order_by(*(checkpoints.c[n] for n in ("attempt", "update_number", "phase", "cluster", "stage")))
)


class CheckpointRepository:
    """Uploaded checkpoints of all jobs."""

    def __init__(self, connection: Connection, changed_jobs: set[str]) -> None:
        self._connection = connection
        self._changed_jobs = changed_jobs

    def add(self, checkpoint: StageCheckpointRecord) -> None:
        """Add a checkpoint; one of the same stage and update stays as it is."""
        self._changed_jobs.add(checkpoint.job)
        values = {**_key(checkpoint), **_files(checkpoint)}
        self._connection.execute(insert(checkpoints).values(**values).on_conflict_do_nothing())

    def of_job(self, job: str) -> list[StageCheckpointRecord]:
        """Return the checkpoints of a job, oldest plan and update first."""
        return [_record(row) for row in self._connection.execute(_OF_JOB, {"job": job})]

    def jobs(self) -> list[str]:
        """Return the jobs that have checkpoints."""
        return list(self._connection.execute(select(checkpoints.c.job).distinct()).scalars())

    def remove(self, unneeded: Iterable[StageCheckpointRecord]) -> None:
        """Remove checkpoints."""
        for checkpoint in unneeded:
            self._changed_jobs.add(checkpoint.job)
            same = [checkpoints.c[name] == value for name, value in _key(checkpoint).items()]
            self._connection.execute(delete(checkpoints).where(*same))


def _key(checkpoint: StageCheckpointRecord) -> dict[str, Any]:
    return {
        "job": checkpoint.job,
        "plan": checkpoint.plan,
        "run": checkpoint.run,
        "taken": checkpoint.taken,
        "update_number": checkpoint.id.update,
        "phase": checkpoint.id.phase,
        "cluster": checkpoint.cluster,
        "stage": checkpoint.stage,
    }


def _files(checkpoint: StageCheckpointRecord) -> dict[str, Any]:
    return {
        "stages": checkpoint.stages,
        "attempt": checkpoint.attempt,
        "time": checkpoint.time,
        "tensors": checkpoint.tensors.sha256,
        "tensors_size": checkpoint.tensors.size,
        "manifest": checkpoint.manifest.sha256,
        "manifest_size": checkpoint.manifest.size,
    }


def _record(row: Row[Any]) -> StageCheckpointRecord:
    return StageCheckpointRecord(
        job=row.job,
        plan=row.plan,
        run=row.run,
        taken=row.taken,
        id=CheckpointId(row.update_number, row.phase),
        cluster=row.cluster,
        stage=row.stage,
        stages=row.stages,
        attempt=row.attempt,
        time=row.time,
        tensors=Artifact(sha256=row.tensors, size=row.tensors_size),
        manifest=Artifact(sha256=row.manifest, size=row.manifest_size),
    )
