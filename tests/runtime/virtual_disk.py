"""Disks of virtual nodes, with the rules of the real ones about what is kept and removed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ravnest.store.checkpoint import surplus
from ravnest.types import BEGINNING, CheckpointId
from ravnest.wire.messages import HeldCheckpoint, ResumeFrom


class Applied(NamedTuple):
    """A micro-batch of an update, by its data: the same in each attempt."""

    phase: int
    batch: int
    part: int
    parts: int


class StageContent(NamedTuple):
    """What a stage has learned."""

    updates: tuple[tuple[Applied, ...], ...] = ()
    """Micro-batches of each update."""
    lineage: tuple[str, ...] = ()
    """Attempt in which each update was made: stages that differ do not fit together."""
    epochs: tuple[int, ...] = ()
    """Phases after which the scheduler was stepped."""
    validations: tuple[int, ...] = ()
    """Phases whose validation result has arrived."""


class Position(NamedTuple):
    """Position of the Root's data within the next phase."""

    batches: int
    microbatches: int


class Stored(NamedTuple):
    """A checkpoint of a stage."""

    run: str
    attempt: str
    id: CheckpointId
    content: StageContent
    position: Position


Folder = dict[CheckpointId, Stored]


@dataclass
class VirtualDisk:
    """Checkpoints of a node's own stage, and replicas of its neighbours' by stage."""

    own: Folder = field(default_factory=dict)
    replicas: dict[int, Folder] = field(default_factory=dict)

    def folder(self, stage: int | None) -> Folder:
        """Return a folder: the node's own, or that of another stage's replicas."""
        return self.own if stage is None else self.replicas.setdefault(stage, {})

    def add(self, stage: int | None, stored: Stored, complete: CheckpointId | None) -> None:
        """Add a checkpoint and remove older ones, as ``CheckpointFolder.add`` does."""
        folder = self.folder(stage)
        folder[stored.id] = stored
        for old in surplus(list(folder), {stored.id, complete}):
            del folder[old]

    def held(self, own: int) -> dict[int, tuple[HeldCheckpoint, ...]]:
        """Return what the node offers."""
        return {
            stage: tuple(
                HeldCheckpoint(each.run, each.id, own, each.attempt) for each in folder.values()
            )
            for stage, folder in [(own, self.own), *self.replicas.items()]
        }

    def begin_attempt(self, decision: ResumeFrom) -> None:
        """Set all checkpoints aside if training begins at the beginning."""
        if decision.checkpoint == BEGINNING:
            for folder in (self.own, *self.replicas.values()):
                folder.clear()

    def drop_later(self, decision: ResumeFrom) -> None:
        """Remove what is not part of the history that training continues."""
        for folder in (self.own, *self.replicas.values()):
            for each in list(folder.values()):
                same = each.id == decision.checkpoint and each.attempt == decision.taken
                if each.run != decision.run or not (same or each.id < decision.checkpoint):
                    del folder[each.id]
