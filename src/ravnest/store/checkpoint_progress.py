"""Progress of a training as its checkpoints store it, for stages that are cut elsewhere. Pure.

The Root's checkpoint has the position of the data, the Leaf's the random state of the labels, and each
stage has the settings of its optimizer and scheduler, which must be the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ravnest.errors import StageFormatError
from ravnest.store.checkpoint import CheckpointManifest
from ravnest.store.plain_data import NotPlainError, decode, encode

_EPOCH_BEGIN: Mapping[str, Any] = {"batches": 0, "microbatches": 0, "samples": 0, "data": ""}
"""Position before the first batch of an epoch."""
_NAMES_OF_PARAMETERS = "param_names"
"""Entry of a parameter group that is not a setting: torch stores the stage's own parameters there."""


@dataclass(frozen=True)
class EpochStart:
    """Position before the first batch of an epoch, with other data than in the checkpoint."""

    epoch: int | None = None
    """None: that of the checkpoint, or its end of training."""
    phase: int | None = None
    """Phases that are over; None: as many as in the checkpoint."""


@dataclass(frozen=True)
class CutProgress:
    """Progress of all stages of a cluster."""

    root: Mapping[str, Any]
    """Position of the data at the Root."""
    leaf: Any
    """State of the generators with which the Leaf's labels continue."""
    validations: Any
    done: int
    """Updates so far."""
    optimizer: Mapping[str, Any] | None
    """Settings of optimizer and scheduler; None if nothing trains."""
    fields: tuple[Mapping[str, Mapping[str, Any]], ...]
    """Plain values of the optimizer by weight, for each stage."""
    averaging_samples: int = 0
    """Samples since the last average with other clusters."""
    recent: Any = None
    """Newest results of the Root, to be reported again."""

    def of_stage(
        self,
        index: int,
        count: int,
        fields: Mapping[str, Any] | None,
        start: EpochStart | None = None,
    ) -> Any:
        """Return the progress of a stage of another cut, for its manifest.

        ``fields``: plain values of the optimizer for the stage's weights; None if none of them trains.
        ``start``: an epoch begins with other data; None: at the same position.
        """
        updates: dict[str, Any] = {"done": self.done, "scheduler_steps": 0}
        if fields is not None and self.optimizer is not None:
            updates |= {**self.optimizer, "fields": fields}
            if start is not None:
                updates |= _without_epoch(self.optimizer, again=start.epoch is None)
        root, validations = dict(self.root), self.validations
        if start is not None:
            root |= _EPOCH_BEGIN
        if start is not None and start.epoch is not None:
            root |= {"epoch": start.epoch, "ended": False}
        if start is not None and start.phase is not None and isinstance(validations, Mapping):
            validations = {phase: each for phase, each in validations.items() if phase < start.phase}
        return encode(
            {
                "root": root if index == 0 else None,
                "leaf": self.leaf if 0 < index == count - 1 else None,
                "validations": validations,
                "updates": updates,
                # With other shares of the data, all clusters start from the same state.
                "averaging_samples": self.averaging_samples if start is None else 0,
                "recent": self.recent if index == 0 else None,
            }
        )


def cluster_progress(manifests: Sequence[CheckpointManifest]) -> CutProgress:
    """Return the progress of a cluster from the manifests of all its stages, in order.

    ``StageFormatError`` if one is damaged, or if the stages differ in what must be the same.
    """
    stages = [_decoded(manifest) for manifest in manifests]
    updates = [_part(stage, "updates", index) for index, stage in enumerate(stages)]
    root = _part(stages[0], "root", 0)
    # A Root that is the Leaf takes labels from its own batches; they continue like its inputs.
    leaf = stages[-1].get("leaf") if len(stages) > 1 else root.get("random")
    trained = {index: each for index, each in enumerate(updates) if "groups" in each}
    settings = {index: _settings(each, index) for index, each in trained.items()}
    for what in ("groups", "scheduler", "scheduler_steps"):
        _check_equal(what, {index: each[what] for index, each in settings.items()})
    done = {index: each.get("done") for index, each in enumerate(updates)}
    _check_equal("done", done)
    if not isinstance(done[0], int):
        raise StageFormatError("the checkpoint of stage 0 has no number of updates")
    samples = stages[0].get("averaging_samples", 0)
    if not isinstance(samples, int) or samples < 0:
        raise StageFormatError("the checkpoint of stage 0 has a wrong number of samples")
    return CutProgress(
        root,
        leaf,
        stages[0].get("validations", {}),
        done[0],
        next(iter(settings.values()), None),
        tuple(each.get("fields", {}) if index in trained else {} for index, each in enumerate(updates)),
        samples,
        stages[0].get("recent"),
    )


def _without_epoch(optimizer: Mapping[str, Any], *, again: bool) -> dict[str, Any]:
    """Return the scheduler's progress at the beginning of an epoch; ``again``: it is the same one.

    Its updates are then made again. The scheduler waits for them, so that it ends with the training.
    """
    ahead = optimizer["epoch_steps"] if again else 0.0
    return {"scheduler_due": optimizer["scheduler_due"] - ahead, "epoch_steps": 0.0}


def _decoded(manifest: CheckpointManifest) -> Mapping[str, Any]:
    try:
        progress = decode(manifest.progress)
    except (NotPlainError, RecursionError) as error:
        raise StageFormatError(
            f"the checkpoint of stage {manifest.stage} is damaged: {error}"
        ) from error
    if not isinstance(progress, Mapping):
        raise StageFormatError(f"the checkpoint of stage {manifest.stage} has no progress")
    return progress


def _part(progress: Mapping[str, Any], name: str, stage: int) -> Mapping[str, Any]:
    part = progress.get(name)
    if not isinstance(part, Mapping):
        raise StageFormatError(f"the checkpoint of stage {stage} is damaged: it lacks {name!r}")
    return part


def _settings(updates: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """Return the settings of a stage's optimizer and scheduler."""
    groups, fields = updates["groups"], updates.get("fields", {})
    well_formed = isinstance(groups, list) and all(isinstance(each, Mapping) for each in groups)
    if not well_formed or not isinstance(fields, Mapping):
        raise StageFormatError(f"the checkpoint of stage {stage} is damaged: its optimizer")
    plain = [
        {name: value for name, value in group.items() if name != _NAMES_OF_PARAMETERS}
        for group in groups
    ]
    due, made = updates.get("scheduler_due", 0.0), updates.get("epoch_steps", 0.0)
    if (
        not all(isinstance(each, int | float) and math.isfinite(each) for each in (due, made))
        or due >= 1
    ):
        raise StageFormatError(f"the checkpoint of stage {stage} is damaged: its scheduler")
    return {
        "groups": plain,
        "scheduler": updates.get("scheduler"),
        "scheduler_steps": updates.get("scheduler_steps", 0),
        "scheduler_due": due,
        "epoch_steps": made,
    }


_REASONS = {
    "groups": "the parameter groups of the optimizer: optimizer_params must make the same groups, with "
    "the same settings, for every stage",
    "scheduler": "the state of the learning rate scheduler, which must be the same for every stage",
    "scheduler_steps": "the steps of the learning rate scheduler",
    "done": "the number of updates",
}


def _check_equal(what: str, by_stage: Mapping[int, Any]) -> None:
    """Compare what all stages must share; encoded, so that a NaN equals itself."""
    encoded = {stage: encode(value) for stage, value in by_stage.items()}
    first = next(iter(encoded), 0)
    other = next((stage for stage in encoded if encoded[stage] != encoded[first]), None)
    if other is not None:
        raise StageFormatError(
            f"the stages of this checkpoint cannot be cut anew: stages {first} and {other} differ in "
            f"{_REASONS[what]}"
        )
