"""Pace of a running job, as it is measured: rate, updates left, and the newest checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ravnest.errors import StageFormatError
from ravnest.schemas.providers import Assignment
from ravnest.server.checkpoint_check import DataPosition, read_position
from ravnest.server.complete_checkpoints import CompleteCheckpoint, complete_checkpoints
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import AssignmentRecord, JobRecord
from ravnest.server.db.telemetry import StoredCheckpoint
from ravnest.server.job_status import roots

_WINDOW = 900.0
"""Seconds of the past over which the rate is measured."""
_LEAST_SPAN = 30.0
"""Seconds between two checkpoints from which a rate is computed: reports arrive late by seconds."""
_MOST_POSITIONS = 1000
"""Manifests whose position is remembered."""


@dataclass(frozen=True)
class ClusterPace:
    """Pace of one cluster."""

    cluster: int
    updates_per_second: float
    updates_left: int
    epoch_left: int
    """Updates until the end of the epoch."""
    updates: int
    """Updates of the whole training."""
    checkpoints: tuple[tuple[CompleteCheckpoint, DataPosition], ...]
    """Complete checkpoints at the server under the present plan, newest first."""

    @property
    def seconds_left(self) -> float:
        """Time until the end of training."""
        return self.updates_left / self.updates_per_second

    @property
    def epoch_seconds_left(self) -> float:
        """Time until the end of the epoch."""
        return self.epoch_left / self.updates_per_second


class PaceReader:
    """Reads the pace of jobs from the database and from the manifests of their checkpoints."""

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        """``path_of`` returns the file of an artifact."""
        self._path_of = path_of
        self._positions: dict[str, DataPosition | None] = {}
        """Positions by the digest of a manifest, the newest ones."""

    def read(
        self, db: Transaction, job: JobRecord, assignments: Sequence[AssignmentRecord], now: float
    ) -> list[ClusterPace] | None:
        """Return the pace of all clusters; None if that of one is not known yet."""
        found = []
        for root in roots(assignments):
            pace = self._cluster(db, job, root, now)
            if pace is None:
                return None
            found.append(pace)
        return found

    def _cluster(
        self, db: Transaction, job: JobRecord, root: AssignmentRecord, now: float
    ) -> ClusterPace | None:
        rate = _rate(db.telemetry.checkpoint_times(root.id), now)
        checkpoints = self._checkpoints(db, root)
        if rate is None or not checkpoints:
            return None
        newest, position = checkpoints[0]
        body = db.assignments.body(root.id)
        last = db.telemetry.last_loss(root.id)
        since = 0 if last is None else max(last.update + 1 - newest.id.update, 0)
        per_epoch = _updates_per_epoch(body)
        done = (
            position.epoch * per_epoch + -(-position.batches // body.training.update_frequency) + since
        )
        total = job.epochs * per_epoch
        left = max(total - done, 0)
        epoch_left = (left - 1) % per_epoch + 1 if left else 0
        return ClusterPace(root.cluster, rate, left, epoch_left, total, checkpoints)

    def _checkpoints(
        self, db: Transaction, root: AssignmentRecord
    ) -> tuple[tuple[CompleteCheckpoint, DataPosition], ...]:
        complete = [
            each
            for each in complete_checkpoints(db.checkpoints.of_job(root.job))
            if (each.attempt, each.cluster) == (root.attempt, root.cluster)
        ]
        positions = [(each, self._position(each.stages[0].manifest.sha256)) for each in complete]
        return tuple((each, position) for each, position in positions if position is not None)

    def _position(self, digest: str) -> DataPosition | None:
        if digest not in self._positions:
            while len(self._positions) >= _MOST_POSITIONS:
                del self._positions[next(iter(self._positions))]
            try:
                self._positions[digest] = read_position(self._path_of(digest))
            except (StageFormatError, OSError):
                self._positions[digest] = None
        return self._positions[digest]


def _updates_per_epoch(body: Assignment) -> int:
    return max(body.training.updates_per_epoch(body.train.samples), 1)


def _rate(taken: Sequence[StoredCheckpoint], now: float) -> float | None:
    """Return the updates per second between the checkpoints of the last minutes."""
    window = [each for each in taken if each.time > now - _WINDOW]
    if len(window) < 2:  # checkpoints of large models are rare
        window = list(taken[-2:])
    if len(window) < 2:
        return None
    seconds, updates = window[-1].time - window[0].time, window[-1].update - window[0].update
    return updates / seconds if seconds >= _LEAST_SPAN and updates > 0 else None
