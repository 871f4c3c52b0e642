"""Conversion of a cluster's checkpoints to stages that are cut elsewhere.

Weights and buffers are found by their names in the model, blocks of rows are joined and cut, and the
optimizer's state follows its weight. No number changes, unless the checkpoints of several clusters are
averaged. One tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ravnest.errors import StageFormatError
from ravnest.split.graph import StageSpec
from ravnest.store.checkpoint import (
    EMA,
    OPTIMIZER,
    STATE,
    CheckpointFolder,
    CheckpointManifest,
    LazyTensor,
)
from ravnest.store.checkpoint_blocks import ClusterState, StoredRows
from ravnest.store.checkpoint_mean import StageContents, WeightedSet, mean_contents
from ravnest.store.checkpoint_progress import CutProgress, EpochStart, cluster_progress
from ravnest.store.checkpoint_sets import CheckpointSet
from ravnest.store.checkpoint_state import stored_entries, stored_tensors
from ravnest.types import CheckpointId


@dataclass(frozen=True)
class NewStage:
    """A stage of the new plan, and the folder for its checkpoint."""

    plan: str
    """Digest of the new plan (``NodeSpec.plan``)."""
    node: int
    cluster: int
    spec: StageSpec
    folder: Path


@dataclass(frozen=True)
class Mean:
    """Checkpoints of several clusters whose weights are averaged."""

    sets: tuple[WeightedSet, ...]
    optimizer: bool
    """Average the optimizer's state too."""
    robust: bool = False
    """Take the trimmed mean."""


def convert_checkpoints(
    old: CheckpointSet,
    stages: Sequence[NewStage],
    *,
    start: EpochStart | None = None,
    mean: Mean | None = None,
    same_job: bool = True,
) -> list[CheckpointManifest]:
    """Write a checkpoint of each stage of a new cluster; return their manifests.

    ``stages`` are all stages of one cluster, in order. ``start``: the data of the cluster is not that of
    the old one, so that an epoch begins anew. ``mean``: the weights are those of several clusters,
    everything else is that of ``old``. ``same_job``: the newest results of the old cluster belong to
    the new one's job, which reports them again. ``StageFormatError`` if the checkpoints are not of this
    model; nothing is written then.
    """
    if [stage.spec.index for stage in stages] != list(range(stages[0].spec.count)):
        raise StageFormatError("a conversion needs all stages of the new cluster, in order")
    with ExitStack() as stack:
        progress = cluster_progress([checkpoint.manifest for checkpoint in old.stages])
        if not same_job:
            progress = replace(progress, recent=None)
        state = ClusterState(old, progress, stack)
        contents = [_contents_of(state, stage.spec) for stage in stages]
        state.check_all_used()
        if mean is not None:
            states = [(_state_of(each.checkpoints, stack), each.weight) for each in mean.sets]
            contents = [
                mean_contents(
                    own,
                    [(_contents_of(each, stage.spec), weight) for each, weight in states],
                    optimizer=mean.optimizer,
                    robust=mean.robust,
                )
                for own, stage in zip(contents, stages, strict=True)
            ]
        return [
            _write(old, stage, each, progress, start)
            for stage, each in zip(stages, contents, strict=True)
        ]


def stored_weights(
    sets: Sequence[WeightedSet], model: StageSpec, *, robust: bool = False
) -> dict[str, torch.Tensor]:
    """Return what training has changed in a model, by key: trained weights and buffers.

    Moving averages of weights, where they are kept, take the place of the weights, as in a result.
    ``model``: the whole model as one stage. Of several clusters the mean is taken, and what has no mean
    is that of the first. ``StageFormatError`` if the checkpoints are not of this model.
    """
    with ExitStack() as stack:
        found = []
        for each in sets:
            state = _state_of(each.checkpoints, stack)
            tensors = {STATE + e.key: _delivered(state.rows_of(e)) for e in stored_entries(model)}
            state.check_all_used()
            found.append((StageContents(tensors, None), each.weight))
        mean = mean_contents(found[0][0], found, optimizer=False, robust=robust)
        return {name.removeprefix(STATE): tensor.load() for name, tensor in mean.tensors.items()}


def _delivered(rows: StoredRows) -> LazyTensor:
    return rows.optimizer_tensor(EMA) if EMA in rows.optimizer_fields else rows.weight()


def _state_of(old: CheckpointSet, stack: ExitStack) -> ClusterState:
    return ClusterState(old, cluster_progress([each.manifest for each in old.stages]), stack)


def _write(
    old: CheckpointSet,
    stage: NewStage,
    contents: StageContents,
    progress: CutProgress,
    start: EpochStart | None,
) -> CheckpointManifest:
    spec, folder = stage.spec, CheckpointFolder(stage.folder)
    name = old.id
    if start is not None and start.phase is not None:
        name = CheckpointId(name.update, start.phase)
    manifest = CheckpointManifest(
        stage.plan,
        old.run,
        stage.node,
        stage.cluster,
        spec.index,
        spec.count,
        name,
        stored_tensors(spec),
        progress.of_stage(spec.index, spec.count, contents.fields, start),
        # The same state as before: nodes keep their old checkpoints of it until they have newer ones.
        attempt=old.stages[0].manifest.attempt,
    )
    return folder.commit(folder.write_tensors(name, contents.tensors), manifest)


def _contents_of(state: ClusterState, spec: StageSpec) -> StageContents:
    """Return the contents of a new stage's checkpoint."""
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
    return StageContents(tensors | of_optimizer, fields if trains else None)
