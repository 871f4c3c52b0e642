"""Transfer of a checkpoint to a neighbour in blocks, without those that the neighbour has already."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
import xxhash

from ravnest.errors import StageFormatError
from ravnest.store.checkpoint import CheckpointFolder, CheckpointManifest, name_of
from ravnest.store.files import convert
from ravnest.types import CheckpointId
from ravnest.wire.messages import Message, StateBlock

BLOCK = 1 << 20
"""Bytes of a block: what did not change since the last replica is found by blocks of this size."""
BYTES = "bytes"
_RESERVE = 64 << 20
"""Bytes of the disk that a replica leaves free."""
_LONGEST_MANIFEST = 64 << 20


@dataclass(frozen=True)
class SentFile:
    """Blocks of a file that a neighbour has, by their digests."""

    checkpoint: CheckpointId
    blocks: tuple[bytes, ...]


class BlockReader:
    """Blocks of one checkpoint's file, as messages; ``sent`` is complete after the last one."""

    def __init__(
        self, folder: CheckpointFolder, manifest: CheckpointManifest, base: SentFile | None = None
    ) -> None:
        """``base``: an earlier checkpoint that the receiver has; equal blocks are not sent again."""
        self._folder = folder
        self._manifest = manifest
        self._base = base
        self._digests: list[bytes] = []

    @property
    def checkpoint(self) -> CheckpointId:
        """The checkpoint."""
        return self._manifest.id

    @property
    def sent(self) -> SentFile:
        """The blocks read so far."""
        return SentFile(self._manifest.id, tuple(self._digests))

    def messages(self, *, restore: bool) -> Iterator[Message]:
        """Yield the messages in order; ``restore``: the receiver continues from the checkpoint."""
        manifest, size = self._manifest, self._manifest.size
        head = StateBlock(manifest.stage, manifest.id, 0, restore=restore)
        first = json.dumps(msgspec.to_builtins(manifest))
        with self._folder.tensors_path(manifest.id).open("rb") as file:
            offset = 0
            while offset < size:
                block = file.read(BLOCK)
                if not block:
                    raise StageFormatError(f"the checkpoint of {manifest.id} ends before its size")
                ends = offset + len(block) >= size
                head = msgspec.structs.replace(
                    head, offset=offset, manifest=first if offset == 0 else "", is_last=ends
                )
                yield self._message(head, block)
                offset += len(block)

    def _message(self, head: StateBlock, block: bytes) -> Message:
        number, digest = len(self._digests), xxhash.xxh3_128_digest(block)
        self._digests.append(digest)
        base = self._base
        if base is not None and number < len(base.blocks) and base.blocks[number] == digest:
            return Message(msgspec.structs.replace(head, base=base.checkpoint, same=len(block)))
        data = torch.frombuffer(bytearray(block), dtype=torch.uint8)
        return Message(head, {BYTES: data})


def data_bytes(message: Message) -> int:
    """Return the number of bytes of a file in a message."""
    data = message.values.get(BYTES)
    return data.nbytes if isinstance(data, torch.Tensor) else 0


def part_of(block: Message, start: int, size: int) -> Message:
    """Return at most ``size`` bytes of a block from ``start`` on, as a message for the receiver."""
    head, data = block.head, block.values[BYTES]
    assert isinstance(head, StateBlock)
    assert isinstance(data, torch.Tensor)
    part = msgspec.structs.replace(
        head,
        offset=head.offset + start,
        manifest=head.manifest if start == 0 else "",
        is_last=head.is_last and start + size >= data.nbytes,
    )
    return Message(part, {BYTES: data[start : start + size]})


@dataclass(frozen=True)
class ExpectedFile:
    """Properties that a checkpoint from a neighbour must have."""

    plan: str
    cluster: int
    stage: int
    stages: int


class BlockWriter:
    """File of a checkpoint that arrives in blocks. Bytes come from a peer and are not trusted."""

    def __init__(
        self,
        folder: CheckpointFolder,
        expected: ExpectedFile,
        complete: Callable[[], CheckpointId | None],
    ) -> None:
        """``complete`` returns the newest checkpoint that all stages have, which the folder keeps."""
        self._complete = complete
        self._folder = folder
        self._expected = expected
        self._manifest: CheckpointManifest | None = None
        self._file: BinaryIO | None = None
        self._path = Path()
        self._digest = hashlib.sha256()
        """Digest of what was written: of a large file it would take too long at the end."""
        self._refused: CheckpointId | None = None
        """Checkpoint of which a block was not usable."""

    def take(self, message: Message) -> CheckpointManifest | None:
        """Write a block; return the manifest after the last one, when the checkpoint is complete.

        ``StageFormatError`` or ``OSError`` if it is not usable; the next file may begin then.
        """
        head = message.head
        assert isinstance(head, StateBlock)
        if head.offset > 0 and head.checkpoint == self._refused:
            return None  # the rest of a file whose sender does not know yet that it is of no use
        try:
            if head.offset == 0:
                self._begin(head)
            manifest, file = self._manifest, self._file
            if manifest is None or file is None or head.checkpoint != manifest.id:
                raise StageFormatError(f"a block of {head.checkpoint} arrived without its beginning")
            if head.offset != file.tell():
                raise StageFormatError(f"block {head.offset} of {head.checkpoint} is out of order")
            self._write(file, head, message)
            if file.tell() > manifest.size:
                raise StageFormatError(f"the checkpoint of {head.checkpoint} is longer than it says")
            if not head.is_last:
                return None
            self.abandon(keep=True)
            return self._finish(manifest)
        except (StageFormatError, OSError):
            self.abandon()
            self._refused = head.checkpoint
            raise

    def abandon(self, *, keep: bool = False) -> None:
        """Close the file, and remove it unless ``keep``."""
        if self._file is not None:
            self._file.close()
            self._file = None
            if not keep:
                self._path.unlink(missing_ok=True)
        self._manifest = None

    def _begin(self, head: StateBlock) -> None:
        self.abandon()
        self._refused = None
        if len(head.manifest) > _LONGEST_MANIFEST:
            raise StageFormatError("the manifest of a checkpoint is too long")
        try:
            data = json.loads(head.manifest)
        except (ValueError, RecursionError) as error:
            raise StageFormatError(f"the manifest of {head.checkpoint} is damaged: {error}") from error
        manifest = convert(data, CheckpointManifest, f"the manifest of {head.checkpoint}")
        expected = self._expected
        found = ExpectedFile(manifest.plan, manifest.cluster, manifest.stage, manifest.stages)
        if found != expected or (manifest.stage, manifest.id) != (head.stage, head.checkpoint):
            raise StageFormatError("a checkpoint of another stage or plan arrived")
        folder = self._folder.path
        folder.mkdir(parents=True, exist_ok=True)
        if manifest.size > shutil.disk_usage(folder).free - _RESERVE:
            raise StageFormatError(f"the disk has no place for a checkpoint of {manifest.size} bytes")
        self._path = folder / f".{name_of(manifest.id)}.incoming"
        self._file = self._path.open("wb")
        self._digest = hashlib.sha256()
        self._manifest = manifest

    def _write(self, file: BinaryIO, head: StateBlock, message: Message) -> None:
        if head.base is not None:
            if not 0 < head.same <= BLOCK:
                raise StageFormatError(f"a block of {head.same} bytes is too large")
            with self._folder.tensors_path(head.base).open("rb") as base:
                base.seek(head.offset)
                self._append(file, base.read(head.same))
            return
        data = message.values.get(BYTES)
        if not isinstance(data, torch.Tensor) or data.dtype != torch.uint8 or data.dim() != 1:
            raise StageFormatError("a block of a checkpoint has no bytes")
        self._append(file, data.contiguous().numpy().data)

    def _append(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(data)
        self._digest.update(data)

    def _finish(self, manifest: CheckpointManifest) -> CheckpointManifest:
        try:
            size, digest = self._path.stat().st_size, self._digest.hexdigest()
            if (size, digest) != (manifest.size, manifest.sha256):
                raise StageFormatError(f"the checkpoint of {manifest.id} arrived with another digest")
            self._folder.add(self._path, manifest, self._complete())
        finally:
            self._path.unlink(missing_ok=True)
        return manifest
