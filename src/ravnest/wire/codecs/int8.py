"""Eight bits for each number, and a scale for each block of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import torch

from ravnest.wire.codecs.base import (
    BLOCK,
    RAW,
    TILE,
    Encoded,
    check_dtype,
    check_size,
    empty,
    flat,
    pieces,
)
from ravnest.wire.layout import Layout

_WIDER = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_STEPS = 127
_SCALE = torch.bfloat16
"""Eight digits times the seven of a step are exact in a float32, so that a block decoded and encoded
again gives the same bytes: what passes several nodes is rounded once."""
_LEAST = 2.0**-119
"""Blocks of smaller numbers take the scale of this one, the smallest that a float32 holds in full."""


class Int8:
    """Blocks of 128 numbers, each as the nearest of 255 steps between plus and minus its largest.

    The payload is the scales of all blocks, then a signed byte for each element. Nothing is clamped: a
    tensor with NaN, infinities, or numbers that leave no room for rounding travels raw.
    """

    name = "int8"

    def __init__(self) -> None:
        self._scratch = _Scratch()

    def nbytes(self, layout: Layout) -> int:
        """One for each element, two for each block."""
        check_dtype(self, layout, _WIDER)
        count = math.prod(layout.shape)
        return count + _blocks(count) * _SCALE.itemsize

    def encode(self, tensor: torch.Tensor, layout: Layout) -> Encoded:
        """In two passes over the tensor, as the arithmetic of scales is cheaper for all at once."""
        count = tensor.numel()
        if layout.dtype not in _WIDER or count < BLOCK:
            return RAW.encode(tensor, layout)
        source = flat(tensor)
        steps = torch.empty(_blocks(count), 1)
        lowest = torch.empty_like(steps)
        for tile, high, low in zip(
            _tiles(source), _rows(steps, count), _rows(lowest, count), strict=True
        ):
            wide = self._wide(tile)
            torch.amax(wide, 1, True, out=high)
            torch.amin(wide, 1, True, out=low)
        torch.maximum(steps, lowest.neg_(), out=steps)
        if not float(steps.amax()) < _most(layout.dtype):  # nor if it is NaN
            return RAW.encode(tensor, layout)
        payload = torch.empty(self.nbytes(layout), dtype=torch.uint8)
        scales, bytes_ = _parts(payload, count)
        scales.copy_(steps.clamp_(min=_LEAST).mul_(1 / _STEPS))
        torch.reciprocal(scales.float(), out=steps)
        parts = zip(_tiles(source), _rows(steps, count), _tiles(bytes_), strict=True)
        for tile, per_step, target in parts:
            scratch = self._scratch.like(tile)
            torch.mul(self._wide(tile), per_step, out=scratch)
            target.copy_(scratch.round_())
        return Encoded(payload, self.name)

    def decode(self, payload: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Steps times their scale."""
        check_size(self, payload, layout)
        tensor = empty(layout)
        count = tensor.numel()
        scales, bytes_ = _parts(payload, count)
        parts = zip(_tiles(flat(tensor)), _rows(scales.float(), count), _tiles(bytes_), strict=True)
        for target, scale, tile in parts:
            wide = target if target.dtype is torch.float32 else self._scratch.like(tile)
            wide.copy_(tile).mul_(scale)
            if wide is not target:
                target.copy_(wide)
        return tensor

    def _wide(self, tile: torch.Tensor) -> torch.Tensor:
        return tile if tile.dtype is torch.float32 else self._scratch.like(tile).copy_(tile)


class _Scratch(threading.local):
    """Memory for one tile, of each thread its own: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        self._memory = torch.empty(TILE // BLOCK, BLOCK)

    def like(self, tile: torch.Tensor) -> torch.Tensor:
        rows, columns = tile.shape
        memory = self._memory[:rows]
        return memory if columns == BLOCK else memory[:, :columns]


def _most(dtype: torch.dtype) -> float:
    """Beyond it a scale that was rounded up would not come back as a finite number."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max) * (1 - 2**-7)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _parts(payload: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales, as a column, and the bytes of the elements."""
    size = len(payload) - count
    return payload[:size].view(_SCALE).unsqueeze(1), payload[size:].view(torch.int8)


def _tiles(elements: torch.Tensor) -> Iterator[torch.Tensor]:
    """Whole blocks as rows, a tile of them at a time, then what is left as a row of its own."""
    whole = elements.numel() // BLOCK
    yield from pieces(elements[: whole * BLOCK].view(whole, BLOCK), TILE // BLOCK)
    if elements.numel() % BLOCK:
        yield elements[whole * BLOCK :].unsqueeze(0)


def _rows(scales: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """The scales of each of the tiles of ``count`` elements."""
    whole = count // BLOCK
    yield from pieces(scales[:whole], TILE // BLOCK)
    if count % BLOCK:
        yield scales[whole:]


INT8 = Int8()
