"""A provider's share of a dataset, read from its files row by row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
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
"""As safetensors calls them."""


@dataclass(frozen=True)
class Rows:
    """The rows ``start`` to ``stop - 1`` of a piece of data."""

    path: Path
    start: int
    stop: int


class SharedData(Dataset[dict[str, torch.Tensor]]):
    """Samples as mappings: the inputs of the model by name, ``labels``, or both.

    Rows are read when they are asked for and not kept: the files are often larger than the memory
    that a provider offers, of which mapped files would count as used.
    """

    def __init__(self, inputs: Sequence[Rows] = (), labels: Sequence[Rows] = ()) -> None:
        """``DataError`` or ``StageFormatError`` for files that are not pieces of one dataset."""
        self._columns = [_Column(rows) for rows in (inputs, labels) if rows]
        lengths = {len(column) for column in self._columns}
        if len(lengths) != 1:
            raise DataError("inputs and labels of a share are not equally many, or there are none")
        if labels and set(self._columns[-1].fields) != {LABELS}:
            raise DataError(f"a file of labels holds {sorted(self._columns[-1].fields)}")
        (self._length,) = lengths

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"there are {self._length} samples, none has the number {index}")
        sample: dict[str, torch.Tensor] = {}
        for column in self._columns:
            sample |= column.read(index)
        return sample


@dataclass(frozen=True)
class _Field:
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of one row."""
    nbytes: int
    """Of one row."""


class _Column:
    """The rows of several files with the same fields, one after the other."""

    def __init__(self, rows: Sequence[Rows]) -> None:
        self._rows = tuple(rows)
        self._files = [TensorFile.read(each.path) for each in rows]
        self._ends = list(accumulate(each.stop - each.start for each in rows))
        self.fields = _fields_of(self._files[0])
        for each, file in zip(rows, self._files, strict=True):
            if _fields_of(file) != self.fields:
                raise DataError(f"{file.path} holds other fields than {self._files[0].path}")
            held = min(tensor.shape[0] for tensor in file.tensors.values())
            if not 0 <= each.start < each.stop <= held:
                raise DataError(f"{file.path} has no rows {each.start} to {each.stop}: it has {held}")

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, index: int) -> dict[str, torch.Tensor]:
        """The fields of a row."""
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
            raise DataError(f"{file.path}: {name} does not hold rows of numbers")
        shape = tensor.shape[1:]
        fields[name] = _Field(dtype, shape, prod(shape) * dtype.itemsize)
    if not fields:
        raise DataError(f"{file.path} holds nothing")
    return fields
