"""Batches of an epoch that is not like the others: the rest of one that other clusters have begun."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler


@runtime_checkable
class EpochDependent(Protocol):
    """Loader or sampler whose batches depend on the epoch."""

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""


class EpochBatches(Sampler[list[int]]):
    """Batch sampler that takes given samples in one epoch, and all samples of a share in the others."""

    def __init__(
        self,
        share: Sized,
        batch_size: int,
        *,
        shuffle: bool,
        drop_last: bool,
        generator: torch.Generator,
        epoch: int,
        samples: torch.Tensor,
    ) -> None:
        """``samples``: indices for the batches of ``epoch``, in their order."""
        order: Sampler[int] = (
            RandomSampler(share, generator=generator) if shuffle else SequentialSampler(share)
        )
        self._usual = BatchSampler(order, batch_size, drop_last)
        self._epoch = epoch
        self._samples = samples
        self._current = 0

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._current = epoch

    def __iter__(self) -> Iterator[list[int]]:
        if self._current != self._epoch:
            yield from self._usual
            return
        size = self._usual.batch_size
        for begin in range(0, len(self._samples), size):
            batch = self._samples[begin : begin + size]
            if len(batch) == size or not self._usual.drop_last:
                yield batch.tolist()

    def __len__(self) -> int:
        """Return the number of batches of a usual epoch."""
        return len(self._usual)


def begin_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader whose batches depend on the epoch which one begins."""
    for part in (loader, getattr(loader, "batch_sampler", None)):
        if isinstance(part, EpochDependent):
            part.begin_epoch(epoch)
