"""Weights of jobs that are not done, from the checkpoints that the server has of them."""

from __future__ import annotations

from ravnest.errors import ServerRefusedError
from ravnest.schemas.jobs import JobState
from ravnest.schemas.partial_results import ClusterCheckpoint, PartialResult, StageCheckpointFiles
from ravnest.server.complete_checkpoints import (
    CompleteCheckpoint,
    complete_checkpoints,
    newest_by_cluster,
)
from ravnest.server.db.records import JobRecord, MemberRecord
from ravnest.server.resume_state import averaged_clusters
from ravnest.server.settings import ServerSettings
from ravnest.server.unit_of_work import UnitOfWorkFactory


def partial_reader(job: str, member: str) -> str:
    """Return the owner of the grants with which a member reads the checkpoints of a job.

    It is not the member: checkpoints do not count as files that the member has uploaded.
    """
    return f"partial/{job}/{member}"


class PartialService:
    """Lists of the files of a job's newest checkpoints; thread-safe."""

    def __init__(self, units: UnitOfWorkFactory, settings: ServerSettings) -> None:
        self._units = units
        self._settings = settings

    def newest(self, record: JobRecord, member: MemberRecord) -> PartialResult:
        """Return the newest complete checkpoints of a job, which the member may read from now on.

        They stay readable until the member asks again, also if newer ones replace them. Refuse (409) if
        there is none.
        """
        job = record.id
        with self._units.begin() as uow:
            complete = complete_checkpoints(uow.db.checkpoints.of_job(job))
            if not complete:
                raise ServerRefusedError(self._nothing(record), 409)
            newest = newest_by_cluster(complete)
            averaged = averaged_clusters(uow.db, job, complete)
            spec = uow.db.jobs.spec(job)
            found = PartialResult(
                job=job,
                update=complete[0].id.update,
                age=max(uow.db.now - complete[0].time, 0.0),
                epochs=record.epochs,
                robust=spec.training.robust_mean is not None,
                clusters=tuple(
                    _files(each, is_averaged=each.cluster in averaged) for each in newest.values()
                ),
                units=spec.model.units,
                weights=spec.model.weights,
                adapter=spec.adapter,
            )
            reader = partial_reader(job, member.id)
            uow.db.artifact_grants.revoke(reader)
            stages = [stage for each in found.clusters for stage in each.stages]
            uow.db.artifact_grants.grant(
                reader,
                [
                    *(file for stage in stages for file in (stage.tensors, stage.manifest)),
                    found.units,
                    found.weights,
                    *([] if found.adapter is None else [found.adapter]),
                ],
            )
        return found

    def _nothing(self, record: JobRecord) -> str:
        """Return why a job has no checkpoint, and when there will be one."""
        job = record.id
        if record.epochs == 0:
            return f"{job} only evaluates a model: it trains no weights that could be fetched"
        match record.state:
            case JobState.TRAINING:
                minutes = self._settings.checkpoint_upload / 60
                return (
                    f"{job} has no complete checkpoint at the server yet: the first one is uploaded as "
                    f"soon as all nodes have taken it, then one about every {minutes:.0f} minutes. Try "
                    "again in a minute"
                )
            case JobState.DONE | JobState.FAILED | JobState.CANCELLED:
                hint = ": fetch its result" if record.state is JobState.DONE else ""
                return (
                    f"{job} is {record.state} and has no complete checkpoint at the server: it ended "
                    "before the first one was uploaded, or so long ago that its checkpoints were removed"
                    f"{hint}"
                )
            case _:
                return (
                    f"{job} has no checkpoint, because it does not train yet: it is {record.state}. "
                    f"{record.reason}. The first checkpoint follows soon after training begins"
                )


def _files(checkpoint: CompleteCheckpoint, *, is_averaged: bool) -> ClusterCheckpoint:
    return ClusterCheckpoint(
        cluster=checkpoint.cluster,
        averaged=is_averaged,
        stages=tuple(
            StageCheckpointFiles(tensors=each.tensors, manifest=each.manifest)
            for each in checkpoint.stages
        ),
    )
