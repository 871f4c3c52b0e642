"""Content-addressed files: an artifact is complete and verified, or absent.

Each sender has its own partial file per artifact, so that nobody can complete the upload of another
and get access to a file of which it only knows the digest.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ravnest.errors import ServerRefusedError
from ravnest.schemas.base import Artifact
from ravnest.store.files import sha256_of

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK = 4 << 20
_NO_OWNER = "nobody"


class ArtifactFolder:
    """Content-addressed folder; thread-safe."""

    def __init__(self, path: Path, *, largest: int = 256 << 30, reserve: int = 0) -> None:
        self._path = path
        self._partial = path / "parts"
        self._largest = largest
        self._reserve = reserve
        self._lock = threading.Lock()
        self._uploading: set[str] = set()
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

    def received(self, sha256: str, owner: str = _NO_OWNER) -> int:
        """Return the bytes that this owner has sent of an incomplete artifact."""
        partial = self._partial_path(sha256, owner)
        return partial.stat().st_size if partial.exists() else 0

    def append(
        self,
        sha256: str,
        size: int | None,
        offset: int,
        chunks: Iterable[bytes],
        owner: str = _NO_OWNER,
    ) -> bool:
        """Add bytes to a partial file; return whether the artifact is complete now."""
        with self.upload(sha256, size, offset, owner) as upload:
            for chunk in chunks:
                upload.write(chunk)
            return upload.finish()

    def upload(
        self, sha256: str, size: int | None, offset: int, owner: str = _NO_OWNER
    ) -> ArtifactUpload:
        """Return a context in which bytes are added to a partial file.

        Raise ``ServerRefusedError`` if the partial file does not have ``offset`` bytes or another
        upload is in progress (409), the artifact is too large (413), or the disk is full (507).
        """
        self._check_size(offset if size is None else size)
        partial = self._partial_path(sha256, owner)
        with self._lock:
            if partial.name in self._uploading:
                raise ServerRefusedError(
                    "another upload of this artifact is in progress; wait for it", 409
                )
            self._uploading.add(partial.name)
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

    def sweep(self, keep: set[str], begun_before: float) -> int:
        """Delete artifacts that are not in ``keep``, and old partial files; return how many.

        Only call it while nothing else uses the folder.
        """
        unwanted = [path for path in self._path.glob("[0-9a-f][0-9a-f]/*") if path.name not in keep]
        unwanted += [path for path in self._partial.glob("*") if path.stat().st_mtime < begun_before]
        for path in unwanted:
            path.unlink()
        return len(unwanted)

    def _partial_path(self, sha256: str, owner: str) -> Path:
        self.path(sha256)
        return self._partial / f"{sha256}.{hashlib.sha256(owner.encode()).hexdigest()[:16]}"

    def _check_size(self, size: int) -> None:
        if size > self._largest:
            raise ServerRefusedError(
                f"an artifact may have {self._largest} bytes at most, not {size}", 413
            )
        self._path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._path).free
        if size + self._reserve > free:
            raise ServerRefusedError(
                f"the server's disk has {free / 1e9:.1f} GB left, not enough for {size / 1e9:.1f} GB",
                507,
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
            self._uploading.discard(partial.name)


@dataclass(frozen=True)
class _Target:
    sha256: str
    size: int | None
    partial: Path


class ArtifactUpload:
    """An upload in progress; created by ``ArtifactFolder.upload``."""

    def __init__(self, folder: ArtifactFolder, target: _Target, offset: int) -> None:
        self._folder = folder
        self._target = target
        target.partial.parent.mkdir(parents=True, exist_ok=True)
        self.received = target.partial.stat().st_size if target.partial.exists() else 0
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
        """Add bytes; raise ``ServerRefusedError`` if there are more than announced."""
        limit = self._folder._largest if self._target.size is None else self._target.size
        if self.received + len(chunk) > limit:
            raise ServerRefusedError(f"the upload has more than the {limit} bytes of this artifact", 413)
        self._file.write(chunk)
        self._digest.update(chunk)
        self.received += len(chunk)

    def finish(self) -> bool:
        """Return whether the artifact is complete now; refuse (422) if its digest is wrong."""
        self._file.flush()
        is_valid = self._digest.hexdigest() == self._target.sha256
        if self._target.size is None and not is_valid:
            return False
        if self._target.size is not None and self.received < self._target.size:
            return False
        self._file.close()
        if not is_valid:
            self._target.partial.unlink()
            raise ServerRefusedError(
                "the received bytes do not have the digest of this artifact; send them again", 422
            )
        self._folder._put(self._target.partial, self._target.sha256)
        return True


def _digest_of(partial: Path) -> hashlib._Hash:
    digest = hashlib.sha256()
    if partial.exists():
        with partial.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest
