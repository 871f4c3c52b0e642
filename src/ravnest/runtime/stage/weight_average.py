"""Exponential moving average of the weights that a stage trains."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ravnest.errors import StageFormatError


class WeightAverage:
    """Averages of weights, by key, in memory of their own.

    The values are those of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``:
    the average is a copy of the weights after the first update, and moves by ``1 - decay`` of the
    difference to them after each later one.
    """

    def __init__(self, decay: float, weights: Mapping[str, torch.Tensor]) -> None:
        self._decay = decay
        self._weights = dict(weights)
        self.tensors = {key: weight.detach().clone() for key, weight in weights.items()}
        """Averages by key."""

    @torch.no_grad()
    def update(self, *, first: bool) -> None:
        """Include the weights as they are now; ``first``: after the first update of training."""
        for key, average in self.tensors.items():
            weight = self._weights[key].detach()
            if first:
                average.copy_(weight)
            else:
                average.lerp_(weight, 1 - self._decay)

    @torch.no_grad()
    def add(self, changes: Mapping[str, torch.Tensor]) -> None:
        """Add ``changes`` to the averages."""
        for key, change in changes.items():
            self.tensors[key].add_(change.to(self.tensors[key].device))

    @torch.no_grad()
    def assign(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Replace averages."""
        for key, value in averages.items():
            self.tensors[key].copy_(value)

    def restore(self, stored: Mapping[str, torch.Tensor]) -> None:
        """Continue from a checkpoint; what it does not have begins with the weights as they are now.

        ``StageFormatError`` if a tensor does not fit its weight.
        """
        for key, value in stored.items():
            own = self.tensors.get(key)
            if own is None or (own.shape, own.dtype) != (value.shape, value.dtype):
                raise StageFormatError(f"the checkpoint has an average of {key} that does not fit it")
        now = {key: w.detach() for key, w in self._weights.items() if key not in stored}
        self.assign({**now, **stored})
