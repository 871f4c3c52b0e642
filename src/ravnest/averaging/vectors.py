"""Conversion between the tensors of a ring and one flat vector."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_BLOCK = 32_000
"""Elements checked at once: they stay in the cache, and torch starts no further threads."""


def vector_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of a ring's sums: float64 if any tensor has it, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """Copy all values into one vector: tensors in the order of the mapping, elements by index.

    The order in memory is not used, because it may differ between the members of a ring.
    """
    flat = torch.empty(sum(t.numel() for t in tensors.values()), dtype=vector_dtype(tensors.values()))
    start = 0
    for tensor in tensors.values():
        stop = start + tensor.numel()
        flat[start:stop].view(tensor.shape).copy_(tensor.detach())
        start = stop
    return flat


def views(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of the values of each tensor in a vector that ``flatten`` made of such tensors."""
    expected = sum(t.numel() for t in like.values())
    assert vector.numel() == expected, f"{vector.numel()} values for tensors with {expected}"
    found: dict[str, Tensor] = {}
    start = 0
    for name, tensor in like.items():
        stop = start + tensor.numel()
        found[name] = vector[start:stop].view(tensor.shape)
        start = stop
    return found


def copy_like(values: Tensor, like: Tensor) -> Tensor:
    """Copy values into new memory with the dtype and strides of ``like``.

    Strides with gaps or overlaps become contiguous.
    """
    made = torch.empty_like(like, memory_format=torch.preserve_format, requires_grad=False)
    return made.copy_(values)


def is_finite(vector: Tensor) -> bool:
    """Return True if a vector holds neither NaN nor infinities."""
    # A finite sum proves finite values; a sum that is not finite may be an overflow, so look closer.
    for block in torch.split(vector, _BLOCK):
        if not math.isfinite(float(block.sum())) and not bool(torch.isfinite(block).all()):
            return False
    return True
