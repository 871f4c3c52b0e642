"""Replies to heartbeats: what a provider should do now."""

from __future__ import annotations

from collections.abc import Sequence

from ravnest.schemas.providers import HeartbeatReply
from ravnest.server.assignments import FETCHING
from ravnest.server.checkpoint_service import CheckpointService
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import LOST, AssignmentRecord, ProviderPresence
from ravnest.server.job_snapshots import JobSnapshots
from ravnest.server.job_status import has_delivered, lineage, roots, vacant
from ravnest.server.link_test_service import LinkTestService
from ravnest.server.takeover_situation import last_upload
from ravnest.server.trace_requests import TraceRequests


class HeartbeatReplies:
    """Composes replies to heartbeats; thread-safe."""

    def __init__(
        self,
        checkpoints: CheckpointService,
        link_tests: LinkTestService,
        snapshots: JobSnapshots,
        traces: TraceRequests,
        leaving: set[str],
    ) -> None:
        self._traces = traces
        self.snapshots = snapshots
        self.leaving = leaving
        """Providers that want to leave; each heartbeat says so."""
        self._checkpoints = checkpoints
        self._link_tests = link_tests

    def compose(
        self,
        db: Transaction,
        provider: ProviderPresence | None,
        assignment: AssignmentRecord | None,
        changes: int,
        left: Sequence[AssignmentRecord],
    ) -> HeartbeatReply:
        """Return the reply for a provider and its current assignment.

        ``changes``: those of the snapshots before the transaction began. ``left``: finished and lost
        assignments of the provider, or also of others, in running jobs.
        """
        if provider is None:
            return HeartbeatReply(assignment=None)
        leaves, keep = provider.id in self.leaving, _kept(db, provider.id, left)
        if assignment is None:
            test = self._link_tests.order_for(provider)
            return HeartbeatReply(
                assignment=None, link_test=test, may_leave=leaves, keep=keep, reason=provider.reason
            )
        job = self.snapshots.read(db, assignment, changes)
        newest = lineage(job.assignments, assignment.node)[0] if leaves else assignment
        may_leave = leaves and (newest.id == assignment.id or newest.has_ended)
        last = None
        if may_leave and assignment.phase == "training":
            last = last_upload(db, job.assignments, assignment, self.leaving)
        return HeartbeatReply(
            assignment=assignment.id,
            may_train=assignment.id in job.starts,
            records_known=assignment.records,
            upload=last or self._checkpoints.order_for(db, assignment, job),
            excluded=job.excluded,
            trace=self._traces.newest(assignment.job),
            may_leave=may_leave,
            keep=keep,
            reason=provider.reason,
        )


def _kept(db: Transaction, provider: str, left_by_all: Sequence[AssignmentRecord]) -> tuple[str, ...]:
    """Return the ended assignments of a provider whose folders it may need again.

    Those of finished nodes are needed until the Root of their cluster has sent the result.
    """
    found = []
    left = [each for each in left_by_all if each.provider == provider]
    for finished in (each for each in left if each.phase == "finished"):
        job = db.assignments.of_job(finished.job)
        delivered = {root.cluster for root in roots(job) if has_delivered(root)}
        if finished in job and finished.cluster not in delivered:
            found.append(finished.id)
    for lost in (each for each in left if each.phase == LOST):
        job = db.assignments.of_job(lost.job)
        newest = lineage(job, lost.node)[0]
        is_own = newest.provider == provider and newest.phase in FETCHING
        if is_own or lost in vacant(job):
            found.append(lost.id)
    return tuple(found)
