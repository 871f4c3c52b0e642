"""Interface of codecs, and the codec that leaves values unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ravnest.errors import WireError
from ravnest.wire.layout import TensorLayout, flat_bytes

MIN_ELEMENTS = 128
"""Tensors with fewer elements are not compressed: the gain is not worth the loss."""
TILE = 1023 * 32
"""Elements processed at once: they stay in the cache, and below 32,768 torch starts no further threads,
which would take cores from the stage that computes."""


@dataclass(frozen=True)
class Encoded:
    """An encoded tensor."""

    payload: torch.Tensor
    """Encoded bytes, flat uint8."""
    codec: str
    """The codec that decodes it; may differ from the one that was asked."""
    clamped: int = 0
    """Values outside the range, which arrive as the largest finite value of their sign."""


class Codec(Protocol):
    """Encodes and decodes tensors; states the payload size, which is checked before any allocation."""

    @property
    def name(self) -> str:
        """Name on the wire."""

    def nbytes(self, layout: TensorLayout) -> int:
        """Return the payload size for a layout; raises ``WireError`` if it is not supported."""

    def encode(self, tensor: torch.Tensor, layout: TensorLayout) -> Encoded:
        """Encode a dense CPU tensor; may share its memory, and falls back to raw if there is no gain."""

    def decode(self, payload: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
        """Decode a payload that starts at an aligned address; may share its memory."""


class Raw:
    """Values unchanged, in the memory of the tensor."""

    name = "raw"

    def nbytes(self, layout: TensorLayout) -> int:
        """Return the number of elements times their size."""
        return math.prod(layout.shape) * layout.dtype.itemsize

    def encode(self, tensor: torch.Tensor, layout: TensorLayout) -> Encoded:  # noqa: ARG002
        """Return the memory of the tensor."""
        return Encoded(flat_bytes(tensor), self.name)

    def decode(self, payload: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
        """Return a tensor in the memory of the payload; autograd does not treat it as a view."""
        check_size(self, payload, layout)
        storage = payload.untyped_storage()
        return torch.empty(0, dtype=layout.dtype).set_(
            storage, payload.storage_offset() // layout.dtype.itemsize, layout.shape, layout.strides
        )


RAW = Raw()


def check_size(codec: Codec, payload: torch.Tensor, layout: TensorLayout) -> None:
    """Raise ``WireError`` unless a payload has the size that its tensor needs."""
    due = codec.nbytes(layout)
    if payload.numel() != due:
        raise WireError(f"a {codec.name} payload has {payload.numel()} bytes, expected {due}")


def check_dtype(codec: Codec, layout: TensorLayout, dtypes: frozenset[torch.dtype]) -> None:
    """Raise ``WireError`` for a dtype that a codec does not support."""
    if layout.dtype not in dtypes:
        raise WireError(f"codec {codec.name} does not support {layout.dtype}")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def pieces(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yield slices of a tensor along its first dimension."""
    for start in range(0, len(tensor), size):
        yield tensor[start : start + size]


def empty(layout: TensorLayout) -> torch.Tensor:
    """Return an uninitialised tensor."""
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype)
