"""16-bit codecs: ``fp16`` has more digits, ``bf16`` more range."""

from __future__ import annotations

import math

import torch

from ravnest.wire.codecs.base import (
    MIN_ELEMENTS,
    RAW,
    TILE,
    Encoded,
    check_dtype,
    check_size,
    empty,
    flat,
    pieces,
)
from ravnest.wire.layout import TensorLayout

_WIDER = frozenset({torch.float32, torch.float64})


class Half:
    """Rounds values to the nearest value of a 16-bit type.

    Finite values outside the range become the largest finite value of their sign, and are counted.
    NaN and infinities are kept: they show an error, and must not be hidden.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype
        self._most = torch.finfo(dtype).max

    def nbytes(self, layout: TensorLayout) -> int:
        """Return two bytes per element."""
        check_dtype(self, layout, _WIDER)
        return math.prod(layout.shape) * self._dtype.itemsize

    def encode(self, tensor: torch.Tensor, layout: TensorLayout) -> Encoded:
        """Round the values; tensors that are not wider than 16 bits, or small, are encoded as raw."""
        if layout.dtype not in _WIDER or tensor.numel() < MIN_ELEMENTS:
            return RAW.encode(tensor, layout)
        numbers = torch.empty(tensor.numel(), dtype=self._dtype)
        clamped = 0
        for tile, target in zip(pieces(flat(tensor), TILE), pieces(numbers, TILE), strict=True):
            # Both comparisons are False if the tile holds a NaN.
            if float(tile.amax()) <= self._most and float(tile.amin()) >= -self._most:
                target.copy_(tile)
            else:
                clamped += self._clamp(tile, target)
        return Encoded(numbers.view(torch.uint8), self.name, clamped)

    def _clamp(self, tile: torch.Tensor, target: torch.Tensor) -> int:
        beyond = tile.isfinite() & (tile.abs() > self._most)
        target.copy_(torch.where(beyond, tile.clamp(-self._most, self._most), tile))
        return int(beyond.sum())

    def decode(self, payload: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
        """Widen the values, which is exact."""
        check_size(self, payload, layout)
        tensor = empty(layout)
        numbers = payload.view(self._dtype)
        for target, tile in zip(pieces(flat(tensor), TILE), pieces(numbers, TILE), strict=True):
            target.copy_(tile)
        return tensor


FP16 = Half("fp16", torch.float16)
BF16 = Half("bf16", torch.bfloat16)
