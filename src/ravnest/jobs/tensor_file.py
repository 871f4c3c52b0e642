"""Index of a safetensors file, from which tensors are copied without loading them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ravnest.errors import StageFormatError
from ravnest.store.files import size_of

_HEADER_LIMIT = 4 << 20
"""Bytes of a header: those of about 40,000 tensors."""
_CHUNK = 4 << 20
_METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorBytes:
    """Position of a tensor in its file."""

    dtype: str
    """Data type by its name in safetensors."""
    shape: tuple[int, ...]
    begin: int
    """Offset of the first byte."""
    end: int
    """Offset after the last byte."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.end - self.begin

    def row_bytes(self, first: int, stop: int) -> TensorBytes:
        """Return the position of the rows ``first`` to ``stop - 1``."""
        row = self.size // self.shape[0]
        shape = (stop - first, *self.shape[1:])
        return TensorBytes(self.dtype, shape, self.begin + first * row, self.begin + stop * row)


@dataclass(frozen=True)
class TensorFile:
    """Tensors of a safetensors file and their positions."""

    path: Path
    tensors: Mapping[str, TensorBytes]

    @classmethod
    def read(cls, path: Path) -> TensorFile:
        """Read the header; raise ``StageFormatError`` for a file that safetensors does not accept."""
        size = size_of(path)
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > min(_HEADER_LIMIT, size - 8):
                    raise StageFormatError(f"{path} has a header of {length} bytes")
                with safe_open(str(path), framework="pt"):
                    listing = json.loads(file.read(length))
            found = {
                key: _tensor_bytes(value, 8 + length)
                for key, value in listing.items()
                if key != _METADATA
            }
        except SafetensorError as error:
            raise StageFormatError(f"{path} is damaged: {error}") from error
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
            raise StageFormatError(f"{path} has a damaged header: {error}") from error
        if any(not 8 + length <= each.begin <= each.end <= size for each in found.values()):
            raise StageFormatError(f"{path} has a damaged header: a tensor lies outside of the file")
        return cls(path, found)

    def copy(self, tensors: Mapping[str, TensorBytes], target: Path) -> None:
        """Write tensors of this file to ``target`` by key, with at most one chunk in memory."""
        listing: dict[str, Any] = {}
        offset = 0
        for key, tensor in tensors.items():
            offsets = [offset, offset + tensor.size]
            listing[key] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
            offset += tensor.size
        header = json.dumps(listing, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        with self.path.open("rb") as source, target.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for key, tensor in tensors.items():
                source.seek(tensor.begin)
                left = tensor.size
                while left:
                    chunk = source.read(min(left, _CHUNK))
                    if not chunk:
                        raise StageFormatError(f"{self.path} ends in the middle of {key}")
                    file.write(chunk)
                    left -= len(chunk)


def _tensor_bytes(value: Mapping[str, Any], start: int) -> TensorBytes:
    begin, end = value["data_offsets"]
    return TensorBytes(value["dtype"], tuple(value["shape"]), start + begin, start + end)
