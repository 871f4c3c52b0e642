"""Casts of weights that the micro-batches in flight share.

Autograd keeps the bfloat16 copy of a weight for each forward pass until its backward pass. The copies
of the same weight are equal, so that a stage makes one and makes it anew when the weight has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

LEAST_ELEMENTS = 1 << 12
"""Size from which a cast is shared: a smaller one costs less than the call in Python."""


class SharedCast:
    """The operator of one cast of a weight in a graph."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function = function
        self._weight: weakref.ref[torch.Tensor] | None = None
        self._cast = torch.empty(0)
        self._state: tuple[int, ...] = ()
        """Changes and address of the weight, and changes of the cast, when it was made."""

    def __call__(self, weight: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in another type; gradients flow as through the operator."""
        if weight.numel() < LEAST_ELEMENTS:
            return self._function(weight, dtype=dtype)
        known = self._weight is not None and self._weight() is weight
        if not known or self._state != self._state_of(weight):
            with torch.no_grad():
                self._cast = self._function(weight, dtype=dtype)
            self._weight, self._state = weakref.ref(weight), self._state_of(weight)
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return self._cast
        result: torch.Tensor = _CastOf.apply(weight, [self._cast])  # type: ignore[no-untyped-call]
        return result

    def _state_of(self, weight: torch.Tensor) -> tuple[int, ...]:
        return weight._version, weight.data_ptr(), self._cast._version


class _CastOf(torch.autograd.Function):
    """A cast that exists already."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, cast: list[torch.Tensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype = weight.dtype
        return cast[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        (gradient,) = gradients
        return None if gradient is None else gradient.to(ctx.dtype), None
