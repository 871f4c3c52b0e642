"""Conversion of a cluster's checkpoints to stages that are cut elsewhere.

Weights and buffers are found by their names in the model, blocks of rows are joined and cut, and the
optimizer's state follows its weight. No number changes. One tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ravnest.errors import StageFormatError
from ravnest.split.graph import StageSpec
from ravnest.store.checkpoint import (
    OPTIMIZER,
    STATE,
    CheckpointFolder,
    CheckpointManifest,
    LazyTensor,
)
from ravnest.store.checkpoint_blocks import ClusterState
from ravnest.store.checkpoint_progress import CutProgress, cluster_progress
from ravnest.store.checkpoint_sets import CheckpointSet
from ravnest.store.checkpoint_state import stored_entries, stored_tensors


@dataclass(frozen=True)
class NewStage:
    """A stage of the new plan, and the folder for its checkpoint."""

    plan: str
    """Digest of the new plan (``NodeSpec.plan``)."""
    node: int
    cluster: int
    spec: StageSpec
    folder: Path


def convert_checkpoints(
    old: CheckpointSet, stages: Sequence[NewStage], *, restart_epoch: bool = False
) -> list[CheckpointManifest]:
    """Write a checkpoint of each stage of a new cluster; return their manifests.

    ``stages`` are all stages of one cluster, in order. ``restart_epoch``: the data of the cluster is not
    that of the old one, so that the epoch in progress begins anew. ``StageFormatError`` if the
    checkpoints are not of this model; nothing is written then.
    """
    if [stage.spec.index for stage in stages] != list(range(stages[0].spec.count)):
        raise StageFormatError("a conversion needs all stages of the new cluster, in order")
    with ExitStack() as stack:
        progress = cluster_progress([checkpoint.manifest for checkpoint in old.stages])
        state = ClusterState(old, progress, stack)
        contents = [_StageContents.of(state, stage.spec) for stage in stages]
        state.check_all_used()
        return [
            _write(old, stage, each, progress, restart_epoch=restart_epoch)
            for stage, each in zip(stages, contents, strict=True)
        ]


def _write(
    old: CheckpointSet,
    stage: NewStage,
    contents: _StageContents,
    progress: CutProgress,
    *,
    restart_epoch: bool,
) -> CheckpointManifest:
    spec, folder = stage.spec, CheckpointFolder(stage.folder)
    manifest = CheckpointManifest(
        stage.plan,
        old.run,
        stage.node,
        stage.cluster,
        spec.index,
        spec.count,
        old.id,
        stored_tensors(spec),
        progress.of_stage(spec.index, spec.count, contents.fields, restart_epoch=restart_epoch),
        # The same state as before: nodes keep their old checkpoints of it until they have newer ones.
        attempt=old.stages[0].manifest.attempt,
    )
    return folder.commit(folder.write_tensors(old.id, contents.tensors), manifest)


@dataclass(frozen=True)
class _StageContents:
    """Contents of a new stage's checkpoint."""

    tensors: Mapping[str, LazyTensor]
    """By their names in the file."""
    fields: Mapping[str, Mapping[str, Any]] | None
    """Plain values of the optimizer, by key; None if nothing trains."""

    @classmethod
    def of(cls, state: ClusterState, spec: StageSpec) -> _StageContents:
        tensors: dict[str, LazyTensor] = {}
        of_optimizer: dict[str, LazyTensor] = {}
        fields: dict[str, Mapping[str, Any]] = {}
        trains = False
        for entry in stored_entries(spec):
            rows = state.rows_of(entry)
            tensors[STATE + entry.key] = rows.weight()
            if entry.kind == "parameter":
                trains = True
                for name in rows.optimizer_fields:
                    of_optimizer[f"{OPTIMIZER}{entry.key}/{name}"] = rows.optimizer_tensor(name)
                if plain := rows.plain_fields:
                    fields[entry.key] = plain
        return cls(tensors | of_optimizer, fields if trains else None)
