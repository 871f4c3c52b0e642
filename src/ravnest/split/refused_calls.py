"""Conditions that a guard requires before it lets an operator run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Guard = Callable[..., object]
"""Function that gets the arguments of an operator and raises ``RefusedCallError``."""


class RefusedCallError(Exception):
    """Reason why an operator is not called."""


def require(holds: bool, reason: str) -> None:
    if not holds:
        raise RefusedCallError(reason)


def numbers(values: Any, name: str) -> list[int]:
    """Return the integers of a tensor or a list."""
    if isinstance(values, Tensor):
        require(not values.is_floating_point() and not values.is_complex(), f"{name} has no integers")
        return values.reshape(-1).tolist()
    require(isinstance(values, list | tuple), f"{name} is not a list of integers")
    return list(values)


def within(values: Tensor, low: int, high: int, name: str) -> None:
    """Check that all elements are at least ``low`` and below ``high``."""
    if values.numel():
        least, most = (int(value) for value in torch.aminmax(values.detach()))
        require(low <= least and most < high, f"{name} has values outside of {low} to {high - 1}")
