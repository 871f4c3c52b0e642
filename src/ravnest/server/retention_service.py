"""Retention of files: uploads and results that no job needs are deleted by age and by total size.

Files of jobs that have not ended, and of ended jobs that can be resumed, are never deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from ravnest.schemas.jobs import JobState
from ravnest.server.artifacts import ArtifactFolder, StoredFile
from ravnest.server.assignments import needed_files
from ravnest.server.db.database import Transaction
from ravnest.server.settings import ServerSettings
from ravnest.server.unit_of_work import UnitOfWorkFactory

_AT_ONCE = 50
"""Files that are deleted in one transaction."""
_JOB = "job-"
"""Prefix of the ids of jobs and assignments, by which their grants differ from those of members."""
_T = TypeVar("_T")


def expired(
    files: Sequence[StoredFile],
    needed: Collection[str],
    now: float,
    *,
    kept: float,
    most: int,
    least_age: float,
) -> list[StoredFile]:
    """Return the files to delete, oldest first.

    ``kept``: age from which a file that is not needed is deleted. ``most``: bytes of all files, beyond
    which those that are not needed are deleted from an age of ``least_age`` on.
    """
    total = sum(file.size for file in files)
    found = []
    for file in sorted(files, key=lambda file: (file.modified, file.sha256)):
        age = now - file.modified
        if file.sha256 not in needed and (age > kept or (total > most and age > least_age)):
            found.append(file)
            total -= file.size
    return found


class RetentionService:
    """Deletes files that nobody needs; thread-safe."""

    def __init__(
        self, units: UnitOfWorkFactory, artifacts: ArtifactFolder, settings: ServerSettings
    ) -> None:
        self._units = units
        self._artifacts = artifacts
        self._settings = settings
        self._files: dict[str, frozenset[str]] = {}
        """Files of jobs that have not ended or can be resumed; a specification does not change."""

    def run_once(self) -> None:
        """Delete old incomplete uploads, files without an owner, and expired files of members."""
        now, settings = self._units.clock.wall(), self._settings
        self._artifacts.sweep_partial(now - settings.kept_uploads)
        with self._units.db.read() as db:
            granted, needed = db.artifact_grants.all(), self._needed(db)
            ended = _parts_of_results(db, now - settings.files_kept)
        files = [
            replace(file, modified=max(file.modified, ended.get(file.sha256, 0.0)))
            for file in self._artifacts.stored()
        ]
        self._delete_orphans([file.sha256 for file in files if file.sha256 not in granted])
        old = expired(
            [file for file in files if file.sha256 in granted],
            needed,
            now,
            kept=settings.files_kept,
            most=settings.stored_bytes,
            least_age=settings.files_kept_at_least,
        )
        deleted = [file for part in _batches(old) for file in self._delete(part)]
        if deleted:
            size = sum(file.size for file in deleted)
            what = f"{len(deleted)} files of members that no job needs were deleted: {size / 1e9:.1f} GB"
            with self._units.begin() as uow:
                uow.db.events.add("server", "server", what)

    def _delete_orphans(self, digests: Sequence[str]) -> None:
        """Delete files that nobody may read; those of a job that is being shipped are younger."""
        least_age = self._settings.planning.ship_seconds + self._settings.unused_files_kept
        for part in _batches(digests):
            # In a transaction that writes: nobody is granted the file meanwhile.
            with self._units.db.write(self._units.clock.wall()) as db:
                for digest in part:
                    if not db.artifact_grants.is_granted(digest):
                        self._artifacts.remove(digest, least_age)

    def _delete(self, files: Sequence[StoredFile]) -> list[StoredFile]:
        """Delete expired files, unless somebody has begun to use them; return those deleted."""
        deleted = []
        with self._units.db.write(self._units.clock.wall()) as db:
            needed = self._needed(db)
            for file in files:
                owners = db.artifact_grants.owners(file.sha256)
                if file.sha256 in needed or any(owner.startswith(_JOB) for owner in owners):
                    continue
                for owner in owners:
                    db.artifact_grants.revoke_files(owner, [file.sha256])
                deleted.append(file)
        for file in deleted:
            self._delete_orphan(file.sha256)
        return deleted

    def _needed(self, db: Transaction) -> set[str]:
        """Return the files of jobs that have not ended or can be resumed."""
        unfinished = db.jobs.in_state(*(state for state in JobState if not state.is_final))
        jobs = {job.id for job in unfinished} | set(db.checkpoints.jobs())
        self._files = {
            job: self._files.get(job) or frozenset(f.sha256 for f in needed_files(db.jobs.spec(job)))
            for job in jobs
        }
        return {digest for files in self._files.values() for digest in files}

    def _delete_orphan(self, digest: str) -> None:
        with self._units.db.write(self._units.clock.wall()) as db:
            if not db.artifact_grants.is_granted(digest):
                self._artifacts.remove(digest, 0.0)


def _parts_of_results(db: Transaction, since: float) -> dict[str, float]:
    """Return files that results of jobs refer to, and when the newest of these jobs ended.

    They age as the results do: frozen weights are not part of a result.
    """
    found: dict[str, float] = {}
    for job in db.jobs.in_state(JobState.DONE):
        if job.changed >= since:
            spec = db.jobs.spec(job.id)
            for file in (spec.model.weights, *([spec.adapter] if spec.adapter else [])):
                found[file.sha256] = max(found.get(file.sha256, 0.0), job.changed)
    return found


def _batches(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), _AT_ONCE):
        yield items[start : start + _AT_ONCE]
