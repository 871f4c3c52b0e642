"""Rest of an epoch and mean of the states of an earlier plan's clusters, from their checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ravnest.errors import StageFormatError
from ravnest.schemas.providers import Assignment, EpochRemainder
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.scheduling.data_shares import slices
from ravnest.server.scheduling.job_start import OldCluster
from ravnest.server.scheduling.planning import PlannedJob
from ravnest.server.scheduling.remainder import (
    ClusterPosition,
    Remainder,
    RemainderError,
    find_remainder,
)
from ravnest.store.checkpoint_conversion import Mean
from ravnest.store.checkpoint_mean import WeightedSet, sample_weights
from ravnest.store.checkpoint_progress import CutProgress, EpochStart, cluster_progress
from ravnest.store.checkpoint_sets import CheckpointSet


@dataclass(frozen=True)
class StateBefore:
    """State of an earlier plan: the mean of its clusters, and what they have left of an epoch."""

    mean: Mean
    remainder: Remainder
    start: EpochStart
    """Position of the new clusters."""


def state_before(
    planned: PlannedJob, sets: Sequence[CheckpointSet], artifacts: ArtifactFolder
) -> StateBefore:
    """Return the state from which the clusters of a plan start; ``sets``: those of its old clusters.

    ``StageFormatError`` if a checkpoint is damaged or the rest of the epoch cannot be found.
    """
    assert planned.start is not None
    before, training = planned.start.before, planned.spec.training
    progress = [cluster_progress([each.manifest for each in found.stages]) for found in sets]
    positions = [
        _position(old, found.id.phase, each, artifacts)
        for old, found, each in zip(before, sets, progress, strict=True)
    ]
    rates = [each.samples_per_second for each in planned.plan.clusters]
    validates = planned.spec.validation is not None
    remainder = find_remainder(positions, rates, training, validates=validates)
    current = [
        (found, each.averaging_samples)
        for old, found, each in zip(before, sets, progress, strict=True)
        if old.is_current
    ]
    robust = training.robust_mean is not None
    weights = sample_weights([samples for _, samples in current], robust=robust)
    averaged = [
        WeightedSet(found, weight) for (found, _), weight in zip(current, weights, strict=True) if weight
    ]
    newest = next(
        position
        for old, position in zip(before, positions, strict=True)
        if old.checkpoint == planned.start.checkpoints[0]
    )
    is_same = remainder.parts is None and remainder.epoch == newest.epoch
    start = EpochStart() if is_same else EpochStart(remainder.epoch, remainder.phase)
    mean = Mean(tuple(averaged), training.average_optim, robust)
    return StateBefore(mean, remainder, start)


def with_remainder(
    assignments: Mapping[int, Assignment],
    planned: PlannedJob,
    remainder: Remainder,
    artifacts: ArtifactFolder,
    scratch: Path,
) -> dict[int, Assignment]:
    """Return the assignments, by node, with the samples of the epoch that is not a whole one."""
    found = dict(assignments)
    data = planned.spec.train
    for cluster, part in zip(planned.plan.clusters, remainder.parts or (), strict=False):
        span = range(int(part.min()), int(part.max()) + 1)
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            path = Path(folder) / "rows"
            path.write_bytes((part - span.start).numpy().astype("<i8").tobytes())
            rows = artifacts.add(path)
        for stage in cluster.stages:
            own = found[stage.node.id]
            if own.train.inputs or own.train.labels:
                rest = EpochRemainder(
                    epoch=remainder.epoch,
                    samples=len(part),
                    rows=rows,
                    first=span.start,
                    inputs=tuple(slices(data.inputs, span)) if own.train.inputs else (),
                    labels=tuple(slices(data.labels, span)) if own.train.labels else (),
                )
                share = own.train.model_copy(update={"remainder": rest})
                found[own.node] = own.model_copy(update={"train": share})
    return found


def _position(
    old: OldCluster, phase: int, progress: CutProgress, artifacts: ArtifactFolder
) -> ClusterPosition:
    root = progress.root
    epoch, batches = root.get("epoch"), root.get("batches")
    if not all(isinstance(each, int) and each >= 0 for each in (epoch, batches)):
        raise StageFormatError("a checkpoint has no position in the data")
    assert isinstance(epoch, int)
    assert isinstance(batches, int)
    return ClusterPosition(
        rows=old.rows,
        phase=phase,
        epoch=epoch,
        batches=batches,
        unused=0 if old.is_current else progress.averaging_samples,
        generator=_generator(root.get("random")),
        left=None if old.remainder is None else _left(old.remainder, artifacts),
    )


def _generator(random: Any) -> bytes | None:
    """Return the state of the generator of a Root's training data: the first one of its loaders."""
    loaders = random.get("loaders") if isinstance(random, Mapping) else None
    first = loaders[0] if isinstance(loaders, list | tuple) and loaders else None
    return first if isinstance(first, bytes) else None


def _left(rest: EpochRemainder, artifacts: ArtifactFolder) -> tuple[int, torch.Tensor]:
    """Return the samples of an earlier remainder, by their numbers in the whole dataset."""
    try:
        data = artifacts.path(rest.rows.sha256).read_bytes()
    except OSError as error:
        raise RemainderError(f"the samples of epoch {rest.epoch + 1} are not here any more") from error
    return rest.epoch, torch.from_numpy(np.frombuffer(data, "<i8").copy()) + rest.first
