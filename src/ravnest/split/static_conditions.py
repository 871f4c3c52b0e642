"""Evaluate conditions on random numbers whose outcome does not depend on the number.

Layer dropping is written as ``if torch.rand([]) < self.layerdrop``, also in models that never drop a
layer. A uniform number is in [0, 1), so a comparison with a bound outside this range has a known
outcome, and the model can be captured. The number is still drawn, so the order of draws is the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_UNIFORM = {torch.rand, torch.rand_like}
_BELOW = {torch.Tensor.lt, torch.Tensor.__lt__, torch.lt, operator.lt}
_AT_MOST = {torch.Tensor.le, torch.Tensor.__le__, torch.le, operator.le}
_ABOVE = {torch.Tensor.gt, torch.Tensor.__gt__, torch.gt, operator.gt}
_AT_LEAST = {torch.Tensor.ge, torch.Tensor.__ge__, torch.ge, operator.ge}


class StaticConditions(TorchFunctionMode):
    """Torch function mode in which ``bool()`` of a comparison with a known outcome is that outcome."""

    def __init__(self) -> None:
        super().__init__()
        self._uniform: dict[int, torch.Tensor] = {}
        self._outcomes: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__bool__ and id(args[0]) in self._outcomes:
            return self._outcomes[id(args[0])][1]
        result = func(*args, **(kwargs or {}))
        if func in _UNIFORM:
            self._uniform[id(result)] = result  # kept alive, so that its id is not reused
        elif len(args) == 2 and id(args[0]) in self._uniform and isinstance(args[1], int | float):
            outcome = _outcome(func, args[1])
            if outcome is not None:
                self._outcomes[id(result)] = (result, outcome)
        return result


def _outcome(func: Callable[..., Any], bound: float) -> bool | None:
    """Return the outcome of comparing any number in [0, 1) with ``bound``; None if it varies."""
    if func in _BELOW | _ABOVE | _AT_MOST | _AT_LEAST:
        less = func in _BELOW | _AT_MOST
        if bound >= 1:
            return less
        if bound < 0 or (bound == 0 and func in _BELOW | _AT_LEAST):
            return not less
    return None
