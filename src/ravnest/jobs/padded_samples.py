"""Samples of different sizes, from a ``DataLoader`` whose ``collate_fn`` pads each batch.

Providers do not run the ``collate_fn``. Samples are stored padded to the largest of the dataset, each
with the window of its own values. Providers crop a batch to the windows of its samples, which is the
batch that the ``collate_fn`` makes of them: this is compared for all samples while they are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from ravnest.errors import JobError
from ravnest.jobs.dataset_reader import crop_batch, window_name
from ravnest.jobs.sample_fields import Fields, sample_fields, to_tensor
from ravnest.runtime.data import LABELS

_COMPARED = 32
"""Samples of a batch that is compared if the loader does not say how many it has."""
_TRIED = 64
"""Samples that are looked at to find the side on which a field is padded."""


class PaddedSamples:
    """Dataset and ``collate_fn`` of a loader, with the sizes of all samples."""

    def __init__(self, loader: DataLoader[Any], names: Sequence[str], label: str) -> None:
        """Read all samples once for their sizes; raise ``JobError`` for samples that cannot be stored.

        ``names`` are the inputs of the model, ``label`` names the dataset in errors.
        """
        dataset: Any = loader.dataset
        self._dataset = dataset
        self._count = len(dataset)
        self._collate = loader.collate_fn
        self._names = tuple(names)
        self._label = label
        self._compared = loader.batch_size or _COMPARED
        if self._count == 0:
            raise JobError(f"{label} has no samples")
        self.sizes = self._read_sizes()
        """Sizes of the samples by field: a row for each sample, a column for each dimension."""
        self._largest = {name: sizes.amax(0) for name, sizes in self.sizes.items()}
        self._varying = varying_dims([self])
        self.longest = self._find_longest()
        """Indices of samples that have the largest size in some dimension."""
        self._ends = self._find_ends()

    def __len__(self) -> int:
        return self._count

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Return samples as the dataset gives them."""
        return [self._dataset[index] for index in indices]

    def batch(self, samples: Sequence[Any]) -> Fields:
        """Return the batch that the ``collate_fn`` makes of samples: inputs by name, and labels."""
        try:
            made = self._collate(list(samples))
        except Exception as error:  # the user's function may raise anything
            raise JobError(
                f"the collate_fn of {self._label} fails for a batch of {len(samples)} samples: "
                f"{type(error).__name__}: {error}"
            ) from error
        fields, labels = sample_fields(
            made, self._names, f"the batches that the collate_fn of {self._label} makes"
        )
        found = {n: to_tensor(v, f"{n!r} of a batch of {self._label}") for n, v in fields.items()}
        found[LABELS] = to_tensor(labels, f"the target of a batch of {self._label}")
        for name, tensor in found.items():
            if not tensor.dim() or len(tensor) != len(samples):
                raise JobError(
                    f"the collate_fn of {self._label} makes {name!r} of shape {list(tensor.shape)} from "
                    f"{len(samples)} samples: it must have one row for each sample"
                )
        return found

    def read(self, indices: torch.Tensor) -> tuple[Fields, torch.Tensor]:
        """Return samples padded to the largest, with their windows, and their labels.

        The window of the labels is among the fields.
        """
        chosen = indices.tolist()
        samples = self.samples(chosen)
        longest = self.samples(self.longest)
        rows = [self._row(s, index, longest) for index, s in zip(chosen, samples, strict=True)]
        fields = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        self._compare(fields, samples, chosen)
        return {name: t for name, t in fields.items() if name != LABELS}, fields[LABELS]

    def _row(self, sample: Any, index: int, longest: Sequence[Any]) -> Fields:
        own = self.batch([sample])
        padded = self.batch([sample, *longest])
        row: Fields = {}
        for name, tensor in padded.items():
            sizes, largest = self.sizes[name][index], self._largest[name]
            alone, shape = list(own[name].shape[1:]), list(tensor.shape[1:])
            if alone != sizes.tolist() or shape != largest.tolist():
                raise JobError(
                    f"{name!r} of sample {index} of {self._label} has shape {alone}, and {shape} when "
                    f"it is padded, instead of {sizes.tolist()} and {largest.tolist()}: the collate_fn "
                    "must pad a batch to its largest sample, and "
                    "the dataset must give the same sizes whenever it is read"
                )
            row[name] = tensor[0]
            if name in self._varying:
                begin = torch.where(self._ends[name], largest - sizes, 0)
                row[window_name(name)] = torch.stack([begin, begin + sizes], 1)
        return row

    def _compare(self, fields: Fields, samples: Sequence[Any], indices: Sequence[int]) -> None:
        """Raise ``JobError`` if cropped batches are not those of the ``collate_fn``."""
        for first in range(0, len(samples), self._compared):
            part = slice(first, first + self._compared)
            expected = self.batch(samples[part])
            found = crop_batch({name: tensor[part] for name, tensor in fields.items()})
            for name, tensor in expected.items():
                if not _equal(found[name], tensor):
                    raise JobError(
                        f"the collate_fn of {self._label} does more than pad: {name!r} of the batch of "
                        f"{len(indices[part])} samples from {indices[part][0]} on is not that of its "
                        "samples side by side, with padding at one end. Providers cannot run it: do its "
                        "work in the dataset"
                    )

    def _read_sizes(self) -> dict[str, torch.Tensor]:
        found: dict[str, list[list[int]]] = {name: [] for name in (*self._names, LABELS)}
        kinds: dict[str, tuple[int, torch.dtype]] = {}
        for index in range(self._count):
            for name, tensor in self.batch(self.samples([index])).items():
                kind = (tensor.dim(), tensor.dtype)
                if kinds.setdefault(name, kind) != kind:
                    raise JobError(
                        f"{name!r} of sample {index} of {self._label} has {tensor.dim() - 1} dimensions "
                        f"and dtype {tensor.dtype}, but sample 0 has {kinds[name][0] - 1} and "
                        f"{kinds[name][1]}: all samples need the same"
                    )
                found[name].append(list(tensor.shape[1:]))
        return {name: torch.tensor(rows, dtype=torch.int64) for name, rows in found.items()}

    def _find_longest(self) -> list[int]:
        found: dict[int, None] = {}
        for sizes in self.sizes.values():
            for column in sizes.T:
                if bool((column != column[0]).any()):
                    found[int(column.argmax())] = None
        return list(found)

    def _find_ends(self) -> dict[str, torch.Tensor]:
        """Return, for each dimension of each field, whether values are at the end, after the padding."""
        found = {
            name: torch.zeros(sizes.shape[1], dtype=torch.bool) for name, sizes in self.sizes.items()
        }
        for name, sizes in self.sizes.items():
            for dim in range(sizes.shape[1]):
                found[name][dim] = self._is_at_end(name, dim)
        return found

    def _is_at_end(self, name: str, dim: int) -> bool:
        """Return whether the values of a field are behind its padding, from samples that show it."""
        sizes, largest = self.sizes[name], self._largest[name]
        full = torch.arange(sizes.shape[1]) != dim
        shorter = ((sizes == largest) | ~full).all(1) & (sizes[:, dim] < largest[dim])
        longest = self.samples(self.longest)
        for index in shorter.nonzero().flatten()[:_TRIED].tolist():
            (sample,) = self.samples([index])
            own, padded = self.batch([sample])[name], self.batch([sample, *longest])[name][:1]
            size, room = own.shape[dim + 1], padded.shape[dim + 1]
            at_start = _equal(padded.narrow(dim + 1, 0, size), own)
            at_end = _equal(padded.narrow(dim + 1, room - size, size), own)
            if at_start != at_end:
                return at_end
        return False


def varying_dims(datasets: Sequence[PaddedSamples]) -> dict[str, list[int]]:
    """Return the dimensions of batches whose sizes differ between samples, by field."""
    found: dict[str, list[int]] = {}
    for name in datasets[0].sizes if datasets else ():
        sizes = torch.cat([each.sizes[name] for each in datasets])
        differ = (sizes != sizes[0]).any(0).nonzero().flatten()
        if len(differ):
            found[name] = [int(dim) + 1 for dim in differ]
    return found


def largest_batch(datasets: Sequence[PaddedSamples], rows: int) -> Fields:
    """Return a batch of the first dataset that is as large as the largest of all datasets."""
    first = datasets[0]
    samples = [sample for each in datasets for sample in each.samples(each.longest)]
    more = rows - len(samples)
    samples += first.samples([index % len(first) for index in range(more)]) if more > 0 else []
    return {name: tensor[:rows] for name, tensor in first.batch(samples).items()}


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True for the same bits; NaN is equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
