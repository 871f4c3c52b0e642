"""Activity of clusters, as their workers report it: progress, and nodes that wait for a lost one.

In memory only; the phases of workers are read from the database after a restart.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from ravnest.server.db.records import AssignmentRecord
from ravnest.telemetry import (
    LossRecord,
    PhaseRecord,
    QueueRecord,
    TimingRecord,
    ValidationRecord,
    WorkerRecord,
)

_PROGRESS = LossRecord | QueueRecord | TimingRecord | ValidationRecord
"""Records that a node reports only when the whole pipeline advances."""


class ClusterActivity:
    """Last progress of each assignment, and the assignments that wait for a lost node. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._progress: dict[str, float] = {}
        """Time of the last progress of each assignment (steady clock)."""
        self._rejoining: dict[str, tuple[str, int]] = {}
        """Job and cluster of the assignments whose workers wait for a lost node."""

    def note(self, assignment: AssignmentRecord, new: Sequence[WorkerRecord], now: float) -> bool:
        """Take the new records of an assignment; return whether it began to wait for a lost node."""
        # A worker that waits for a lost node connects again meanwhile, and says so.
        phases = [
            each.phase for each in new if isinstance(each, PhaseRecord) and each.phase != "connect"
        ]
        with self._lock:
            if any(isinstance(record, _PROGRESS) for record in new):
                self._progress[assignment.id] = now
            if phases and phases[-1] == "rejoin":
                self._rejoining[assignment.id] = (assignment.job, assignment.cluster)
                return True
            if phases:
                self._rejoining.pop(assignment.id, None)
            return False

    def forget(self, assignment: str) -> None:
        """Forget an assignment that has ended."""
        with self._lock:
            self._progress.pop(assignment, None)
            self._rejoining.pop(assignment, None)

    def last_progress(self, assignments: Iterable[str], default: float) -> float:
        """Return the time of the last progress of any of these assignments."""
        with self._lock:
            return max((self._progress.get(each, default) for each in assignments), default=default)

    @property
    def waiting_jobs(self) -> set[str]:
        """Jobs with a cluster that waits for a lost node."""
        with self._lock:
            return {job for job, _ in self._rejoining.values()}

    def is_missed(self, assignment: AssignmentRecord) -> bool:
        """Return whether other nodes of its cluster wait for a lost node, and it does not."""
        with self._lock:
            waiting = (assignment.job, assignment.cluster) in self._rejoining.values()
            return waiting and assignment.id not in self._rejoining
