"""State that a cluster continues from after a takeover: its nodes' disks, or the server. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.schemas.checkpoints import SeedCheckpoint
from ravnest.server.complete_checkpoints import CompleteCheckpoint

_MINUTE = 60.0


@dataclass(frozen=True)
class TakeoverState:
    """Situation of a cluster whose vacant places are filled."""

    stages: int
    keeping: frozenset[int]
    """Stages of the nodes that keep their disks: those that are there, and those that return."""
    is_held: bool = False
    """A node that is there keeps its disk."""
    is_unseeded: bool = False
    """A node that is there was not shipped with ``saved``."""
    common: int = 0
    """Updates of the newest checkpoint that all nodes have reported; 0: there is none."""
    saved: CompleteCheckpoint | None = None
    """Newest complete checkpoint of the cluster at the server, of the same plan."""
    age: float = 0.0
    """Seconds since it was complete."""
    shipped: SeedCheckpoint | None = None
    """Checkpoint that the plan began with."""

    @property
    def is_complete(self) -> bool:
        """Return whether the nodes have the newest state of all stages, themselves or as replicas."""
        return all({stage, replica_stage(stage)} & self.keeping for stage in range(self.stages))

    @property
    def begins_again(self) -> bool:
        """Return whether the nodes that are there must load the checkpoint at the server, too.

        They may have newer ones, but nobody has those of the lost stages.
        """
        return self.is_unseeded and not self.is_complete and self.saved is not None

    def seed(self, stage: int) -> SeedCheckpoint | None:
        """Return the checkpoint at the server for a stage; None if it is not there, or not needed.

        Nodes that have the state of all stages have a newer one.
        """
        if self.saved is None or (self.is_held and self.is_complete):
            return None
        part, name = self.saved.stages[stage], self.saved.id
        return SeedCheckpoint(
            update=name.update, phase=name.phase, tensors=part.tensors, manifest=part.manifest
        )

    def __str__(self) -> str:
        if self.is_complete and self.common:
            return f"training continues from update {self.common}"
        if self.saved is not None:
            update = self.saved.id.update
            return (
                f"training continues from update {update}, the newest checkpoint at the server "
                f"({_duration(self.age)} old)"
            )
        if self.shipped is not None:
            return f"training continues from update {self.shipped.update}, with which this plan began"
        return "training continues from the start"


def replica_stage(stage: int) -> int:
    """Return the stage whose node has the replica of a stage."""
    return stage - 1 if stage else 1


def _duration(seconds: float) -> str:
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / _MINUTE:.0f} minutes"
