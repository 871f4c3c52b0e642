"""Submission of a job that starts from the newest checkpoint of an ended one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ravnest.errors import ServerRefusedError, StageFormatError
from ravnest.jobs.tensor_file import TensorFile
from ravnest.schemas.jobs import JobSpec
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.complete_checkpoints import (
    complete_checkpoints,
    newest_by_cluster,
)
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import MemberRecord, StageCheckpointRecord

BEFORE_FIRST_PLAN = -1
"""Number of the plan of checkpoints that a job got from an earlier one."""


def check_resumed(
    db: Transaction, artifacts: ArtifactFolder, member: MemberRecord, spec: JobSpec
) -> None:
    """Refuse a job whose checkpoints do not exist, or do not fit its settings or weights."""
    if spec.resume_from is None:
        return
    find_resumed(db, member, spec)
    before = db.jobs.spec(spec.resume_from)
    problem = settings_misfit(spec, before) or weights_misfit(spec, before, artifacts)
    if problem:
        raise ServerRefusedError(f"{spec.resume_from} cannot be resumed: {problem}", 422)


def find_resumed(db: Transaction, member: MemberRecord, spec: JobSpec) -> list[StageCheckpointRecord]:
    """Return the checkpoints that a job starts from; refuse if they do not exist."""
    if spec.resume_from is None:
        return []
    name = spec.resume_from
    old = db.jobs.get(name)
    if old is None or old.owner != member.id:
        raise ServerRefusedError(f"you have no job {name} to resume", 404)
    if not old.state.is_final:
        raise ServerRefusedError(f"{name} is {old.state}: cancel it before you resume it", 409)
    newest = newest_by_cluster(complete_checkpoints(db.checkpoints.of_job(name)))
    if not newest:
        raise ServerRefusedError(
            f"{name} has no complete checkpoint: it ended before its first one was uploaded, or so long "
            "ago that its checkpoints were removed",
            409,
        )
    return [stage for each in newest.values() for stage in each.stages]


def add_resumed(db: Transaction, job: str, found: Sequence[StageCheckpointRecord]) -> None:
    """Give a new job the checkpoints that it starts from, so that they stay for as long as it needs."""
    for each in found:
        db.checkpoints.add(replace(each, job=job, attempt=BEFORE_FIRST_PLAN))
        db.artifact_grants.grant(job, (each.tensors, each.manifest))


def settings_misfit(new: JobSpec, old: JobSpec) -> str:
    """Return why the state of a training does not fit other settings; empty if it does."""
    one, other = new.training, old.training
    if one.optimizer.name != other.optimizer.name:
        return f"its optimizer is {other.optimizer.name}, not {one.optimizer.name}"
    if [group.match for group in one.parameter_groups] != [g.match for g in other.parameter_groups]:
        return "the parameter groups must match the same parameters"
    if one.scheduler != other.scheduler or one.lr_step_on_epoch_change != other.lr_step_on_epoch_change:
        return "the learning rate scheduler must be the same, with the same parameters"
    if one.scheduler is not None and one.optimizer != other.optimizer:
        return "with a learning rate scheduler, the parameters of the optimizer must be the same"
    if (new.validation is None) != (old.validation is None) or one.val_freq != other.val_freq:
        return "validations must be as often as before"
    return ""


def weights_misfit(new: JobSpec, old: JobSpec, artifacts: ArtifactFolder) -> str:
    """Return why two jobs do not train the same tensors; empty if they do."""
    if new.model.weights == old.model.weights:
        return ""
    try:
        found, before = (
            TensorFile.read(artifacts.path(spec.model.weights.sha256)).tensors for spec in (new, old)
        )
    except (StageFormatError, OSError) as error:
        return f"the weights of a model cannot be read: {error}"
    if lacking := min(before.keys() - found.keys(), default=None):
        return f"the model has no {lacking}, which the earlier one has"
    if further := min(found.keys() - before.keys(), default=None):
        return f"the earlier model has no {further}"
    for name, tensor in before.items():
        if (tensor.shape, tensor.dtype) != (found[name].shape, found[name].dtype):
            return (
                f"{name} has the shape {list(found[name].shape)} ({found[name].dtype}), before "
                f"{list(tensor.shape)} ({tensor.dtype})"
            )
    return ""
