"""Orders of the server to upload checkpoints: the current one, and what was uploaded. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ravnest.schemas.checkpoints import MOST_UPLOADED, CheckpointOrder, UploadedCheckpoint
from ravnest.telemetry import CheckpointRecord, WorkerRecord


class CheckpointOrders:
    """Uploads of one assignment, one at a time."""

    def __init__(self) -> None:
        self._wanted: CheckpointOrder | None = None
        self._running: CheckpointOrder | None = None
        self._is_due = False
        """The wanted order may be carried out now; otherwise it waits for a checkpoint."""
        self.done: CheckpointOrder | None = None
        """Last order that was carried out."""
        self.uploaded: tuple[UploadedCheckpoint, ...] = ()
        """Newest checkpoints that were uploaded."""

    @property
    def wanted(self) -> CheckpointOrder | None:
        """The order of the server's last reply."""
        return self._wanted

    def want(self, order: CheckpointOrder | None) -> None:
        """Take the order of a reply; an unfinished one is tried again with each reply."""
        self._wanted, self._is_due = order, True

    def note(self, records: Iterable[WorkerRecord]) -> None:
        """Take records of the worker: a checkpoint may be the one that the server wants."""
        self._is_due |= any(isinstance(record, CheckpointRecord) for record in records)

    @property
    def is_done(self) -> bool:
        """True if the order of the server's last reply was carried out."""
        return self._wanted is not None and self._wanted == self.done

    def repeat(self) -> None:
        """Have the wanted order carried out again: there is a newer checkpoint."""
        self.done, self._is_due = None, True

    def begin(self) -> CheckpointOrder | None:
        """Return the order to carry out now, if there is one; ``end`` follows."""
        if self._running is not None or not self._is_due or self._wanted in (None, self.done):
            return None
        self._running, self._is_due = self._wanted, False
        return self._running

    def end(
        self, order: CheckpointOrder, uploaded: tuple[UploadedCheckpoint, ...], *, is_done: bool
    ) -> None:
        """Store the result of an upload."""
        self._running = None
        if is_done:
            self.done = order
        known = {
            (each.stage, each.run, each.taken, each.id): each for each in (*self.uploaded, *uploaded)
        }
        self.uploaded = tuple(known.values())[-MOST_UPLOADED:]
