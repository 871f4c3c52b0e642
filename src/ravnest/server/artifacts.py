"""Content-addressed files: an artifact is complete and verified, or absent.

Each sender has its own partial file per artifact, so that nobody can complete the upload of another
and get access to a file of which it only knows the digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ravnest.errors import ServerRefusedError
from ravnest.schemas.base import Artifact
from ravnest.server.upload_table import UploadTable
from ravnest.store.files import sha256_of

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK = 4 << 20
_NO_OWNER = "nobody"


@dataclass(frozen=True)
class FileTotals:
    """Size and number of the files of one member, or the limits of both."""

    bytes: int
    files: int


_NO_LIMIT = FileTotals(1 << 62, 1 << 62)


@dataclass(frozen=True)
class StoredFile:
    """A complete artifact on the disk."""

    sha256: str
    size: int
    modified: float
    """Time of its upload, or of its last use, in seconds since 1970."""


class ArtifactFolder:
    """Content-addressed folder; thread-safe."""

    def __init__(
        self,
        path: Path,
        *,
        largest: int = 256 << 30,
        reserve: int = 0,
        quota: FileTotals | None = None,
        complete: Callable[[str], FileTotals] = lambda _: FileTotals(0, 0),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``complete`` returns the size and number of the complete files of an owner."""
        self._path = path
        self._partial = path / "parts"
        self._largest = largest
        self._reserve = reserve
        self._quota = quota or _NO_LIMIT
        self._complete = complete
        self._lock = threading.Lock()
        self._clock = clock
        self._known_uploads: UploadTable | None = None
        self._digests: dict[str, hashlib._Hash] = {}
        """Digests of partial files, so that a long file is not read again when its upload continues."""

    def path(self, sha256: str) -> Path:
        """Return the path of an artifact, whether it exists or not."""
        if not _DIGEST.fullmatch(sha256):
            raise ServerRefusedError("the name of an artifact has 64 hexadecimal digits", 422)
        return self._path / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        """Return whether the artifact exists."""
        return self.path(sha256).is_file()

    def add(self, file: Path) -> Artifact:
        """Move a file into the folder."""
        artifact = Artifact(sha256=sha256_of(file), size=file.stat().st_size)
        self._put(file, artifact.sha256)
        return artifact

    def add_changed(self, sha256: str, owner: str, change: Callable[[Path], None]) -> Artifact:
        """Add a copy of an artifact that ``change`` has changed, as a file of ``owner``.

        Refuse as an upload of that size would be refused.
        """
        source = self.path(sha256)
        size = _size_of(source)
        copy = self._partial_path(secrets.token_hex(32), owner)
        complete = self._complete(owner)
        with self._lock:
            self._check_quota(copy, size, complete)
            self._check_room(copy, size)
            self._uploads.begin(copy.name, copy.suffix, size, self._clock())
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            change(copy)
            return self.add(copy)
        finally:
            copy.unlink(missing_ok=True)
            self._release(copy)

    def received(self, sha256: str, owner: str = _NO_OWNER) -> int:
        """Return the bytes that this owner has sent of an incomplete artifact."""
        return _size_of(self._partial_path(sha256, owner))

    def append(
        self,
        sha256: str,
        size: int,
        offset: int,
        chunks: Iterable[bytes],
        owner: str = _NO_OWNER,
    ) -> bool:
        """Add bytes to a partial file; return whether the artifact is complete now."""
        with self.upload(sha256, size, offset, owner) as upload:
            for chunk in chunks:
                upload.write(chunk)
            return upload.finish()

    def upload(self, sha256: str, size: int, offset: int, owner: str = _NO_OWNER) -> ArtifactUpload:
        """Return a context in which bytes are added to a partial file; ``size`` is that of the whole.

        Raise ``ServerRefusedError`` if the partial file does not have ``offset`` bytes or another
        upload is in progress (409), the artifact or all files of the owner are too large (413), or the
        disk is full (507). The size is reserved while the context is open.
        """
        if size > self._largest:
            raise ServerRefusedError(
                f"an artifact may have {self._largest} bytes at most, not {size}", 413
            )
        partial = self._partial_path(sha256, owner)
        complete = self._complete(owner)
        with self._lock:
            if self._uploads.is_open(partial.name):
                raise ServerRefusedError(
                    "another upload of this artifact is in progress; wait for it", 409
                )
            self._check_quota(partial, size, complete)
            missing = max(size - _size_of(partial), 0)
            self._check_room(partial, missing)
            self._uploads.begin(partial.name, partial.suffix, missing, self._clock())
            self._uploads.declare(partial.name, partial.suffix, size)
        try:
            return ArtifactUpload(self, _Target(sha256, size, partial), offset)
        except BaseException:
            self._release(partial)
            raise

    def remove(self, sha256: str, least_age: float) -> bool:
        """Delete an artifact that nobody needs; return False if it is too new for that.

        An upload is granted shortly after its file is in its place: a new file may be needed soon.
        """
        try:
            if time.time() - self.path(sha256).stat().st_ctime < least_age:
                return False
            self.path(sha256).unlink()
        except FileNotFoundError:
            pass
        return True

    def stored(self) -> list[StoredFile]:
        """Return all complete artifacts."""
        found = []
        for path in self._path.glob("[0-9a-f][0-9a-f]/*"):
            if _DIGEST.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    found.append(StoredFile(path.name, status.st_size, status.st_mtime))
        return found

    def touch(self, sha256: str) -> None:
        """Note that an artifact is in use: the age of its file counts from now on."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.path(sha256))

    def sweep(self, keep: set[str]) -> int:
        """Delete the artifacts that are not in ``keep``; return how many.

        Only call it while nothing else uses the folder.
        """
        unwanted = [path for path in self._path.glob("[0-9a-f][0-9a-f]/*") if path.name not in keep]
        for path in unwanted:
            path.unlink()
        return len(unwanted)

    def sweep_partial(self, begun_before: float) -> int:
        """Delete incomplete uploads that did not continue since then; return how many."""
        count = 0
        for path in list(self._partial.glob("*")):
            with self._lock, contextlib.suppress(FileNotFoundError):
                is_open = self._uploads.is_open(path.name)
                if not is_open and path.stat().st_mtime < begun_before:
                    path.unlink()
                    self._digests.pop(path.name, None)
                    self._uploads.forget(path.name, path.suffix)
                    count += 1
        return count

    @property
    def is_full(self) -> bool:
        """Return whether the disk has less space left than uploads must leave."""
        return self._free() < self._reserve

    def _partial_path(self, sha256: str, owner: str) -> Path:
        self.path(sha256)
        return self._partial / f"{sha256}.{hashlib.sha256(owner.encode()).hexdigest()[:16]}"

    @property
    def _uploads(self) -> UploadTable:
        """Return the incomplete uploads, by the suffix of their owner; the lock is held.

        Those that an earlier process began count with what they have, until they continue.
        """
        if self._known_uploads is None:
            self._known_uploads = UploadTable()
            for path in self._partial.glob("*"):
                self._known_uploads.declare(path.name, path.suffix, _size_of(path))
        return self._known_uploads

    def _check_quota(self, partial: Path, size: int, complete: FileTotals) -> None:
        """Refuse (413) if the files of an owner would be too large or too many with this one."""
        declared, count = self._uploads.declared(partial.suffix, partial.name)
        used = complete.bytes + declared
        if used + size > self._quota.bytes:
            raise ServerRefusedError(
                f"your files take {used / 1e9:.1f} GB of the {self._quota.bytes / 1e9:.1f} GB that a "
                f"member may have here, not enough for another {size / 1e9:.1f} GB; unused ones are "
                "deleted after some time",
                413,
            )
        if complete.files + count >= self._quota.files:
            raise ServerRefusedError(f"a member may have {self._quota.files} files here", 413)

    def _check_room(self, partial: Path, missing: int) -> None:
        """Refuse (507) if the disk has no room for so many more bytes of an owner."""
        free = max(self._free() - self._reserve, 0)
        left = self._uploads.left(partial.suffix, free, self._clock())
        if missing > left:
            raise ServerRefusedError(
                f"the server's disk has {left / 1e9:.1f} GB left for uploads, not enough for "
                f"{missing / 1e9:.1f} GB",
                507,
            )

    def _free(self) -> int:
        self._path.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self._path).free

    def _count(self, partial: Path, received: int) -> None:
        """Note that bytes of an upload are on the disk; refuse (507) if it is full by now."""
        with self._lock:
            self._uploads.count(partial.name, received, self._clock())
        if self.is_full:
            raise ServerRefusedError(
                "the server's disk is full; the upload continues once its operator frees some space", 507
            )

    def _put(self, file: Path, sha256: str) -> None:
        """Move a file to its place; concurrent calls for one digest move equal bytes."""
        target = self.path(sha256)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.stat().st_dev != target.parent.stat().st_dev:
            near = target.with_name(f".{sha256}.{secrets.token_hex(8)}")
            shutil.move(file, near)
            file = near
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
        file.replace(target)

    def _release(self, partial: Path) -> None:
        with self._lock:
            self._uploads.end(partial.name)
            if not partial.exists():
                self._uploads.forget(partial.name, partial.suffix)


@dataclass(frozen=True)
class _Target:
    sha256: str
    size: int
    partial: Path


class ArtifactUpload:
    """An upload in progress; created by ``ArtifactFolder.upload``."""

    def __init__(self, folder: ArtifactFolder, target: _Target, offset: int) -> None:
        self._folder = folder
        self._target = target
        target.partial.parent.mkdir(parents=True, exist_ok=True)
        self.received = _size_of(target.partial)
        if self.received != offset:
            raise ServerRefusedError(
                f"the server has {self.received} bytes of this artifact: continue there", 409
            )
        known = folder._digests
        self._digest = (
            known.pop(target.partial.name)
            if target.partial.name in known
            else _digest_of(target.partial)
        )
        self._file: IO[bytes] = target.partial.open("ab")

    def __enter__(self) -> ArtifactUpload:
        return self

    def __exit__(self, *_: object) -> None:
        partial = self._target.partial
        try:
            self._file.close()
            if partial.exists() and partial.stat().st_size == self.received:
                self._folder._digests[partial.name] = self._digest
        finally:
            self._folder._release(partial)

    def write(self, chunk: bytes) -> None:
        """Add bytes; refuse if there are more than declared (413) or the disk is full (507)."""
        limit = self._target.size
        if self.received + len(chunk) > limit:
            raise ServerRefusedError(f"the upload has more than the {limit} bytes of this artifact", 413)
        self._folder._count(self._target.partial, len(chunk))
        self._file.write(chunk)
        self._digest.update(chunk)
        self.received += len(chunk)

    def finish(self) -> bool:
        """Return whether the artifact is complete now; refuse (422) if its digest is wrong."""
        self._file.flush()
        if self.received < self._target.size:
            return False
        self._file.close()
        if self._digest.hexdigest() != self._target.sha256:
            self._target.partial.unlink()
            raise ServerRefusedError(
                "the received bytes do not have the digest of this artifact; send them again", 422
            )
        self._folder._put(self._target.partial, self._target.sha256)
        return True


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _digest_of(partial: Path) -> hashlib._Hash:
    digest = hashlib.sha256()
    if partial.exists():
        with partial.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest
