"""What a codec is, and the one that changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ravnest.errors import WireError
from ravnest.wire.layout import TensorLayout, flat_bytes

SMALLEST = 128
"""Fewer elements than this are not worth a loss: they travel as they are."""
TILE = 1023 * 32
"""Elements in one go: they stay in the cache, and below 32,768 torch starts no further threads, which
would take the cores from the stage that computes meanwhile."""


@dataclass(frozen=True)
class Encoded:
    """A tensor on its way."""

    payload: torch.Tensor
    """Flat uint8."""
    codec: str
    """That reads it; not always the one that was asked."""
    clamped: int = 0
    """Values that were beyond the range, and arrive as the largest that there is."""


class Codec(Protocol):
    """Both directions, and the size of the payload, which is checked before anything is allocated."""

    @property
    def name(self) -> str:
        """As written on the wire."""

    def nbytes(self, layout: TensorLayout) -> int:
        """Bytes of payload for a tensor of this layout; ``WireError`` if the codec has none for it."""

    def encode(self, tensor: torch.Tensor, layout: TensorLayout) -> Encoded:
        """May share the memory of the (dense, CPU) tensor; raw where this codec would do no good."""

    def decode(self, payload: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
        """The tensor; may share the memory of the payload, which starts at an aligned address."""


class Raw:
    """The tensor's own memory."""

    name = "raw"

    def nbytes(self, layout: TensorLayout) -> int:
        """Elements times their size."""
        return math.prod(layout.shape) * layout.dtype.itemsize

    def encode(self, tensor: torch.Tensor, layout: TensorLayout) -> Encoded:  # noqa: ARG002
        """Shares the tensor's memory."""
        return Encoded(flat_bytes(tensor), self.name)

    def decode(self, payload: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
        """Shares the payload's memory, and is no view in the eyes of autograd."""
        check_size(self, payload, layout)
        storage = payload.untyped_storage()
        return torch.empty(0, dtype=layout.dtype).set_(
            storage, payload.storage_offset() // layout.dtype.itemsize, layout.shape, layout.strides
        )


RAW = Raw()


def check_size(codec: Codec, payload: torch.Tensor, layout: TensorLayout) -> None:
    """``WireError`` unless a payload has the bytes that its tensor needs."""
    due = codec.nbytes(layout)
    if payload.numel() != due:
        raise WireError(f"{payload.numel()} bytes of {codec.name} came where {due} were due")


def check_dtype(codec: Codec, layout: TensorLayout, dtypes: frozenset[torch.dtype]) -> None:
    """``WireError`` for a tensor that a codec is not made for."""
    if layout.dtype not in dtypes:
        raise WireError(f"{layout.dtype} does not travel as {codec.name}")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def pieces(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Parts of a tensor along its first dimension."""
    for start in range(0, len(tensor), size):
        yield tensor[start : start + size]


def empty(layout: TensorLayout) -> torch.Tensor:
    """A tensor to be filled."""
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype)
