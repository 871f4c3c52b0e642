"""Sixteen bits for each number: ``fp16`` with more digits, ``bf16`` with more range."""

from __future__ import annotations

import math

import torch

from ravnest.wire.codecs.base import (
    RAW,
    SMALLEST,
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
    """Numbers rounded to the nearest of a 16-bit type.

    What is finite and too large becomes the largest finite number, and is counted. NaN and infinities
    stay what they are: they tell that something is wrong, and hiding that helps nobody.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype
        self._most = torch.finfo(dtype).max

    def nbytes(self, layout: TensorLayout) -> int:
        """Two for each element."""
        check_dtype(self, layout, _WIDER)
        return math.prod(layout.shape) * self._dtype.itemsize

    def encode(self, tensor: torch.Tensor, layout: TensorLayout) -> Encoded:
        """Rounded; raw for what is no wider, or tiny."""
        if layout.dtype not in _WIDER or tensor.numel() < SMALLEST:
            return RAW.encode(tensor, layout)
        numbers = torch.empty(tensor.numel(), dtype=self._dtype)
        clamped = 0
        for tile, target in zip(pieces(flat(tensor), TILE), pieces(numbers, TILE), strict=True):
            # With a NaN in the tile both comparisons are False.
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
        """Widened, which loses nothing."""
        check_size(self, payload, layout)
        tensor = empty(layout)
        numbers = payload.view(self._dtype)
        for target, tile in zip(pieces(flat(tensor), TILE), pieces(numbers, TILE), strict=True):
            target.copy_(tile)
        return tensor


FP16 = Half("fp16", torch.float16)
BF16 = Half("bf16", torch.bfloat16)
