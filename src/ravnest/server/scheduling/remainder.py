"""Rest of an epoch that the clusters of an earlier plan have begun, for the clusters of a new one. Pure.

Each old cluster trained the batches of its own share in an order that follows from the state of its
loader's generator. What is left of these orders is divided between the new clusters: no sample of the
epoch is left out, and none is trained twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch.utils.data import DataLoader

from ravnest.errors import StageFormatError
from ravnest.schemas.jobs import TrainingSpec

MOST_ROWS = 4_000_000
"""Samples of a remainder: their numbers are sent to the nodes, and orders of epochs are made anew."""


class RemainderError(StageFormatError):
    """Raised if the rest of an epoch cannot be found, so that the epoch begins anew."""


@dataclass(frozen=True)
class ClusterPosition:
    """Position of an old cluster in its data."""

    rows: range
    """Its share: numbers of the samples in the whole dataset."""
    phase: int
    """Phases of the run that are over: epochs and validations."""
    epoch: int
    batches: int
    """Batches of the epoch that it has trained."""
    unused: int
    """Samples that it trained last, and whose updates are part of no state that is used."""
    generator: bytes | None
    """State of its loader's generator when the epoch began."""
    left: tuple[int, torch.Tensor] | None = None
    """Epoch of its plan that was a remainder itself, and the samples of that in their order."""

    def is_over(self, training: TrainingSpec) -> bool:
        """Return whether all batches of the epoch are trained, though the phase is not over."""
        is_left = self.left is not None and self.left[0] == self.epoch
        samples = len(self.left[1]) if is_left and self.left is not None else len(self.rows)
        size = training.batch_size
        batches = samples // size if training.drop_last else -(-samples // size)
        return self.batches > 0 and self.batches == batches

    def is_between_epochs(self, epoch: int, training: TrainingSpec) -> bool:
        """Return whether a whole epoch is the next one."""
        is_left = self.left is not None and self.left[0] == epoch
        if self.is_over(training):
            return self.epoch + 1 == epoch and not (self.unused or is_left)
        return self.epoch == epoch and not (self.batches or is_left)


@dataclass(frozen=True)
class Remainder:
    """Samples that the new clusters train in one epoch; later epochs are whole ones."""

    epoch: int
    phase: int
    """Phases of the run that are over for the new clusters."""
    parts: tuple[torch.Tensor, ...] | None
    """Numbers of samples for each new cluster, in the order of training; None: a whole epoch."""

    @property
    def samples(self) -> int:
        """Number of samples; 0 for a whole epoch."""
        return sum(len(part) for part in self.parts or ())


def find_remainder(
    positions: Sequence[ClusterPosition],
    rates: Sequence[float],
    training: TrainingSpec,
    *,
    validates: bool,
) -> Remainder:
    """Return what the old clusters have left to train, divided by the rates of the new clusters.

    The most advanced cluster determines the epoch. Clusters that are behind it owe the epochs before,
    too: their samples are then part of the remainder more than once. ``validates``: there are validation
    phases. ``RemainderError`` if the orders are not known, or if there is too little for each cluster.
    """
    newest = max(each.epoch + each.is_over(training) for each in positions)
    phase = max(each.phase + each.is_over(training) for each in positions)
    if all(each.is_between_epochs(newest, training) for each in positions):
        return Remainder(newest, phase, None)
    epoch = min(newest, training.epochs - 1)
    most = sum(len(each.rows) * max(epoch - each.epoch + 1, 0) for each in positions)
    if most > MOST_ROWS:
        raise RemainderError(
            f"the rest of epoch {epoch + 1} is not looked for among {most} samples: {MOST_ROWS} is the "
            "limit"
        )
    rows = torch.cat([_owed(each, epoch, training) for each in positions])
    validations = epoch // training.val_freq if validates else 0
    parts = tuple(split_rows(rows, rates, training))
    return Remainder(epoch, min(phase, epoch + validations), parts)


def _owed(position: ClusterPosition, epoch: int, training: TrainingSpec) -> torch.Tensor:
    """Return the samples that a cluster has left to train up to the end of an epoch."""
    if position.epoch > epoch:
        return torch.empty(0, dtype=torch.int64)
    orders = _orders(position, epoch, training)
    first = next(orders)
    if len(first) < position.batches:
        raise RemainderError(
            f"an epoch of the samples {position.rows.start} to {position.rows.stop - 1} has "
            f"{len(first)} batches, of which {position.batches} should be trained"
        )
    trained = list(chain.from_iterable(first[: position.batches]))
    again = trained[len(trained) - min(position.unused, len(trained)) :]
    found = [_tensor((again, *first[position.batches :]))]
    return torch.cat([*found, *map(_tensor, orders)])


def _tensor(batches: Iterable[list[int]]) -> torch.Tensor:
    return torch.tensor(list(chain.from_iterable(batches)), dtype=torch.int64)


def _orders(position: ClusterPosition, epoch: int, training: TrainingSpec) -> Iterator[list[list[int]]]:
    """Yield the batches of each epoch, from that of the position on."""
    count, generator = len(position.rows), torch.Generator()
    if position.generator is not None:
        try:
            generator.set_state(torch.frombuffer(bytearray(position.generator), dtype=torch.uint8))
        except (RuntimeError, ValueError) as error:
            raise RemainderError(f"the state of a loader's generator is damaged: {error}") from error
    elif training.shuffle:
        raise RemainderError("a checkpoint lacks the state of the loader's generator")
    for number in range(position.epoch, epoch + 1):
        if position.left is not None and position.left[0] == number:
            # Like each iteration of a worker's loader, this one takes a number from the generator.
            yield list(_batches(position.left[1].tolist(), training, generator, shuffle=False))
        else:
            yield [
                [position.rows[index] for index in batch]
                for batch in _batches(range(count), training, generator, shuffle=training.shuffle)
            ]


def _batches(
    rows: Sequence[int], training: TrainingSpec, generator: torch.Generator, *, shuffle: bool
) -> Iterator[list[int]]:
    """Yield the batches that a loader makes of these samples, with the same random numbers."""
    yield from DataLoader(
        rows,  # type: ignore[arg-type]
        training.batch_size,
        shuffle=shuffle,
        drop_last=training.drop_last,
        generator=generator,
        collate_fn=list,
    )


def split_rows(
    rows: torch.Tensor, rates: Sequence[float], training: TrainingSpec
) -> Iterator[torch.Tensor]:
    """Divide samples between clusters in proportion to their rates; each gets at least one batch.

    A cluster gets samples that are next to each other in the dataset, so that it fetches few files
    besides those of its share, in a random order if the job shuffles.
    """
    unit = training.batch_size if training.drop_last else 1
    units, clusters = len(rows) // unit, len(rates)
    if units < clusters:
        raise RemainderError(f"{len(rows)} samples of the epoch are too few for {clusters} clusters")
    ordered = rows.sort().values
    generator = torch.Generator().manual_seed(training.seed)
    begin = 0
    for count in range(1, clusters + 1):
        share = sum(rates[:count]) / sum(rates)
        end = len(rows) if count == clusters else unit * (count + int((units - clusters) * share + 0.5))
        part = ordered[begin:end]
        yield part[torch.randperm(len(part), generator=generator)] if training.shuffle else part
        begin = end
