"""Eight bits for each number, and a scale for each block of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

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

_WIDER = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_BLOCK = 32
"""The fewest numbers to a scale with which tensors still take 3.7 times fewer bytes: the largest of a
few is nearer to all of them."""
_STEPS = 127
_SCALE = torch.bfloat16
"""Eight digits times the seven of a step are exact in a float32, so that a block decoded and encoded
again gives the same bytes: what passes several nodes is rounded once."""
_LEAST = 2.0**-119
"""Blocks of smaller numbers take the scale of this one, the smallest that a float32 holds in full."""


class Int8:
    """Blocks of 32 numbers, each as the nearest of 255 steps between plus and minus its largest.

    The payload is the scales of all blocks, then a signed byte for each element. Nothing is clamped: a
    tensor with NaN, infinities, or numbers that leave no room for rounding travels raw.
    """

    name = "int8"

    def __init__(self) -> None:
        self._scratch = _Scratch()

    def nbytes(self, layout: TensorLayout) -> int:
        """One for each element, two for each block."""
        check_dtype(self, layout, _WIDER)
        count = math.prod(layout.shape)
        return count + _blocks(count) * _SCALE.itemsize

    def encode(self, tensor: torch.Tensor, layout: TensorLayout) -> Encoded:
        """In two passes over the tensor, as the arithmetic of scales is cheaper for all at once."""
        count = tensor.numel()
        if layout.dtype not in _WIDER or count < SMALLEST:
            return RAW.encode(tensor, layout)
        tiles = list(_tiles(flat(tensor)))
        steps = torch.empty(_blocks(count), 1)
        rows = list(_rows(steps, count))
        for tile, largest in zip(tiles, rows, strict=True):
            scratch = self._scratch.like(tile)
            torch.amax(_absolute(tile, scratch), 1, True, out=largest)
        if not float(steps.amax()) < _most(layout.dtype):  # nor if it is NaN
            return RAW.encode(tensor, layout)
        payload = torch.empty(self.nbytes(layout), dtype=torch.uint8)
        scales, bytes_ = _parts(payload, count)
        scales.copy_(steps.clamp_(min=_LEAST).mul_(1 / _STEPS))
        torch.reciprocal(scales.float(), out=steps)
        for tile, per_step, target in zip(tiles, rows, _tiles(bytes_), strict=True):
            scratch = self._scratch.like(tile)
            wide = tile if tile.dtype is torch.float32 else scratch.copy_(tile)
            target.copy_(torch.mul(wide, per_step, out=scratch).round_())
        return Encoded(payload, self.name)

    def decode(self, payload: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
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


class _Scratch(threading.local):
    """Memory for one tile, of each thread its own: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        self._memory = torch.empty(TILE // _BLOCK, _BLOCK)

    def like(self, tile: torch.Tensor) -> torch.Tensor:
        rows, columns = tile.shape
        memory = self._memory[:rows]
        return memory if columns == _BLOCK else memory[:, :columns]


def _most(dtype: torch.dtype) -> float:
    """Beyond it a scale that was rounded up would not come back as a finite number."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max) * (1 - 2**-7)


def _absolute(tile: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    if tile.dtype is torch.float32:
        return torch.abs(tile, out=scratch)
    return scratch.copy_(tile).abs_()


def _blocks(count: int) -> int:
    return -(-count // _BLOCK)


def _parts(payload: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales, as a column, and the bytes of the elements."""
    size = len(payload) - count
    return payload[:size].view(_SCALE).unsqueeze(1), payload[size:].view(torch.int8)


def _tiles(elements: torch.Tensor) -> Iterator[torch.Tensor]:
    """Whole blocks as rows, a tile of them at a time, then what is left as a row of its own."""
    whole = elements.numel() // _BLOCK
    yield from pieces(elements[: whole * _BLOCK].view(whole, _BLOCK), TILE // _BLOCK)
    if elements.numel() % _BLOCK:
        yield elements[whole * _BLOCK :].unsqueeze(0)


def _rows(scales: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """The scales of each of the tiles of ``count`` elements."""
    whole = count // _BLOCK
    yield from pieces(scales[:whole], TILE // _BLOCK)
    if count % _BLOCK:
        yield scales[whole:]


INT8 = Int8()
