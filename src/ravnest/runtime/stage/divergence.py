"""Losses and weights that are not finite, at which training stops."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ravnest.errors import RunError

ADVICE = (
    "lower the learning rate, set clip_grad_norm, or look for invalid samples; with stop_on_nan=None "
    "training does not stop"
)


class DivergedError(RunError):
    """A loss or a weight is not finite."""


class Divergence:
    """Counter of updates in a row whose loss is NaN or infinite. Used by one thread."""

    def __init__(self, limit: int | None) -> None:
        """``limit``: such updates in a row after which training stops; None: it never does."""
        self._limit = limit
        self._in_a_row = 0

    def check_loss(self, loss: float, update: int, epoch: int) -> None:
        """Raise ``DivergedError`` if the loss of a micro-batch is one too many, before its update.

        ``update`` and ``epoch`` count from 0.
        """
        if self._limit is None or math.isfinite(loss) or self._in_a_row + 1 < self._limit:
            return
        before = f", and those of the {self._in_a_row} updates before were not finite either"
        raise DivergedError(
            f"the loss of update {update + 1} (epoch {epoch + 1}) is {loss}"
            f"{before if self._in_a_row else ''}: training stops before this update. To go on, {ADVICE}"
        )

    def updated(self, loss: float | None) -> None:
        """Count an update with this loss; None on nodes that do not know it."""
        if loss is not None:
            self._in_a_row = 0 if math.isfinite(loss) else self._in_a_row + 1

    def check_weights(self, weights: Mapping[str, torch.Tensor], updates: int) -> None:
        """Raise ``DivergedError`` if a weight is not finite: no checkpoint and no result has it."""
        if self._limit is None:
            return
        name = next((name for name, weight in weights.items() if not _is_finite(weight)), None)
        if name is not None:
            raise DivergedError(
                f"{name} has values that are NaN or infinite after {updates} updates: training stops. "
                f"To go on, {ADVICE}"
            )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite; the sum, which is fast, proves it if it is finite."""
    values = tensor.detach()
    return bool(values.sum(dtype=torch.float32).isfinite()) or bool(values.isfinite().all())
