"""Weights of a job that is not done: the newest checkpoints of its clusters at the server."""

from __future__ import annotations

from ravnest.schemas.base import Artifact, Schema


class StageCheckpointFiles(Schema):
    """Files of one stage's checkpoint."""

    tensors: Artifact
    manifest: Artifact


class ClusterCheckpoint(Schema):
    """Newest complete checkpoint of a cluster."""

    cluster: int
    averaged: bool
    """Part of the mean: the cluster took part in the last averaging round, or there was none."""
    stages: tuple[StageCheckpointFiles, ...]
    """By stage."""


class PartialResult(Schema):
    """Checkpoints from which a requester makes the ``state_dict`` of a job that is not done."""

    job: str
    update: int
    """Updates of the newest of the checkpoints."""
    age: float
    """Seconds since the server got it."""
    epochs: int
    """Epochs that the job asks for."""
    robust: bool
    """The mean of three or more clusters is a trimmed one."""
    clusters: tuple[ClusterCheckpoint, ...]
    """The first one has the newest checkpoint."""
    units: Artifact
    """The model's graph, which says how its tensors are called."""
    weights: Artifact
    """All weights before training: checkpoints lack those that are frozen."""
    adapter: Artifact | None = None
    """Description of the adapter that the job trains; see ``JobSpec.adapter``."""
