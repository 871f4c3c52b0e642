"""Complete checkpoints of a job: those that all stages of a cluster have uploaded. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ravnest.server.db.records import StageCheckpointRecord
from ravnest.types import CheckpointId

KEPT_COMPLETE = 2
"""Complete checkpoints kept of each cluster: if the newest is damaged, the other one is used."""
KEPT_PARTS = 4
"""Newest checkpoints that are kept of each stage until the other stages have uploaded theirs."""


@dataclass(frozen=True)
class CompleteCheckpoint:
    """Uploaded checkpoints of all stages of a cluster, taken at the same point of one run."""

    stages: tuple[StageCheckpointRecord, ...]
    """By stage."""

    @property
    def id(self) -> CheckpointId:
        """Position in the run."""
        return self.stages[0].id

    @property
    def cluster(self) -> int:
        """Cluster of the stages."""
        return self.stages[0].cluster

    @property
    def attempt(self) -> int:
        """Number of plans of the job before this one."""
        return self.stages[0].attempt

    @property
    def time(self) -> float:
        """Time at which it was complete."""
        return max(each.time for each in self.stages)


_Cut = tuple[int, int, str, str, str, CheckpointId]


def complete_checkpoints(uploaded: Iterable[StageCheckpointRecord]) -> list[CompleteCheckpoint]:
    """Return the complete checkpoints of a job, newest plan and update first."""
    cuts: dict[_Cut, dict[int, StageCheckpointRecord]] = {}
    for each in uploaded:
        cut = (each.attempt, each.cluster, each.plan, each.run, each.taken, each.id)
        cuts.setdefault(cut, {})[each.stage] = each
    found = [
        CompleteCheckpoint(tuple(stages[number] for number in sorted(stages)))
        for stages in cuts.values()
        if set(stages) == set(range(next(iter(stages.values())).stages))
    ]
    return sorted(found, key=lambda each: (-each.attempt, -each.id.update, -each.id.phase, each.cluster))


def newest_by_cluster(complete: Sequence[CompleteCheckpoint]) -> Mapping[int, CompleteCheckpoint]:
    """Return the newest complete checkpoint of each cluster of the newest plan that has one."""
    found: dict[int, CompleteCheckpoint] = {}
    for each in complete:
        if each.attempt == complete[0].attempt:
            found.setdefault(each.cluster, each)
    return found


def superseded(
    uploaded: Sequence[StageCheckpointRecord], kept: int = KEPT_COMPLETE
) -> list[StageCheckpointRecord]:
    """Return the checkpoints that are not needed any more.

    The newest complete ones of each cluster are kept, and newer parts, of which the other stages may
    follow.
    """
    complete = complete_checkpoints(uploaded)
    base = complete[0].attempt if complete else -1
    keep: set[StageCheckpointRecord] = set()
    newest: dict[int, CheckpointId] = {}
    counts: dict[int, int] = {}
    for each in complete:
        if each.attempt == base and counts.get(each.cluster, 0) < kept:
            counts[each.cluster] = counts.get(each.cluster, 0) + 1
            newest.setdefault(each.cluster, each.id)
            keep.update(each.stages)
    parts: dict[tuple[int, int, int], int] = {}
    for part in sorted(uploaded, key=lambda each: each.id, reverse=True):
        place = (part.attempt, part.cluster, part.stage)
        later = part.attempt > base or (
            part.attempt == base and (part.cluster not in newest or part.id > newest[part.cluster])
        )
        if part not in keep and later and parts.get(place, 0) < KEPT_PARTS:
            parts[place] = parts.get(place, 0) + 1
            keep.add(part)
    return [each for each in uploaded if each not in keep]
