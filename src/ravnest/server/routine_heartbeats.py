"""Routine heartbeats: those that only say that a provider lives, or that only add records.

Nearly all heartbeats are such ones. Many of them are stored in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ravnest.schemas.providers import Heartbeat, HeartbeatReply, ProviderState
from ravnest.server.checkpoint_service import CheckpointService
from ravnest.server.heartbeat_replies import HeartbeatReplies
from ravnest.server.report_service import ReportService
from ravnest.server.unit_of_work import UnitOfWork, UnitOfWorkFactory


class RoutineHeartbeats:
    """Answers heartbeats that change no state; thread-safe."""

    def __init__(
        self,
        units: UnitOfWorkFactory,
        reports: ReportService,
        checkpoints: CheckpointService,
        replies: HeartbeatReplies,
        see: Callable[[str], None],
    ) -> None:
        """``see`` is called for each provider with a routine heartbeat."""
        self._units = units
        self._reports = reports
        self._checkpoints = checkpoints
        self._replies = replies
        self._see = see

    def answer(self, heartbeats: Sequence[tuple[str, Heartbeat]]) -> list[HeartbeatReply | None]:
        """Process heartbeats of providers in one transaction; return their replies.

        Those that are not routine have no effect and no reply here.
        """
        changes = self._replies.snapshots.changes
        if all(heartbeat.report is None for _, heartbeat in heartbeats):
            with self._units.db.read() as db:  # nothing is stored, so that they wait for nobody
                return [self._answer(UnitOfWork(db), *each, changes) for each in heartbeats]
        with self._units.begin() as uow:
            return [self._answer(uow, *each, changes) for each in heartbeats]

    def _answer(
        self, uow: UnitOfWork, provider: str, heartbeat: Heartbeat, changes: int
    ) -> HeartbeatReply | None:
        if heartbeat.leaving or provider in self._replies.leaving:
            return None
        found = uow.db.providers.presence(provider)
        if found is None or found.left or found.state is ProviderState.LOST:
            return None
        assignment, report = uow.db.assignments.current(provider), heartbeat.report
        if report is not None:
            if assignment is None or assignment.id != report.assignment:
                return None
            job = self._replies.snapshots.read(uow.db, assignment, changes)
            if not self._checkpoints.knows(report, job):
                return None
            assignment = self._reports.store_records(uow, assignment, report)
            if assignment is None:
                return None
        self._see(provider)
        return self._replies.compose(uow.db, found, assignment, changes)
