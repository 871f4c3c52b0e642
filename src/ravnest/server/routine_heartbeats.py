"""Routine heartbeats: those that only say that a provider lives, or that only add records.

Nearly all heartbeats are such ones. Many of them are stored in one transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ravnest.schemas.providers import Heartbeat, HeartbeatReply, ProviderState
from ravnest.server.checkpoint_service import CheckpointService
from ravnest.server.db.records import AssignmentRecord, ProviderPresence
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
                return self._answer(UnitOfWork(db), heartbeats, changes)
        with self._units.begin() as uow:
            return self._answer(uow, heartbeats, changes)

    def _answer(
        self, uow: UnitOfWork, heartbeats: Sequence[tuple[str, Heartbeat]], changes: int
    ) -> list[HeartbeatReply | None]:
        replies: list[HeartbeatReply | None] = [None] * len(heartbeats)
        for numbers in _rounds([provider for provider, _ in heartbeats]):
            chosen = {heartbeats[number][0]: heartbeats[number][1] for number in numbers}
            found = self._answer_each_once(uow, chosen, changes)
            for number in numbers:
                replies[number] = found.get(heartbeats[number][0])
        return replies

    def _answer_each_once(
        self, uow: UnitOfWork, heartbeats: Mapping[str, Heartbeat], changes: int
    ) -> dict[str, HeartbeatReply]:
        """Return the replies to routine heartbeats, by provider."""
        names = list(heartbeats)
        present, current = uow.db.providers.presences(names), uow.db.assignments.all_current(names)
        routine = [
            name
            for name, heartbeat in heartbeats.items()
            if self._is_routine(uow, heartbeat, present.get(name), current.get(name), changes)
        ]
        reports = [
            (current[name], report)
            for name in routine
            if (report := heartbeats[name].report) is not None
        ]
        current |= {each.provider: each for each in self._reports.store_records(uow, reports)}
        left = uow.db.assignments.left_by(names)
        for name in routine:
            self._see(name)
        return {
            name: self._replies.compose(uow.db, present[name], current.get(name), changes, left)
            for name in routine
        }

    def _is_routine(
        self,
        uow: UnitOfWork,
        heartbeat: Heartbeat,
        provider: ProviderPresence | None,
        assignment: AssignmentRecord | None,
        changes: int,
    ) -> bool:
        if provider is None or provider.left or provider.state is ProviderState.LOST:
            return False
        if heartbeat.leaving or provider.id in self._replies.leaving:
            return False
        report = heartbeat.report
        if report is None:
            return True
        if assignment is None or assignment.id != report.assignment:
            return False
        job = self._replies.snapshots.read(uow.db, assignment, changes)
        if not self._checkpoints.knows(report, job):
            return False
        return self._reports.adds_records_only(uow, assignment, report)


def _rounds(providers: Sequence[str]) -> list[list[int]]:
    """Return the positions of the first heartbeat of each provider, of the second ones, and so on.

    What the first one stores is known when the second one is processed.
    """
    found: list[list[int]] = []
    seen: Counter[str] = Counter()
    for number, provider in enumerate(providers):
        if seen[provider] == len(found):
            found.append([])
        found[seen[provider]].append(number)
        seen[provider] += 1
    return found
