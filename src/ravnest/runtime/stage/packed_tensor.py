"""Tensors of an optimizer's state in 8 bits per value.

Values are packed in blocks with one scale each, a power of two that is not below any of them. A code c
of L levels stands for ``scale * (c / L) ** 4``: small values of a block keep a relative precision, as
the second moment of Adam needs, by whose root steps are divided. A value between two codes is rounded to
one of them at random, so that its mean stays: an average that moves by less than the distance of two
codes would otherwise not move at all. What is packed from unpacked values is the same again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ravnest.plan.memory import PACKED_BLOCK

_CHUNK = 1 << 10
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
        signed = bool((flat < 0).any())
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
            signs = values.sign() if codes.dtype == torch.int8 else None
            _decode(values, _levels(codes)).mul_(scales)
            if signs is not None:
                values.mul_(signs)
        whole = flat[: self.shape.numel()].view(self.shape)
        if like is None or like.is_contiguous():
            return whole
        return torch.empty_like(like, dtype=torch.float32, requires_grad=False).copy_(whole)


def _levels(codes: torch.Tensor) -> int:
    return _SIGNED if codes.dtype == torch.int8 else _UNSIGNED


def _decode(codes: torch.Tensor, levels: int) -> torch.Tensor:
    """Change float codes to values of a block with scale 1."""
    codes.div_(levels)
    codes.mul_(codes)
    return codes.mul_(codes)


def _pack(
    blocks: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, chances: torch.Tensor
) -> None:
    """Pack blocks, one in each row; ``chances`` are random numbers from 0 to 1."""
    levels = _levels(codes)
    values = blocks.abs()
    scales.copy_(_scales(values.amax(1, keepdim=True)))
    values.div_(scales)
    low = values.sqrt().sqrt_().mul_(levels).floor_()
    below = _decode(low.clone(), levels)
    above = _decode(low + 1, levels)
    share = (values - below).div_(above.sub_(below))
    up = chances[: len(values)].lt(share)
    # The largest value stays above half of the scale, and what is not zero stays so: the same scale and
    # signs follow from the unpacked values.
    up |= (values > 0.5) & (below <= 0.5)
    up |= (low == 0) & (blocks != 0)
    low.add_(up)
    if codes.dtype == torch.int8:
        low.copysign_(blocks)
    codes.copy_(low.nan_to_num_(0.0))


def _scales(largest: torch.Tensor) -> torch.Tensor:
    """Return the smallest powers of two that are not below; NaN for what is not finite."""
    fraction, exponent = torch.frexp(largest)
    exponent = (exponent - (fraction == 0.5).int()).clamp_(min=_LEAST_EXPONENT)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return scale.where(largest.isfinite(), torch.nan)
