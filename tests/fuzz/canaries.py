"""Make a planned call twice with different bytes around its tensors and in fresh memory.

A result that differs was computed from memory outside the tensors; bytes around a tensor that changed
were written by the operator.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from call_plans import CallPlan, TensorPlan

FILLS = (0x55, 0xAA)
PAD = 8192
"""Bytes on each side of a tensor; a multiple of every alignment."""
MOST_COMPARED = 1 << 20
"""Elements of a result above which it is not compared, because it would take long to copy."""
OUT_OF_MEMORY = "MemoryError"
"""Outcome of a call that wants more memory than it may have."""
_M_PERTURB = -6
_SPECIAL = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, 1e30, -1e30, 1e-45, -1.0])
_SPECIAL_INTS = (-1, -(2**63), 2**63 - 1, 2**31, -(2**31), 2**62, 1000, -100)

Outcome = tuple[str, tuple[Any, ...]]
"""Result of a call: "value" or the type of the error, and its contents as plain values."""


def check_call(function: Callable[..., Any], plan: CallPlan) -> tuple[str, str]:
    """Return what is wrong with a call ("" for nothing) and its outcome ("value" or an error's type)."""
    outcomes: list[Outcome] = []
    drawn: dict[int, torch.Tensor] = {}
    for fill in FILLS:
        _perturb(fill)
        made = _Tensors(fill, drawn)
        args = [made.argument(value) for value in plan.args]
        kwargs = {name: made.argument(value) for name, value in plan.kwargs.items()}
        outcome = _call(function, args, kwargs, plan)
        if made.changed_outside():
            return "it wrote outside of its tensors", outcome[0]
        outcomes.append((outcome[0], (*outcome[1], *made.contents())))
    first, second = outcomes
    if first != second:
        return f"it read outside of its tensors: {_difference(first, second)}", first[0]
    return "", first[0]


class _Tensors:
    """Tensors of one call, each inside a larger buffer of one repeated byte."""

    def __init__(self, fill: int, drawn: dict[int, torch.Tensor]) -> None:
        self._fill = fill
        self._drawn = drawn
        """Elements by the identity of their plan: those of the first call serve the second one too."""
        self._buffers: list[torch.Tensor] = []

    def argument(self, value: Any) -> Any:
        if isinstance(value, TensorPlan):
            return self._tensor(value)
        if isinstance(value, list):
            return [self.argument(item) for item in value]
        return value

    def changed_outside(self) -> bool:
        pad = bytes((self._fill,)) * PAD
        arrays = [buffer.numpy() for buffer in self._buffers]
        return any(array[:PAD].tobytes() != pad or array[-PAD:].tobytes() != pad for array in arrays)

    def contents(self) -> Iterator[bytes]:
        for buffer in self._buffers:
            yield buffer[PAD:-PAD].numpy().tobytes()

    def _tensor(self, plan: TensorPlan) -> torch.Tensor:
        item = plan.dtype.itemsize
        size = plan.extent * item
        buffer = torch.full((PAD + size + PAD,), self._fill, dtype=torch.uint8)
        self._buffers.append(buffer)
        inside = buffer[PAD : PAD + size].view(plan.dtype)
        if plan.extent:
            if id(plan) not in self._drawn:
                self._drawn[id(plan)] = _elements(plan)
            inside.copy_(self._drawn[id(plan)])
        tensor = torch.as_strided(inside, plan.sizes, plan.strides, PAD // item)
        return tensor.requires_grad_() if plan.gradient else tensor


def _elements(plan: TensorPlan) -> torch.Tensor:
    generator = torch.Generator().manual_seed(plan.seed)
    count = plan.extent
    if plan.values:
        kind = torch.int64 if isinstance(plan.values[0], int) else torch.float64
        values = torch.tensor(plan.values, dtype=kind)
        return values.repeat(count // len(values) + 1)[:count].to(plan.dtype)
    if plan.bound is None and (plan.dtype.is_floating_point or plan.dtype.is_complex):
        values = torch.randn(count, generator=generator)
        special = _SPECIAL
    else:
        low, high = (0, plan.bound) if plan.bound is not None else (-3, 5)
        if not plan.dtype.is_signed:
            low = 0
        values = torch.randint(low, high, (count,), generator=generator)
        special = torch.tensor([*_SPECIAL_INTS, plan.bound or 0])
    if plan.hostile:
        picks = torch.randint(0, count, (max(count // 8, 1),), generator=generator)
        kinds = torch.randint(0, len(special), (len(picks),), generator=generator)
        values[picks] = special[kinds]
    if plan.dtype is torch.bool:
        raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
        return raw.view(torch.bool) if plan.hostile else values.remainder(2).bool()
    return values.to(plan.dtype)


def _call(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], plan: CallPlan
) -> Outcome:
    torch.default_generator.manual_seed(plan.seed)  # torch.manual_seed takes far longer
    try:
        result = function(*args, **kwargs)
        values = [_plain(value) for value in _flat(result)]
        if plan.backward:
            leaves = [t for t in _flat([args, list(kwargs.values())]) if _wants_gradient(t)]
            outputs = [t for t in _flat(result) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
            if leaves and outputs and all(t.numel() <= MOST_COMPARED for t in outputs):
                ones = [torch.ones_like(t) for t in outputs]
                values += map(_plain, torch.autograd.grad(outputs, leaves, ones, allow_unused=True))
    except MemoryError:
        return OUT_OF_MEMORY, ()
    except Exception as error:  # any error is a refusal; what it says must not depend on memory outside
        if "can't allocate memory" in str(error):  # as torch says it
            return OUT_OF_MEMORY, ()
        return type(error).__name__, (_without_addresses(str(error)),)
    return "value", tuple(values)


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(_flat, value))
    else:
        yield value


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    kind = (value.dtype, tuple(value.shape))
    if value.numel() > MOST_COMPARED or value.device.type != "cpu":
        return kind
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    return kind, plain.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


def _without_addresses(text: str) -> str:
    return text.split("Exception raised from", 1)[0][:300]


def _difference(first: Outcome, second: Outcome) -> str:
    if first[0] != second[0]:
        return f"{first[0]} and {second[0]}"
    pairs = zip(first[1], second[1], strict=False)
    at, pair = next(((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1]), (-1, ("", "")))
    return f"result {at}: {str(pair[0])[:120]} and {str(pair[1])[:120]}"


def _perturb(fill: int) -> None:
    """Fill memory that malloc hands out with a byte; does nothing with other C libraries than glibc."""
    if _mallopt is not None:
        _mallopt(_M_PERTURB, fill)


def _find_mallopt() -> Callable[[int, int], int] | None:
    return getattr(ctypes.CDLL(None), "mallopt", None)


_mallopt = _find_mallopt()
