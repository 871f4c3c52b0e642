"""Tensors of an optimizer's state in 8 bits per value.

Values are packed in blocks with one scale each. A code c of L levels stands for
``scale * (c / L) ** 4``: small values of a block keep a relative precision, as the second moment of Adam
needs, by whose root steps are divided. A value between two codes is rounded to one of them at random, so
that its mean stays: an average that moves by less than the distance of two codes would otherwise not
move at all. Scales are powers of two, so that a block keeps its scale, and its values, while the largest
changes a little. What is packed from unpacked values is the same again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ravnest.plan.memory import PACKED_BLOCK

_CHUNK = 1 << 7
"""Blocks that are packed at once: temporaries stay in the processor's cache."""
_SIGNED, _UNSIGNED = 127, 255
"""Levels of values of both signs, and of values that are not negative."""
_LEAST_EXPONENT = -90
"""Exponent of the smallest scale; smaller values are rounded to 0 or to the smallest code."""


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A float32 tensor in 8 bits per value."""

    shape: torch.Size
    codes: torch.Tensor
    """One row for each block; int8 for values of both signs, else uint8."""
    scales: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return self.codes.nbytes + self.scales.nbytes

    @classmethod
    def of(cls, tensor: torch.Tensor, seed: int) -> PackedTensor:
        """Pack a float32 tensor; ``seed`` decides how values between two codes are rounded."""
        flat = tensor.detach().reshape(-1)
        count, device = -(-flat.numel() // PACKED_BLOCK), flat.device
        signed = not bool(flat.min() >= 0)  # NaN counts as signed
        codes = torch.empty(
            count, PACKED_BLOCK, dtype=torch.int8 if signed else torch.uint8, device=device
        )
        scales = torch.empty(count, 1, device=device)
        draw = torch.Generator(device).manual_seed(seed)
        # One chunk of random numbers for all chunks: each value has others in the next update.
        chances = torch.rand(min(count, _CHUNK), PACKED_BLOCK, generator=draw, device=device)
        for first in range(0, count, _CHUNK):
            rows = slice(first, min(first + _CHUNK, count))
            blocks = flat[rows.start * PACKED_BLOCK : rows.stop * PACKED_BLOCK]
            missing = (rows.stop - rows.start) * PACKED_BLOCK - blocks.numel()
            if missing:
                blocks = torch.nn.functional.pad(blocks, (0, missing))
            _pack(blocks.view(-1, PACKED_BLOCK), codes[rows], scales[rows], chances)
        return cls(tensor.shape, codes, scales)

    def unpack(self, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values; in the memory layout of ``like``, a tensor of this shape."""
        flat = torch.empty(self.codes.numel(), device=self.codes.device)
        for first in range(0, len(self.codes), _CHUNK):
            codes, scales = self.codes[first : first + _CHUNK], self.scales[first : first + _CHUNK]
            values = flat[first * PACKED_BLOCK :][: codes.numel()].view(-1, PACKED_BLOCK)
            values.copy_(codes)
            _decode(values, _levels(codes), signed=codes.dtype == torch.int8).mul_(scales)
        whole = flat[: self.shape.numel()].view(self.shape)
        if like is None or like.is_contiguous():
            return whole
        return torch.empty_like(like, dtype=torch.float32, requires_grad=False).copy_(whole)


def _levels(codes: torch.Tensor) -> int:
    return _SIGNED if codes.dtype == torch.int8 else _UNSIGNED


def _decode(codes: torch.Tensor, levels: int, *, signed: bool = False) -> torch.Tensor:
    """Change float codes to values of a block with scale 1."""
    codes.div_(levels)
    for _ in range(2):
        codes.mul_(codes.abs() if signed else codes)
    return codes


def _pack(
    blocks: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, chances: torch.Tensor
) -> None:
    """Pack blocks, one in each row; ``chances`` are random numbers from 0 to 1.

    Comparisons of tensors are slow, so that this does without.
    """
    levels = _levels(codes)
    values = blocks.abs()
    scales.copy_(_scales(values.amax(1, keepdim=True), levels))
    values.div_(scales).clamp_(max=1)
    low = values.sqrt().sqrt_().mul_(levels).floor_()
    below = _decode(low.clone(), levels)
    gap = _decode(low + 1, levels).sub_(below)
    share = values.sub_(below).div_(gap)
    low.add_(share.add_(chances[: len(low)]).floor_().clamp_(0, 1))
    # Only zero becomes zero: steps are divided by the root of a second moment.
    low.clamp_(1, levels).mul_(blocks.sign())
    codes.copy_(low.nan_to_num_(0.0))


def _scales(largest: torch.Tensor, levels: int) -> torch.Tensor:
    """Return the powers of two by which blocks with these largest values are divided.

    They are the smallest that are not below, or half of that if the value could be rounded to the half:
    the same scale follows from the unpacked values. NaN for what is not finite.
    """
    fraction, exponent = torch.frexp(largest)
    exponent = (exponent - (fraction < _above_half(levels)).int()).clamp_(min=_LEAST_EXPONENT)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return scale.where(largest.isfinite(), torch.nan)


@cache
def _above_half(levels: int) -> float:
    """Return the smallest value above one half that a code stands for."""
    values: list[float] = _decode(torch.arange(levels + 1.0), levels).tolist()
    return next(value for value in values if value > 0.5)
