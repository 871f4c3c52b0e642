"""Files by their digest: each is whole and right, or not there.

What is being sent waits in a part of its sender's own, so that nobody can complete another's upload
and come by a file of which only the digest was known.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ravnest.errors import ServerRefusedError
from ravnest.schemas.base import Artifact
from ravnest.store.files import sha256_of

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK = 4 << 20
_NOBODY = "nobody"


class ArtifactFolder:
    """The content-addressed folder; threads may use it at once."""

    def __init__(self, path: Path, *, largest: int = 256 << 30, reserve: int = 0) -> None:
        self._path = path
        self._parts = path / "parts"
        self._largest = largest
        self._reserve = reserve
        self._lock = threading.Lock()
        self._at_work: set[str] = set()
        self._digests: dict[str, hashlib._Hash] = {}
        """Of parts, as far as they have come: a long file is not read again for its last bytes."""

    def path(self, sha256: str) -> Path:
        """Where the artifact is, or would be."""
        if not _DIGEST.fullmatch(sha256):
            raise ServerRefusedError("an artifact is named by 64 hexadecimal digits", 422)
        return self._path / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        """Whether it is there."""
        return self.path(sha256).is_file()

    def add(self, file: Path) -> Artifact:
        """Move a file in."""
        artifact = Artifact(sha256=sha256_of(file), size=file.stat().st_size)
        self._put(file, artifact.sha256)
        return artifact

    def received(self, sha256: str, owner: str = _NOBODY) -> int:
        """Bytes of it that this owner has sent so far, while it is not whole."""
        part = self._part(sha256, owner)
        return part.stat().st_size if part.exists() else 0

    def append(
        self,
        sha256: str,
        size: int | None,
        offset: int,
        chunks: Iterable[bytes],
        owner: str = _NOBODY,
    ) -> bool:
        """Add bytes to a part; whether the artifact is whole now."""
        with self.upload(sha256, size, offset, owner) as upload:
            for chunk in chunks:
                upload.write(chunk)
            return upload.finish()

    def upload(self, sha256: str, size: int | None, offset: int, owner: str = _NOBODY) -> ArtifactUpload:
        """A context in which bytes are added to a part.

        ``ServerRefusedError`` says why not: the part has more or less than ``offset`` bytes or
        somebody is adding to it (409), the file is too large (413), the disk too full (507).
        """
        self._check_size(offset if size is None else size)
        part = self._part(sha256, owner)
        with self._lock:
            if part.name in self._at_work:
                raise ServerRefusedError(
                    "another upload of this artifact is under way; wait for it", 409
                )
            self._at_work.add(part.name)
        try:
            return ArtifactUpload(self, _Target(sha256, size, part), offset)
        except BaseException:
            self._release(part)
            raise

    def sweep(self, keep: set[str], begun_before: float) -> int:
        """Remove artifacts that nobody has, and parts that nobody has added to since a time; how many.

        Only while nobody uses the folder.
        """
        unwanted = [path for path in self._path.glob("[0-9a-f][0-9a-f]/*") if path.name not in keep]
        unwanted += [path for path in self._parts.glob("*") if path.stat().st_mtime < begun_before]
        for path in unwanted:
            path.unlink()
        return len(unwanted)

    def _part(self, sha256: str, owner: str) -> Path:
        self.path(sha256)
        return self._parts / f"{sha256}.{hashlib.sha256(owner.encode()).hexdigest()[:16]}"

    def _check_size(self, size: int) -> None:
        if size > self._largest:
            raise ServerRefusedError(
                f"an artifact has at most {self._largest} bytes here, not {size}", 413
            )
        self._path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._path).free
        if size + self._reserve > free:
            raise ServerRefusedError(
                f"the server's disk has {free / 1e9:.1f} GB left, too little for {size / 1e9:.1f} GB",
                507,
            )

    def _put(self, file: Path, sha256: str) -> None:
        """Many may put the same file at once: each puts the same bytes, and the last one stays."""
        target = self.path(sha256)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.stat().st_dev != target.parent.stat().st_dev:
            near = target.with_name(f".{sha256}.{secrets.token_hex(8)}")
            shutil.move(file, near)
            file = near
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
        file.replace(target)

    def _release(self, part: Path) -> None:
        with self._lock:
            self._at_work.discard(part.name)


@dataclass(frozen=True)
class _Target:
    sha256: str
    size: int | None
    part: Path


class ArtifactUpload:
    """Bytes on their way into a part; made by ``ArtifactFolder.upload``."""

    def __init__(self, folder: ArtifactFolder, target: _Target, offset: int) -> None:
        self._folder = folder
        self._target = target
        target.part.parent.mkdir(parents=True, exist_ok=True)
        self.received = target.part.stat().st_size if target.part.exists() else 0
        if self.received != offset:
            raise ServerRefusedError(
                f"the server has {self.received} bytes of this artifact: go on from there", 409
            )
        known = folder._digests
        self._digest = (
            known.pop(target.part.name) if target.part.name in known else _digest_of(target.part)
        )
        self._file: IO[bytes] = target.part.open("ab")

    def __enter__(self) -> ArtifactUpload:
        return self

    def __exit__(self, *_: object) -> None:
        part = self._target.part
        try:
            self._file.close()
            if part.exists() and part.stat().st_size == self.received:
                self._folder._digests[part.name] = self._digest
        finally:
            self._folder._release(part)

    def write(self, chunk: bytes) -> None:
        """Add bytes; ``ServerRefusedError`` if there are more than were announced."""
        limit = self._folder._largest if self._target.size is None else self._target.size
        if self.received + len(chunk) > limit:
            raise ServerRefusedError(
                f"more bytes come than the {limit} that this artifact may have", 413
            )
        self._file.write(chunk)
        self._digest.update(chunk)
        self.received += len(chunk)

    def finish(self) -> bool:
        """Whether the artifact is whole now; 422 if it is, and its digest is another one."""
        self._file.flush()
        is_right = self._digest.hexdigest() == self._target.sha256
        if self._target.size is None and not is_right:
            return False
        if self._target.size is not None and self.received < self._target.size:
            return False
        self._file.close()
        if not is_right:
            self._target.part.unlink()
            raise ServerRefusedError(
                "the bytes that came do not have the digest of this artifact; send them again", 422
            )
        self._folder._put(self._target.part, self._target.sha256)
        return True


def _digest_of(part: Path) -> hashlib._Hash:
    digest = hashlib.sha256()
    if part.exists():
        with part.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest
