"""A learning rate that is described by pieces: warm-up, plateau and decay as plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

SHAPES = ("constant", "linear", "cosine", "polynomial", "inverse_sqrt")
UNWARMED = 10_000
"""Steps after which a rate without a warm-up has fallen to the square root of one half."""


class PiecewiseLR(LRScheduler):
    """Multiplies the learning rate by a factor that runs through pieces, one after the other.

    Each piece lasts for a number of steps, from a first factor to a last one, along a shape. After the
    last piece its last factor stays. ``polynomial`` uses ``power``; ``inverse_sqrt`` falls with the
    square root of all steps, in proportion to those before it, and has no last factor.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shapes: Sequence[str],
        steps: Sequence[int],
        first: Sequence[float],
        last: Sequence[float],
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        """The sequences have one value for each piece."""
        if not shapes or not len(shapes) == len(steps) == len(first) == len(last):
            raise ValueError("shapes, steps, first and last must have one value for each piece")
        if unknown := sorted(set(shapes) - set(SHAPES)):
            raise ValueError(f"no shape is called {unknown[0]!r}, only {', '.join(SHAPES)}")
        if any(not count >= 0 for count in steps) or any(not factor >= 0 for factor in (*first, *last)):
            raise ValueError("steps and factors must not be negative")
        self.shapes, self.steps = list(shapes), [int(count) for count in steps]
        self.first, self.last, self.power = list(first), list(last), power
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group."""
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate after so many steps."""
        ends = list(accumulate(self.steps))
        piece = next((index for index, end in enumerate(ends) if step < end), len(ends) - 1)
        if step >= ends[piece] and self.shapes[piece] != "inverse_sqrt":
            return self.last[piece]
        return self._within(piece, step, ends[piece] - self.steps[piece])

    def _within(self, piece: int, step: int, start: int) -> float:
        shape, first, last = self.shapes[piece], self.first[piece], self.last[piece]
        if shape == "inverse_sqrt":
            scale = start or UNWARMED
            return first * math.sqrt(scale / (scale + step - start))
        share = (step - start) / self.steps[piece]
        match shape:
            case "linear":
                left = 1 - share
            case "cosine":
                left = (1 + math.cos(math.pi * share)) / 2
            case "polynomial":
                left = (1 - share) ** self.power
            case _:
                return first
        return last + (first - last) * left
