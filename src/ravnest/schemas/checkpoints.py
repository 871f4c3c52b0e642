"""Checkpoints that providers upload, and that assignments start from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ravnest.schemas.base import LARGEST_NUMBER, Artifact, Schema
from ravnest.types import CheckpointId

Number = Annotated[int, Field(ge=0, lt=LARGEST_NUMBER)]
MOST_UPLOADED = 8
"""Checkpoints that a report names: the newest ones of the own stage and of both neighbours."""


class CheckpointOrder(Schema):
    """Request of the server to upload checkpoints.

    Nodes of a cluster must upload checkpoints of the same update, so the server names an update that
    none of them has reached yet.
    """

    at_least: Number = 0
    """Upload the first checkpoint of the own stage with at least this many updates."""
    phases: Number = 0
    """The same for the phases that are over in it: the first one after the end of a phase is meant."""
    rescue: bool = False
    """Upload all checkpoints that are there instead, because the cluster has lost nodes."""
    stages: Annotated[tuple[Number, ...], Field(max_length=2)] = ()
    """Lost stages, whose replicas are uploaded too if this node has them."""


class UploadedCheckpoint(Schema):
    """Checkpoint of one stage whose files the provider has uploaded."""

    run: Annotated[str, Field(min_length=1, max_length=100)]
    taken: Annotated[str, Field(max_length=100)] = ""
    """Attempt of the run in which it was taken; after a loss, updates are made again."""
    update: Number
    """Updates that it contains."""
    phase: Number
    """Phases that are over in it."""
    stage: Number
    cluster: Number
    plan: Annotated[str, Field(max_length=100)]
    """Digest of the plan."""
    tensors: Artifact
    manifest: Artifact

    @property
    def id(self) -> CheckpointId:
        """Position in the run."""
        return CheckpointId(self.update, self.phase)


class SeedCheckpoint(Schema):
    """Checkpoint that a node starts from, made from the checkpoints of another plan."""

    update: Number
    phase: Number
    tensors: Artifact
    manifest: Artifact

    @property
    def id(self) -> CheckpointId:
        """Position in the run."""
        return CheckpointId(self.update, self.phase)
