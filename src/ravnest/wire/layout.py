"""Which tensors may travel, and how they lie in memory."""

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
    """Everything about a dense tensor but its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def plain_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch has them."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its history, on the CPU and dense; the same memory where possible."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise WireError(f"{name!r} is a {tensor.layout} tensor; only plain dense ones can travel")
    if tensor.dtype not in NAMES:
        raise WireError(f"{name!r} is of {tensor.dtype}, which cannot travel")
    if tensor.is_meta:
        raise WireError(f"{name!r} is a meta tensor: it has no values")
    tensor = tensor.detach().cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if is_dense(tensor.shape, tensor.stride()) else tensor.contiguous()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as flat uint8."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
