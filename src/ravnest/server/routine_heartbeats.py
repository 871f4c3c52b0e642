"""Routine heartbeats: those that only say that a provider lives, or that only add records.

Nearly all heartbeats are such ones. Many of them are stored in one transaction. So are those of
providers that begin to fetch or to train: when a job starts, all of its providers do within seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ravnest.schemas.providers import Heartbeat, HeartbeatReply, ProviderState
from ravnest.server.checkpoint_service import CheckpointService
from ravnest.server.db.records import AssignmentRecord, ProviderPresence
from ravnest.server.heartbeat_replies import HeartbeatReplies
from ravnest.server.job_status import lineage
from ravnest.server.report_service import ReportService
from ravnest.server.unit_of_work import UnitOfWork, UnitOfWorkFactory


class RoutineHeartbeats:
    """Answers heartbeats that change no state, or only enter a phase; thread-safe."""

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

        Those that are not routine, and enter no phase, have no effect and no reply here.
        """
        changes = self._replies.snapshots.changes
        if all(heartbeat.report is None for _, heartbeat in heartbeats):
            with self._units.db.read() as db:  # nothing is stored, so that they wait for nobody
                return self._answer(UnitOfWork(db), heartbeats, changes)
        with self._units.begin() as uow:
            replies = self._answer(uow, heartbeats, changes)
            begun = self._begin_phases(uow, _unanswered(heartbeats, replies), changes)
        if begun:
            found = self._replies_now([heartbeats[number][0] for number in begun])
            for number in begun:
                replies[number] = found[heartbeats[number][0]]
        return replies

    def _begin_phases(
        self, uow: UnitOfWork, heartbeats: Mapping[str, tuple[int, Heartbeat]], changes: int
    ) -> list[int]:
        """Store the heartbeats that only enter a phase; return their numbers."""
        names = list(heartbeats)
        if not names:
            return []
        present, current = uow.db.providers.presences(names), uow.db.assignments.all_current(names)
        begun, reports = [], []
        for name, (number, heartbeat) in heartbeats.items():
            assignment, report = current.get(name), heartbeat.report
            if not self._may_be_routine(uow, heartbeat, present.get(name), assignment, changes):
                continue
            if assignment is None or report is None or self._is_shared(uow, assignment, changes):
                continue
            if self._reports.begins_phase(uow, assignment, report):
                begun.append(number)
                reports.append((assignment, report))
        if reports:
            self._reports.begin_phases(uow, reports)
        for assignment, _ in reports:
            self._see(assignment.provider)
        return begun

    def _is_shared(self, uow: UnitOfWork, assignment: AssignmentRecord, changes: int) -> bool:
        """Return whether two providers have the node of an assignment, because one of them leaves."""
        chain = lineage(
            self._replies.snapshots.read(uow.db, assignment, changes).assignments, assignment.node
        )
        return any(each.id != assignment.id and not each.has_ended for each in chain)

    def _replies_now(self, names: Sequence[str]) -> dict[str, HeartbeatReply]:
        """Return replies to providers as of now."""
        changes = self._replies.snapshots.changes
        with self._units.db.read() as db:
            present, current = db.providers.presences(names), db.assignments.all_current(names)
            left = db.assignments.left_by(names)
            return {
                name: self._replies.compose(db, present.get(name), current.get(name), changes, left)
                for name in names
            }

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
            if self._may_be_routine(uow, heartbeat, present.get(name), current.get(name), changes)
            and self._adds_records_only(uow, heartbeat, current.get(name))
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

    def _adds_records_only(
        self, uow: UnitOfWork, heartbeat: Heartbeat, assignment: AssignmentRecord | None
    ) -> bool:
        if heartbeat.report is None or assignment is None:
            return heartbeat.report is None
        return self._reports.adds_records_only(uow, assignment, heartbeat.report)

    def _may_be_routine(
        self,
        uow: UnitOfWork,
        heartbeat: Heartbeat,
        provider: ProviderPresence | None,
        assignment: AssignmentRecord | None,
        changes: int,
    ) -> bool:
        """Return whether a heartbeat is one of a present provider about its current assignment."""
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
        return self._checkpoints.knows(report, job)


def _unanswered(
    heartbeats: Sequence[tuple[str, Heartbeat]], replies: Sequence[HeartbeatReply | None]
) -> dict[str, tuple[int, Heartbeat]]:
    """Return the first heartbeat without a reply of each provider, with its number."""
    found: dict[str, tuple[int, Heartbeat]] = {}
    for number, ((provider, heartbeat), reply) in enumerate(zip(heartbeats, replies, strict=True)):
        if reply is None:
            found.setdefault(provider, (number, heartbeat))
    return found


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
