"""Uploads of the best model of a cluster, while its Root trains. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ravnest.schemas.jobs import BestFiles
from ravnest.telemetry import BestRecord, WorkerRecord


class BestUploads:
    """Uploads of one assignment, one at a time; a model that is replaced meanwhile is left out."""

    def __init__(self) -> None:
        self._is_due = False
        self._is_running = False
        self._has_failed = False
        """The last upload is tried again after the next reply of the server."""
        self.done: BestFiles | None = None
        """Last model that was uploaded."""

    def note(self, records: Iterable[WorkerRecord]) -> None:
        """Take records of the worker: there may be a new best model."""
        self._is_due |= any(isinstance(record, BestRecord) for record in records)

    def retry(self) -> None:
        """Try a failed upload again: the server answers."""
        self._is_due |= self._has_failed
        self._has_failed = False

    def begin(self) -> bool:
        """Return whether to upload the best model now; ``end`` follows."""
        if self._is_running or not self._is_due:
            return False
        self._is_running, self._is_due = True, False
        return True

    def end(self, uploaded: BestFiles | None, *, again: bool = False) -> None:
        """Store the result of an upload; ``again``: it failed for a reason that passes."""
        self._is_running = False
        self._has_failed = again
        self.done = uploaded or self.done
