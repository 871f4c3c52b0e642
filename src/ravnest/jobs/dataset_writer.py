"""Conversion of the requester's dataset to files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from ravnest.errors import JobError
from ravnest.jobs.dataset_reader import window_name
from ravnest.jobs.hugging_face import samples_of
from ravnest.jobs.padded_samples import PaddedSamples
from ravnest.jobs.sample_fields import Fields, sample_fields, to_tensor
from ravnest.runtime.data import LABELS
from ravnest.store.weights import save_weights

StepProgress = Callable[[str, int, int], None]
"""Progress callback: name of the current step, amount done, total."""
BatchReader = Callable[[torch.Tensor], tuple[Fields, torch.Tensor]]
"""Function from sample indices to stacked inputs by name and stacked labels."""

Scan = Callable[[Fields, torch.Tensor, torch.Tensor], None]
"""Function of the inputs, the labels and the indices of some samples."""

_BATCHES = (BatchSampler, type(None))
PIECE_BYTES = 16 << 20
"""Size of a data file."""


@dataclass(frozen=True)
class PackedData:
    """A dataset on disk: its files in order, each with its number of samples."""

    samples: int
    inputs: tuple[tuple[Path, int], ...]
    labels: tuple[tuple[Path, int], ...]


def pack_data(
    dataset: object,
    names: Sequence[str],
    folder: Path,
    *,
    seed: int,
    shuffle: bool,
    piece_bytes: int = PIECE_BYTES,
    progress: StepProgress | None = None,
    label: str = "train_data",
    scan: Scan | None = None,
) -> PackedData:
    """Write a dataset as files of ``piece_bytes``, with at most one of them in memory.

    A dataset has a length and an index. Its samples are ``(inputs..., target)``, with the inputs in
    the order of ``names``, or mappings with the inputs by name and ``labels``. A tuple of tensors
    ``(inputs..., targets)`` is accepted as well. A ``DataLoader`` contributes its dataset, not its
    sampler; ``PaddedSamples`` are those of one with a ``collate_fn``. Random augmentation in the
    dataset is applied once. ``shuffle`` orders the samples at
    random by ``seed``, so that any contiguous run of them is a fair share. ``label`` names the dataset
    in errors. ``scan`` is called with all samples, and may refuse them.
    """
    samples, read = _reader(dataset, names, label)
    order = torch.arange(samples)
    if shuffle:
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    fields, labels = read(order[:1])
    widest = max(sum(_row_bytes(t) for t in fields.values()), _row_bytes(labels), 1)
    rows = max(1, piece_bytes // widest)
    inputs_files: list[tuple[Path, int]] = []
    labels_files: list[tuple[Path, int]] = []
    for indices in torch.split(order, rows):
        fields, labels = read(indices)
        if scan is not None:
            scan({name: fields[name] for name in names}, labels, indices)
        targets = {LABELS: labels}
        if (window := fields.pop(window_name(LABELS), None)) is not None:
            targets[window_name(LABELS)] = window
        number = len(inputs_files)
        for files, name, tensors in (
            (inputs_files, "inputs", fields),
            (labels_files, LABELS, targets),
        ):
            path = folder / f"{name}_{number:05}.safetensors"
            save_weights(path, tensors)
            files.append((path, len(indices)))
        if progress is not None:
            progress(f"packing {label}", sum(count for _, count in inputs_files), samples)
    return PackedData(samples, tuple(inputs_files), tuple(labels_files))


@dataclass(frozen=True)
class DataSize:
    """Number of samples of a dataset, and the bytes of its inputs and labels."""

    samples: int
    input_bytes: int
    label_bytes: int


def measure_data(dataset: object, names: Sequence[str], label: str = "train_data") -> DataSize:
    """Return the size of a dataset, as ``pack_data`` would write it; only one sample is read."""
    samples, read = _reader(dataset, names, label)
    fields, labels = read(torch.zeros(1, dtype=torch.long))
    row = sum(_row_bytes(tensor) for tensor in fields.values())
    return DataSize(samples, samples * row, samples * _row_bytes(labels))


def batch_size_of(dataset: object) -> int | None:
    """Return the batch size of a ``DataLoader``, or None for other datasets."""
    return dataset.batch_size if isinstance(dataset, DataLoader) else None


def with_padding(dataset: object, names: Sequence[str], label: str) -> PaddedSamples | None:
    """Return the samples of a ``DataLoader`` with a ``collate_fn``; None for other datasets."""
    if not isinstance(dataset, DataLoader) or dataset.batch_sampler is None:
        return None
    if dataset.collate_fn is default_collate or isinstance(dataset.dataset, IterableDataset):
        return None
    _check_sampler(dataset, label)
    return PaddedSamples(dataset, names, label)


def _check_sampler(loader: DataLoader[Any], label: str) -> None:
    batches = type(loader.batch_sampler)
    if type(loader.sampler) not in (RandomSampler, SequentialSampler) or batches not in _BATCHES:
        raise JobError(
            f"the DataLoader of {label} has a custom sampler, which would be ignored: give the "
            "dataset itself, or a torch.utils.data.Subset of the samples that it chooses"
        )


def _dataset(dataset: object, label: str) -> Any:
    """Return the indexable dataset, or the tuple of tensors, behind the user's argument."""
    if isinstance(dataset, DataLoader):
        _check_sampler(dataset, label)
        dataset = dataset.dataset
    dataset = samples_of(dataset)
    if type(dataset) is TensorDataset:
        return dataset.tensors
    if (
        isinstance(dataset, IterableDataset | str | bytes)
        or not hasattr(dataset, "__len__")
        or not hasattr(dataset, "__getitem__")
    ):
        raise JobError(
            f"{label} must be a dataset with a length and an index, a tuple of tensors (inputs, "
            f"targets) or a DataLoader, not a {type(dataset).__name__}: collect its samples in a list"
        )
    return dataset


def _reader(given: object, names: Sequence[str], label: str) -> tuple[int, BatchReader]:
    """Return the number of samples and a function that reads some of them."""
    padded = given if isinstance(given, PaddedSamples) else with_padding(given, names, label)
    if padded is not None:
        return len(padded), padded.read
    dataset = _dataset(given, label)
    is_tuple = isinstance(dataset, tuple) and bool(dataset)
    if is_tuple and all(isinstance(item, torch.Tensor) and item.dim() for item in dataset):
        lengths = [len(item) for item in dataset]
        if len(set(lengths)) != 1:
            raise JobError(f"the tensors of {label} differ in length: {lengths}")
        samples = lengths[0]
        read = _tensor_reader(dataset, names, label)
    else:
        samples = len(dataset)
        read = _sample_reader(dataset, names, label)
    if samples == 0:
        raise JobError(f"{label} has no samples")
    return samples, read


def _tensor_reader(columns: Sequence[torch.Tensor], names: Sequence[str], label: str) -> BatchReader:
    fields, labels = sample_fields(columns, names, f"the samples of {label}")

    def read(indices: torch.Tensor) -> tuple[Fields, torch.Tensor]:
        return {name: column[indices] for name, column in fields.items()}, labels[indices]

    return read


def _sample_reader(dataset: Any, names: Sequence[str], label: str) -> BatchReader:
    references: dict[str, tuple[int, torch.Tensor]] = {}
    """Index and tensor of the first sample per field; all others must have its shape and dtype."""

    def checked(value: object, name: str, index: int) -> torch.Tensor:
        tensor = to_tensor(value, f"{name!r} of sample {index} of {label}")
        first, reference = references.setdefault(name, (index, tensor))
        if (tensor.shape, tensor.dtype) != (reference.shape, reference.dtype):
            raise JobError(
                f"{name!r} of sample {index} of {label} has shape {list(tensor.shape)} and dtype "
                f"{tensor.dtype}, but sample {first} has {list(reference.shape)} and "
                f"{reference.dtype}: all samples need the same; pad, crop or convert them in the dataset"
            )
        return tensor

    def read(indices: torch.Tensor) -> tuple[Fields, torch.Tensor]:
        inputs: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        labels: list[torch.Tensor] = []
        for index in indices.tolist():
            fields, target = sample_fields(dataset[index], names, f"the samples of {label}")
            for name, value in fields.items():
                inputs[name].append(checked(value, name, index))
            labels.append(checked(target, "the target", index))
        return {name: torch.stack(column) for name, column in inputs.items()}, torch.stack(labels)

    return read


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor[0].numel() * tensor.element_size()
