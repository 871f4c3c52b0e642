"""Seed checkpoints: the state of an earlier plan, cut for the stages of a new one, as artifacts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ravnest.errors import StageFormatError
from ravnest.jobs.model import UnitModel
from ravnest.plan.plan import ClusterPlan
from ravnest.schemas.checkpoints import SeedCheckpoint
from ravnest.schemas.jobs import NamedComponent
from ravnest.schemas.providers import Assignment
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.checkpoint_check import read_uploaded_manifest
from ravnest.server.complete_checkpoints import CompleteCheckpoint
from ravnest.server.scheduling.planning import PlannedJob
from ravnest.server.scheduling.remainder_seeds import state_before, with_remainder
from ravnest.store.checkpoint import CheckpointFolder, CheckpointManifest
from ravnest.store.checkpoint_conversion import Mean, NewStage, convert_checkpoints
from ravnest.store.checkpoint_progress import EpochStart
from ravnest.store.checkpoint_sets import CheckpointSet, StageCheckpoint, checkpoint_set
from ravnest.store.plain_data import NotPlainError, decode, encode
from ravnest.types import CheckpointId


def with_seeds(
    assignments: Sequence[Assignment],
    planned: PlannedJob,
    model: UnitModel,
    artifacts: ArtifactFolder,
    scratch: Path,
) -> tuple[Assignment, ...]:
    """Return the assignments with a checkpoint to start from; ``StageFormatError`` if it is damaged.

    If the rest of an epoch is divided anew, they have their parts of it, too.
    """
    start = planned.start
    assert start is not None
    seeded = {each.node: each for each in assignments}
    position = EpochStart() if start.restart_epoch else None
    mean: Mean | None = None
    if start.before:
        olds = [stored_set(each.checkpoint, artifacts, start.optimizer) for each in start.before]
        state = state_before(planned, olds, artifacts)
        mean, position = state.mean, state.start
        seeded = with_remainder(seeded, planned, state.remainder, artifacts, scratch)
    for cluster, (plan, checkpoint) in enumerate(
        zip(planned.plan.clusters, start.checkpoints, strict=True)
    ):
        members = [seeded[stage.node.id] for stage in plan.stages]
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            stages = [
                NewStage(each.node_spec.plan, each.node, cluster, spec, Path(folder) / str(each.node))
                for each, spec in zip(members, model.stages(stage_starts(plan)), strict=True)
            ]
            old = stored_set(checkpoint, artifacts, start.optimizer)
            own = planned.spec.resume_from is None  # else the results may be those of the job before
            manifests = convert_checkpoints(old, stages, start=position, mean=mean, same_job=own)
            for each, stage, manifest in zip(members, stages, manifests, strict=True):
                seed = _seed(CheckpointFolder(stage.folder), manifest.id, artifacts)
                seeded[each.node] = each.model_copy(update={"seed": seed, "resume": True})
    return tuple(seeded[each.node] for each in assignments)


def stage_starts(cluster: ClusterPlan) -> tuple[int, ...]:
    """Return the first units of a cluster's stages, except for the first stage."""
    return tuple(stage.start for stage in cluster.stages[1:])


def stored_set(
    checkpoint: CompleteCheckpoint,
    artifacts: ArtifactFolder,
    optimizer: NamedComponent | None = None,
) -> CheckpointSet:
    """Return the files of a checkpoint; ``StageFormatError`` if they are damaged.

    ``optimizer``: its parameters replace those in the checkpoint.
    """
    params = {} if optimizer is None else optimizer.params
    return checkpoint_set(
        StageCheckpoint(
            with_params(read_uploaded_manifest(artifacts.path(each.manifest.sha256)), params),
            artifacts.path(each.tensors.sha256),
        )
        for each in checkpoint.stages
    )


def with_params(manifest: CheckpointManifest, params: Mapping[str, Any]) -> CheckpointManifest:
    """Return a manifest whose optimizer has these parameters; others stay."""
    if not params:
        return manifest
    try:
        progress = decode(manifest.progress)
        for group in progress["updates"].get("groups", ()):
            for name, value in params.items():
                if name in group:
                    is_tuple = isinstance(group[name], tuple) and isinstance(value, list)
                    group[name] = tuple(value) if is_tuple else value
    except (NotPlainError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise StageFormatError(f"the manifest of stage {manifest.stage} is damaged: {error}") from error
    return msgspec.structs.replace(manifest, progress=encode(progress))


def _seed(
    folder: CheckpointFolder, checkpoint: CheckpointId, artifacts: ArtifactFolder
) -> SeedCheckpoint:
    return SeedCheckpoint(
        update=checkpoint.update,
        phase=checkpoint.phase,
        tensors=artifacts.add(folder.tensors_path(checkpoint)),
        manifest=artifacts.add(folder.manifest_path(checkpoint)),
    )
