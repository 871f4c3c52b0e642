"""Dataset of a provider: its share of the samples, read from files row by row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from torch.utils.data import Dataset

from ravnest.errors import DataError
from ravnest.jobs.tensor_file import TensorFile
from ravnest.runtime.data import LABELS

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Data types by their names in safetensors."""


_WINDOW = ".window"


def window_name(field: str) -> str:
    """Return the name of the field with the windows of another field.

    The window of a sample is the part of its tensor that is not padding: begin and end in each
    dimension.
    """
    return f"{field}{_WINDOW}"


def collate_samples(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of samples, cropped to the largest of them."""
    return crop_batch({name: torch.stack([each[name] for each in samples]) for name in samples[0]})


def crop_batch(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Crop the fields of a batch that have windows, and leave the windows out."""
    return {
        name: _cropped(name, tensor, batch[window_name(name)]) if window_name(name) in batch else tensor
        for name, tensor in batch.items()
        if not name.endswith(_WINDOW)
    }


def _cropped(name: str, tensor: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    shape = torch.tensor(tensor.shape[1:])
    if windows.dtype != torch.int64 or windows.shape != (len(tensor), tensor.dim() - 1, 2):
        raise DataError(f"the windows of {name!r} have shape {list(windows.shape)} and {windows.dtype}")
    begin, end = windows[..., 0].amin(0), windows[..., 1].amax(0)
    if bool((begin < 0).any() | (begin > end).any() | (end > shape).any()):
        raise DataError(f"the windows of {name!r} do not fit its shape {list(tensor.shape)}")
    chosen = tuple(slice(*pair) for pair in zip(begin.tolist(), end.tolist(), strict=True))
    return tensor[(slice(None), *chosen)].contiguous()


@dataclass(frozen=True)
class Rows:
    """Rows ``start`` to ``stop - 1`` of a data file."""

    path: Path
    start: int
    stop: int


class SharedData(Dataset[dict[str, torch.Tensor]]):
    """Samples as mappings: inputs of the model by name, ``labels``, or both.

    Rows are read on access and not cached: the files are often larger than the memory that a
    provider offers, and memory-mapped files would count as used memory.
    """

    def __init__(self, inputs: Sequence[Rows] = (), labels: Sequence[Rows] = ()) -> None:
        """Open the files.

        Raises ``DataError`` or ``StageFormatError`` for files that do not belong to one dataset.
        """
        self._columns = [_Column(rows) for rows in (inputs, labels) if rows]
        lengths = {len(column) for column in self._columns}
        if len(lengths) != 1:
            raise DataError("a share of the data is empty, or its inputs and labels differ in number")
        if labels and set(self._columns[-1].fields) - {window_name(LABELS)} != {LABELS}:
            raise DataError(f"a label file has the fields {sorted(self._columns[-1].fields)}")
        (self._length,) = lengths

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} is out of range: there are {self._length} samples")
        sample: dict[str, torch.Tensor] = {}
        for column in self._columns:
            sample |= column.read(index)
        return sample


@dataclass(frozen=True)
class _Field:
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of one row."""
    nbytes: int
    """Bytes of one row."""


class _Column:
    """Concatenated rows of several files with the same fields."""

    def __init__(self, rows: Sequence[Rows]) -> None:
        self._rows = tuple(rows)
        self._files = [TensorFile.read(each.path) for each in rows]
        self._ends = list(accumulate(each.stop - each.start for each in rows))
        self.fields = _fields_of(self._files[0])
        for each, file in zip(rows, self._files, strict=True):
            if _fields_of(file) != self.fields:
                raise DataError(f"{file.path} and {self._files[0].path} have different fields")
            held = min(tensor.shape[0] for tensor in file.tensors.values())
            if not 0 <= each.start < each.stop <= held:
                raise DataError(
                    f"{file.path} has {held} rows: {each.start} to {each.stop} is out of range"
                )

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, index: int) -> dict[str, torch.Tensor]:
        """Read the fields of one row."""
        number = bisect_right(self._ends, index)
        row = self._rows[number].stop - (self._ends[number] - index)
        file = self._files[number]
        found = {}
        with file.path.open("rb", buffering=0) as opened:
            for name, field in self.fields.items():
                opened.seek(file.tensors[name].begin + row * field.nbytes)
                data = bytearray(field.nbytes)
                if opened.readinto(data) != field.nbytes:
                    raise DataError(f"{file.path} ends in the middle of row {row}")
                flat = torch.frombuffer(data, dtype=field.dtype) if data else torch.empty(0)
                found[name] = flat.to(field.dtype).reshape(field.shape)
        return found


def _fields_of(file: TensorFile) -> dict[str, _Field]:
    fields = {}
    for name, tensor in sorted(file.tensors.items()):
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None or not tensor.shape:
            raise DataError(f"{file.path}: {name} is not a tensor of rows with a known data type")
        shape = tensor.shape[1:]
        fields[name] = _Field(dtype, shape, prod(shape) * dtype.itemsize)
    if not fields:
        raise DataError(f"{file.path} has no tensors")
    return fields
