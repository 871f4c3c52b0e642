"""8-bit codec: one byte per value and one scale per block of values."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

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

_WIDER = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_BLOCK = 32
"""Values per scale: the smallest block with which tensors are still 3.7 times smaller. Small blocks are
more exact, because the largest value of a block sets its step."""
_STEPS = 127
_SCALE = torch.bfloat16
"""dtype of a scale. Its 8 significant bits times the 7 bits of a value are exact in float32, so a
decoded block encodes to the same bytes: a value that passes several nodes is rounded once."""
_LEAST = 2.0**-119
"""Lower bound of the largest value of a block: the smallest one whose scale float32 holds exactly."""


class Int8:
    """Rounds each value to one of 255 steps between plus and minus the largest value of its block of 32.

    The payload holds the scales of all blocks, then a signed byte per element. Nothing is clamped: a
    tensor with NaN, infinities, or values too large for rounding is encoded as raw.
    """

    name = "int8"

    def __init__(self) -> None:
        self._scratch = _Scratch()

    def nbytes(self, layout: TensorLayout) -> int:
        """Return one byte per element and two per block."""
        check_dtype(self, layout, _WIDER)
        count = math.prod(layout.shape)
        return count + _blocks(count) * _SCALE.itemsize

    def encode(self, tensor: torch.Tensor, layout: TensorLayout) -> Encoded:
        """Encode in two passes, because computing all scales at once is cheaper."""
        count = tensor.numel()
        if layout.dtype not in _WIDER or count < MIN_ELEMENTS:
            return RAW.encode(tensor, layout)
        tiles = list(_tiles(flat(tensor)))
        steps = torch.empty(_blocks(count), 1)
        rows = list(_rows(steps, count))
        for tile, largest in zip(tiles, rows, strict=True):
            scratch = self._scratch.like(tile)
            torch.amax(_absolute(tile, scratch), 1, True, out=largest)
        if not float(steps.amax()) < _most(layout.dtype):  # False for NaN
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
        """Multiply steps by their scale."""
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
    """Memory for one tile per thread: allocating it each time costs more than the arithmetic."""

    def __init__(self) -> None:
        self._memory = torch.empty(TILE // _BLOCK, _BLOCK)

    def like(self, tile: torch.Tensor) -> torch.Tensor:
        rows, columns = tile.shape
        memory = self._memory[:rows]
        return memory if columns == _BLOCK else memory[:, :columns]


def _most(dtype: torch.dtype) -> float:
    """Return the bound above which a scale that was rounded up might decode to infinity."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max) * (1 - 2**-7)


def _absolute(tile: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    if tile.dtype is torch.float32:
        return torch.abs(tile, out=scratch)
    return scratch.copy_(tile).abs_()


def _blocks(count: int) -> int:
    return -(-count // _BLOCK)


def _parts(payload: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales, as a column, and the bytes of the elements."""
    size = len(payload) - count
    return payload[:size].view(_SCALE).unsqueeze(1), payload[size:].view(torch.int8)


def _tiles(elements: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield tiles with whole blocks as rows, then the remaining elements as a row of their own."""
    whole = elements.numel() // _BLOCK
    yield from pieces(elements[: whole * _BLOCK].view(whole, _BLOCK), TILE // _BLOCK)
    if elements.numel() % _BLOCK:
        yield elements[whole * _BLOCK :].unsqueeze(0)


def _rows(scales: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """Yield the scales of each tile of ``count`` elements."""
    whole = count // _BLOCK
    yield from pieces(scales[:whole], TILE // _BLOCK)
    if count % _BLOCK:
        yield scales[whole:]


INT8 = Int8()
