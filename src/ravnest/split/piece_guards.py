"""Checks of operators that return many views: each takes time, also in backward, but no memory."""

from __future__ import annotations

from typing import Any

import torch

from ravnest.split.refused_calls import Guard, require

MOST_PIECES = 10_000
"""Most tensors that one operator returns; a stage uses each of them with an operation of its own."""


def _count(self: torch.Tensor, *args: Any, **named: Any) -> None:
    """Refuse too large a number of pieces, and too many places to cut at."""
    for value in (*args, *named.values()):
        if isinstance(value, int):
            _check(value)
        elif isinstance(value, list | tuple):
            _check(len(value))
        elif isinstance(value, torch.Tensor):
            is_number = value.dim() == 0 and value.dtype == torch.int64
            _check(int(value) if is_number else value.numel())


def _length(self: torch.Tensor, split_size: int, dim: int = 0) -> None:
    """Refuse pieces of a length of which too many fit into the tensor."""
    if split_size > 0 and -self.dim() <= dim < self.dim():
        _check(-(-self.shape[dim] // split_size))


def _each(self: torch.Tensor, dim: int = 0) -> None:
    """Refuse a dimension that is too long to be taken apart."""
    _length(self, 1, dim)


def _check(number: int) -> None:
    require(number <= MOST_PIECES, f"{number} pieces are more than {MOST_PIECES}")


PIECE_GUARDS: dict[str, Guard] = {
    **dict.fromkeys(("chunk", "dsplit", "hsplit", "vsplit", "tensor_split"), _count),
    "split.Tensor": _length,
    "unbind": _each,
}
"""Guards by the operator's name."""
