"""The tensors of a ring as one vector, which is what goes round, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_BLOCK = 32_000
"""Elements that are checked at once: they stay in the cache, and torch takes no further threads."""


def vector_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """What a ring sums in: float64 where it holds any, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """A copy of all values: in the order of the mapping, and of the indices within a tensor.

    Not in the order of memory, which may differ between the members of a ring.
    """
    flat = torch.empty(sum(t.numel() for t in tensors.values()), dtype=vector_dtype(tensors.values()))
    start = 0
    for tensor in tensors.values():
        stop = start + tensor.numel()
        flat[start:stop].view(tensor.shape).copy_(tensor.detach())
        start = stop
    return flat


def views(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Where the values of each tensor are in the vector that ``flatten`` made of such tensors."""
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
    """The values in memory of their own, with the dtype and the strides of a tensor.

    Strides with gaps or overlaps become those of a contiguous tensor.
    """
    made = torch.empty_like(like, memory_format=torch.preserve_format, requires_grad=False)
    return made.copy_(values)


def is_finite(vector: Tensor) -> bool:
    """Whether there is no NaN and no infinity in it."""
    # A sum of finite values can overflow, so it only clears: what it does not clear is looked at.
    for block in torch.split(vector, _BLOCK):
        if not math.isfinite(float(block.sum())) and not bool(torch.isfinite(block).all()):
            return False
    return True
