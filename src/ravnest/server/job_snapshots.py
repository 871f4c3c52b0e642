"""Running jobs as heartbeats need them, read once for as long as they do not change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ravnest.schemas.checkpoints import UploadedCheckpoint
from ravnest.schemas.providers import ExcludedNode
from ravnest.server.complete_checkpoints import CompleteCheckpoint, complete_checkpoints
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import EXCLUDED, AssignmentRecord, StageCheckpointRecord
from ravnest.server.job_status import holders, may_train
from ravnest.server.versioned_cache import VersionedCache

_MOST = 1000
"""Jobs that are kept."""


@dataclass(frozen=True)
class JobSnapshot:
    """Assignments of a job's plan and its uploaded checkpoints, at one time."""

    assignments: tuple[AssignmentRecord, ...]
    """In the order of the database. Their numbers of records and losses may be old ones."""
    checkpoints: tuple[StageCheckpointRecord, ...]

    @cached_property
    def ids(self) -> frozenset[str]:
        """Ids of the assignments."""
        return frozenset(each.id for each in self.assignments)

    @cached_property
    def holders(self) -> tuple[AssignmentRecord, ...]:
        """Assignment that stands for each node."""
        return tuple(holders(self.assignments))

    @cached_property
    def starts(self) -> frozenset[str]:
        """Assignments whose workers start."""
        return frozenset(may_train(self.assignments))

    @cached_property
    def excluded(self) -> tuple[ExcludedNode, ...]:
        """Machines that may not take part any more."""
        excluded = [each for each in self.assignments if each.cause in EXCLUDED]
        return tuple(ExcludedNode(node=each.node, generation=each.generation) for each in excluded)

    @cached_property
    def uploaded(self) -> frozenset[tuple[object, ...]]:
        """Names of the checkpoints."""
        return frozenset(checkpoint_name(each) for each in self.checkpoints)

    def newest_checkpoint(self, attempt: int, cluster: int) -> CompleteCheckpoint | None:
        """Return the newest complete checkpoint of a cluster of a plan."""
        return self._newest.get((attempt, cluster))

    @cached_property
    def _newest(self) -> dict[tuple[int, int], CompleteCheckpoint]:
        found: dict[tuple[int, int], CompleteCheckpoint] = {}
        for each in complete_checkpoints(self.checkpoints):  # newest first
            found.setdefault((each.attempt, each.cluster), each)
        return found


def checkpoint_name(each: StageCheckpointRecord | UploadedCheckpoint) -> tuple[object, ...]:
    """Return what tells the checkpoints of a job apart."""
    return each.plan, each.run, each.taken, each.id, each.cluster, each.stage


class JobSnapshots:
    """Snapshots of jobs; the database forgets those of jobs that a transaction has changed."""

    def __init__(self) -> None:
        self._cache: VersionedCache[JobSnapshot] = VersionedCache(_MOST)

    @property
    def changes(self) -> int:
        """Number of changes so far; read it before the transaction that is passed to ``read``."""
        return self._cache.changes

    def forget(self, jobs: Iterable[str]) -> None:
        """Forget jobs that were changed."""
        self._cache.forget(jobs)

    def read(self, db: Transaction, assignment: AssignmentRecord, changes: int) -> JobSnapshot:
        """Return the job of an assignment."""
        found = self._cache.get(assignment.job)
        if found is None or assignment.id not in found.ids:
            found = JobSnapshot(
                tuple(db.assignments.of_job(assignment.job)),
                tuple(db.checkpoints.of_job(assignment.job)),
            )
            self._cache.put(assignment.job, found, changes)
        return found
