"""Checkpoints of one stage on disk: a safetensors file and a manifest, of which the newest are kept.

The tensors are written first, straight from the memory of the stage, and the manifest, which has their
digest, last: a checkpoint exists once its manifest does. ``docs/failures.md`` describes the files.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from ravnest.errors import StageFormatError
from ravnest.store.files import convert, has_format, read_json, sha256_of, size_of, write_json
from ravnest.types import CheckpointId

logger = logging.getLogger(__name__)

FORMAT = "ravnest-checkpoint"
VERSION = 1
KEPT = 2
"""Newest checkpoints that are kept: if the last is damaged, the one before it is used."""
SEED = "checkpoint"
"""Folder, beside the files of a stage, of the checkpoint that the stage was shipped with: training that
began elsewhere continues from it."""
STATE, OPTIMIZER = "state/", "optimizer/"
"""Prefixes of the tensors' names: weights and buffers, and the optimizer's state of a weight."""
EMA = "ema_weight"
"""Name of the moving average of a weight, among the optimizer's state of the weight."""
_LIMIT = 256 << 20
_NAME = re.compile(r"update_(\d{1,15})_phase_(\d{1,15})")
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""Names of the types of tensors in a safetensors file."""


class StoredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A weight or buffer of the stage, in terms of the model."""

    name: str
    """Name in the model."""
    first: int = 0
    rows: int | None = None
    """Rows ``first`` to ``first + rows - 1`` of the model's tensor; None: all of it."""


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of ``<name>.json``, except for the format."""

    plan: str
    run: str
    node: int
    cluster: int
    stage: int
    stages: int
    id: CheckpointId
    tensors: dict[str, StoredTensor]
    """The stage's weights and buffers, by key."""
    progress: Any
    """Everything that is not a tensor, by ``store/plain_data``."""
    sha256: str = ""
    """Digest of the safetensors file."""
    size: int = 0
    """Size of the safetensors file in bytes."""
    attempt: str = ""
    """Attempt of the run in which it was taken: updates that are made again may differ."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is loaded when it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class CheckpointFolder:
    """Folder with the checkpoints of one stage."""

    path: Path
    _refused: set[str] = field(default_factory=set, compare=False)
    """Damaged files that were reported already."""

    def tensors_path(self, checkpoint: CheckpointId) -> Path:
        """Return the path of a checkpoint's tensors."""
        return self.path / f"{name_of(checkpoint)}.safetensors"

    def manifest_path(self, checkpoint: CheckpointId) -> Path:
        """Return the path of a checkpoint's manifest."""
        return self.path / f"{name_of(checkpoint)}.json"

    def write_tensors(
        self, checkpoint: CheckpointId, tensors: Mapping[str, torch.Tensor | LazyTensor]
    ) -> Path:
        """Write tensors to a new file beside their place and return its path; ``add`` moves it.

        Each tensor is copied into the file from its own memory, without a second copy. A ``LazyTensor``
        is loaded for that and not kept.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        # A name of its own: the file of an attempt that has ended may still be read.
        temporary = self.path / f".{name_of(checkpoint)}.{uuid.uuid4().hex[:8]}.partial"
        try:
            write_tensor_file(temporary, tensors)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def finish(self, temporary: Path, manifest: CheckpointManifest) -> CheckpointManifest:
        """Bring a written file to the disk; return the manifest with its size and digest."""
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        return msgspec.structs.replace(
            manifest, sha256=sha256_of(temporary), size=temporary.stat().st_size
        )

    def commit(self, temporary: Path, manifest: CheckpointManifest) -> CheckpointManifest:
        """Make a written file a checkpoint; return the manifest with its size and digest."""
        complete = self.finish(temporary, manifest)
        self.add(temporary, complete)
        return complete

    def add(
        self, temporary: Path, manifest: CheckpointManifest, complete: CheckpointId | None = None
    ) -> None:
        """Add a file whose digest is known, with its manifest, and remove older checkpoints.

        ``complete``: the newest one that all stages are known to have, which is kept.
        """
        temporary.replace(self.tensors_path(manifest.id))
        data = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(manifest)}
        write_json(self.manifest_path(manifest.id), data, compact=True)
        for old in surplus(self.ids(), {manifest.id, complete}):
            self.remove(old)

    def clean(self) -> None:
        """Remove what a process left behind that ended while it wrote."""
        valid = {self.tensors_path(checkpoint) for checkpoint in self.ids()}
        for pattern in (".update_*", "update_*.safetensors"):
            for path in self.path.glob(pattern):
                if path not in valid:
                    path.unlink(missing_ok=True)

    def remove(self, checkpoint: CheckpointId) -> None:
        """Remove a checkpoint, its manifest first."""
        self.manifest_path(checkpoint).unlink(missing_ok=True)
        self.tensors_path(checkpoint).unlink(missing_ok=True)

    def ids(self) -> list[CheckpointId]:
        """Return the checkpoints that have a manifest, oldest first; nothing of them is read."""
        found = (_NAME.fullmatch(path.stem) for path in self.path.glob("update_*.json"))
        return sorted(CheckpointId(int(m[1]), int(m[2])) for m in found if m is not None)

    def manifest(self, checkpoint: CheckpointId) -> CheckpointManifest:
        """Read a manifest and check the file of tensors against it, except for the digest."""
        path = self.manifest_path(checkpoint)
        manifest = read_manifest(path)
        tensors = self.tensors_path(checkpoint)
        if manifest.id != checkpoint:
            raise StageFormatError(f"{path} is the manifest of {manifest.id}")
        if (size := size_of(tensors)) != manifest.size:
            raise StageFormatError(f"{tensors} has {size} bytes, its manifest says {manifest.size}")
        return manifest

    def usable(self) -> list[CheckpointManifest]:
        """Return the manifests of the undamaged checkpoints, oldest first; others are logged once.

        The digest of the tensors is checked, so that this reads all files.
        """
        return list(self._usable())

    def _usable(self) -> Iterator[CheckpointManifest]:
        for checkpoint in self.ids():
            try:
                manifest = self.manifest(checkpoint)
                if sha256_of(self.tensors_path(checkpoint)) != manifest.sha256:
                    raise StageFormatError(f"{self.tensors_path(checkpoint)} has another digest")
            except (StageFormatError, OSError) as error:
                if (name := name_of(checkpoint)) not in self._refused:
                    self._refused.add(name)
                    logger.warning("a checkpoint is damaged and not used: %s", error)
            else:
                yield manifest

    def load(self, manifest: CheckpointManifest) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a checkpoint by name, one at a time."""
        path = self.tensors_path(manifest.id)
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise StageFormatError(f"{path} is damaged: {error}") from error

    def set_aside(self) -> None:
        """Rename the folder to ``<name>.previous``, in place of an earlier one: a new run begins."""
        if not self.ids():
            return
        previous = self.path.with_name(f"{self.path.name}.previous")
        earlier = CheckpointFolder(previous)
        for checkpoint in earlier.ids():
            earlier.remove(checkpoint)
        previous.mkdir(exist_ok=True)
        for checkpoint in self.ids():
            for path in (self.manifest_path(checkpoint), self.tensors_path(checkpoint)):
                path.replace(previous / path.name)


def read_manifest(path: Path) -> CheckpointManifest:
    """Read a manifest from any file; its tensors are not looked at."""
    data = read_json(path, _LIMIT)
    if not has_format(data, FORMAT, VERSION):
        raise StageFormatError(f"{path} is not the manifest of a checkpoint")
    plain = {name: value for name, value in data.items() if name not in ("format", "version")}
    return convert(plain, CheckpointManifest, path)


def surplus(
    ids: Iterable[CheckpointId], protected: Container[CheckpointId | None]
) -> list[CheckpointId]:
    """Return the checkpoints to remove: all but the newest and those that are protected."""
    return [each for each in sorted(ids)[:-KEPT] if each not in protected]


def name_of(checkpoint: CheckpointId) -> str:
    """Return the name of a checkpoint's files, without the suffix."""
    return f"update_{checkpoint.update}_phase_{checkpoint.phase}"


def write_tensor_file(
    path: Path,
    tensors: Mapping[str, torch.Tensor | LazyTensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file from the tensors' own memory; texts can be added to its header."""
    with path.open("wb") as file:
        file.write(_header(tensors, metadata))
        for tensor in tensors.values():
            loaded = tensor.load() if isinstance(tensor, LazyTensor) else tensor
            assert (loaded.dtype, loaded.nbytes) == (tensor.dtype, tensor.nbytes)
            plain = loaded.detach().cpu().contiguous()
            if plain.numel():
                file.write(plain.reshape(-1).view(torch.uint8).numpy().data)


def _header(
    tensors: Mapping[str, torch.Tensor | LazyTensor], metadata: Mapping[str, str] | None
) -> bytes:
    """Return the header of a safetensors file."""
    listing: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise StageFormatError(f"{name} has dtype {tensor.dtype}, which cannot be stored")
        end = offset + tensor.nbytes
        listing[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    header = json.dumps(listing, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
