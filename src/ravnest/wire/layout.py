"""Supported tensors and their memory layout."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ravnest.errors import WireError
from ravnest.types import is_dense

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.complex128,
        torch.complex64,
        torch.complex32,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorLayout:
    """Type, shape and strides of a dense tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def plain_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as torch computes them."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached, on the CPU and dense; shares memory if possible."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise WireError(f"{name!r} is a {tensor.layout} tensor; only dense tensors can be sent")
    if tensor.dtype not in NAMES:
        raise WireError(f"{name!r} has dtype {tensor.dtype}, which cannot be sent")
    if tensor.is_meta:
        raise WireError(f"{name!r} is a meta tensor, which has no values")
    tensor = tensor.detach().cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if is_dense(tensor.shape, tensor.stride()) else tensor.contiguous()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as flat uint8."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
