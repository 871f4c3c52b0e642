"""Tensors kept in a temporary file instead of memory, above all those that autograd saves for backward.

A tensor that is read back has the bits, shape, strides and alignment that it had, so that kernels
compute the same from it.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO, RawIOBase

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

logger = logging.getLogger(__name__)

_SMALLEST = 64 << 10
"""Bytes of a storage from which on it goes to the file; smaller ones cost more time than memory."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class SpilledTensor:
    """Place of a tensor in a file, and its layout."""

    position: int
    """Position of its storage in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """Elements of the storage before the tensor's first."""


@dataclass(frozen=True)
class _WrittenStorage:
    """A storage that is in the file already."""

    storage: StorageWeakRef
    version: int
    position: int

    def gone(self) -> bool:
        """Return True if its memory has been freed."""
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


class SpillFile:
    """Tensors in a file. Views of a storage share one copy, while it exists and is not written to."""

    def __init__(self, file: RawIOBase | BytesIO) -> None:
        self._file = file
        self._written: dict[int, _WrittenStorage] = {}

    @classmethod
    @contextlib.contextmanager
    def temporary(cls) -> Iterator[SpillFile]:
        """Create a file that is deleted at the end."""
        with tempfile.TemporaryFile(prefix="ravnest-", buffering=0) as file:
            yield cls(file)

    def write(self, tensor: torch.Tensor) -> SpilledTensor:
        """Append a tensor on the CPU; raise ``OSError`` if the disk is full."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        known = self._written.get(key)
        if known is None or known.gone() or known.version != tensor._version:
            position = self._file.seek(0, 2)
            _write_all(self._file, _memory(storage))
            known = _WrittenStorage(StorageWeakRef(storage), tensor._version, position)  # type: ignore[no-untyped-call]
            self._written[key] = known
        return SpilledTensor(
            known.position,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def read(self, spilled: SpilledTensor) -> torch.Tensor:
        """Return a copy of a tensor from the file."""
        size = spilled.dtype.itemsize
        begin = spilled.offset * size
        skipped = begin % _ALIGNMENT
        last = sum((n - 1) * s for n, s in zip(spilled.shape, spilled.strides, strict=True))
        storage = torch.UntypedStorage(skipped + (last + 1) * size)  # type: ignore[no-untyped-call]
        self._file.seek(spilled.position + begin - skipped)
        _read_all(self._file, _memory(storage))
        tensor = torch.empty(0, dtype=spilled.dtype)
        return tensor.set_(storage, skipped // size, spilled.shape, spilled.strides)


def spillable(tensor: torch.Tensor) -> bool:
    """Return True for a plain tensor on the CPU that holds a worthwhile amount of memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() >= _SMALLEST
    )


@contextlib.contextmanager
def saved_tensors_on_disk(state: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let autograd keep what it saves for backward in a file; forward and backward must both run inside.

    Results are the same bits. ``state`` are tensors that exist anyway, such as the parameters of the
    model: they stay in memory, as do small tensors. If the disk is full, the rest stays in memory too.
    """
    storages = {int(tensor.untyped_storage()._cdata) for tensor in state}
    with SpillFile.temporary() as file:
        saved = _SavedTensors(file, storages)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            yield


@dataclass(frozen=True)
class _Saved:
    """A tensor that autograd saved."""

    place: SpilledTensor | torch.Tensor
    version: torch.Tensor
    """Tensor without elements that counts the writes to the saved tensor."""
    saved_version: int


class _SavedTensors:
    """Hooks for tensors that autograd saves."""

    def __init__(self, file: SpillFile, storages: set[int]) -> None:
        self._file = file
        self._storages = storages
        self._full = False

    def pack(self, tensor: torch.Tensor) -> _Saved:
        own = tensor.detach()
        place = self._place(own)
        if isinstance(place, SpilledTensor):
            own.data = torch.empty(0, dtype=own.dtype)  # still counts writes, but frees the memory
        return _Saved(place, own, tensor._version)

    def unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.version._version != saved.saved_version:
            raise RuntimeError(
                "a tensor that is needed for the gradient has been modified by an in-place operation: "
                f"it is at version {saved.version._version}, expected version {saved.saved_version}"
            )
        if isinstance(saved.place, SpilledTensor):
            return self._file.read(saved.place)
        return saved.place

    def _place(self, tensor: torch.Tensor) -> SpilledTensor | torch.Tensor:
        if self._full or not spillable(tensor):
            return tensor
        if int(tensor.untyped_storage()._cdata) in self._storages:
            return tensor
        try:
            return self._file.write(tensor)
        except OSError as error:
            self._full = True
            logger.info("activations of the check stay in memory: %s", error)
            return tensor


def _write_all(file: RawIOBase | BytesIO, data: memoryview) -> None:
    """Write all bytes; one call of an unbuffered file may write fewer."""
    while data:
        data = data[file.write(data) or 0 :]


def _read_all(file: RawIOBase | BytesIO, data: memoryview) -> None:
    """Fill ``data`` from the file."""
    while data:
        count = file.readinto(data)
        assert count, "the file of tensors is cut off"
        data = data[count:]


def _memory(storage: torch.UntypedStorage) -> memoryview:
    """Return the bytes of a storage, without a copy."""
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    return flat.numpy().data
