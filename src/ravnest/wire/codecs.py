"""How the memory of a tensor becomes payload bytes, and comes back: a seam with one codec so far."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from ravnest.errors import WireError
from ravnest.wire.layout import Layout, flat_bytes


class Codec(Protocol):
    """Both directions, and the size of the payload, which is checked before anything is allocated."""

    @property
    def name(self) -> str:
        """As written on the wire."""

    def nbytes(self, layout: Layout) -> int:
        """Bytes of payload for a tensor of this layout."""

    def encode(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The payload as flat uint8; may share the memory of the (dense, CPU) tensor."""

    def decode(self, payload: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The tensor; may share the memory of the payload, which starts at an aligned address."""


class Raw:
    """The tensor's own memory."""

    name = "raw"

    def nbytes(self, layout: Layout) -> int:
        """Elements times their size."""
        return math.prod(layout.shape) * layout.dtype.itemsize

    def encode(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:  # noqa: ARG002
        """Shares the tensor's memory."""
        return flat_bytes(tensor)

    def decode(self, payload: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Shares the payload's memory, and is no view in the eyes of autograd."""
        storage = payload.untyped_storage()
        return torch.empty(0, dtype=layout.dtype).set_(storage, 0, layout.shape, layout.strides)


RAW = Raw()
CODECS: dict[str, Codec] = {RAW.name: RAW}


def codec_named(name: str) -> Codec:
    """The codec a peer named."""
    codec = CODECS.get(name)
    if codec is None:
        raise WireError(f"unknown codec {name!r}; this node knows {', '.join(sorted(CODECS))}")
    return codec
