"""Conversion of the requester's dataset to files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from ravnest.errors import JobError
from ravnest.runtime.data import LABELS
from ravnest.store.weights import save_weights

StepProgress = Callable[[str, int, int], None]
"""Progress callback: name of the current step, amount done, total."""
Fields = dict[str, torch.Tensor]
BatchReader = Callable[[torch.Tensor], tuple[Fields, torch.Tensor]]
"""Function from sample indices to stacked inputs by name and stacked labels."""

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
) -> PackedData:
    """Write a dataset as files of ``piece_bytes``, with at most one of them in memory.

    A dataset has a length and an index. Its samples are ``(inputs..., target)``, with the inputs in
    the order of ``names``, or mappings with the inputs by name and ``labels``. A tuple of tensors
    ``(inputs..., targets)`` is accepted as well. A ``DataLoader`` contributes its dataset, not its
    sampler. Random augmentation in the dataset is applied once. ``shuffle`` orders the samples at
    random by ``seed``, so that any contiguous run of them is a fair share. ``label`` names the dataset
    in errors.
    """
    samples, read = _reader(_dataset(dataset, label), names, label)
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
        number = len(inputs_files)
        for files, name, tensors in (
            (inputs_files, "inputs", fields),
            (labels_files, LABELS, {LABELS: labels}),
        ):
            path = folder / f"{name}_{number:05}.safetensors"
            save_weights(path, tensors)
            files.append((path, len(indices)))
        if progress is not None:
            progress(f"packing {label}", sum(count for _, count in inputs_files), samples)
    return PackedData(samples, tuple(inputs_files), tuple(labels_files))


def batch_size_of(dataset: object) -> int | None:
    """Return the batch size of a ``DataLoader``, or None for other datasets."""
    return dataset.batch_size if isinstance(dataset, DataLoader) else None


def _dataset(dataset: object, label: str) -> Any:
    """Return the indexable dataset, or the tuple of tensors, behind the user's argument."""
    if isinstance(dataset, DataLoader):
        if dataset.collate_fn is not default_collate and dataset.batch_size is not None:
            raise JobError(
                f"the DataLoader of {label} has a collate_fn, which providers cannot run: do its work "
                "in the dataset, so that all samples have the same shape"
            )
        if type(dataset.sampler) not in (RandomSampler, SequentialSampler):
            raise JobError(
                f"the DataLoader of {label} has a custom sampler, which would be ignored: give the "
                "dataset itself, or a torch.utils.data.Subset of the samples that it chooses"
            )
        dataset = dataset.dataset
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


def _reader(dataset: Any, names: Sequence[str], label: str) -> tuple[int, BatchReader]:
    """Return the number of samples and a function that reads some of them."""
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
    fields, labels = _fields(columns, names, label)

    def read(indices: torch.Tensor) -> tuple[Fields, torch.Tensor]:
        return {name: column[indices] for name, column in fields.items()}, labels[indices]

    return read


def _sample_reader(dataset: Any, names: Sequence[str], label: str) -> BatchReader:
    references: dict[str, tuple[int, torch.Tensor]] = {}
    """Index and tensor of the first sample per field; all others must have its shape and dtype."""

    def checked(value: object, name: str, index: int) -> torch.Tensor:
        tensor = _tensor(value, f"{name!r} of sample {index} of {label}")
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
            fields, target = _fields(dataset[index], names, label)
            for name, value in fields.items():
                inputs[name].append(checked(value, name, index))
            labels.append(checked(target, "the target", index))
        return {name: torch.stack(column) for name, column in inputs.items()}, torch.stack(labels)

    return read


def _fields(sample: Any, names: Sequence[str], label: str) -> tuple[dict[str, Any], Any]:
    """Return the inputs of a sample by name, and its target."""
    takes = f"the model takes {', '.join(names)}"
    if isinstance(sample, Mapping):
        if LABELS not in sample:
            raise JobError(f"the samples of {label} are mappings without {LABELS!r}: add the target")
        if missing := [name for name in names if name not in sample]:
            raise JobError(
                f"the samples of {label} have {', '.join(map(str, sample))}, not {missing[0]}; {takes}"
            )
        return {name: sample[name] for name in names}, sample[LABELS]
    if not isinstance(sample, Sequence) or isinstance(sample, str) or len(sample) < 2:
        raise JobError(
            f"the samples of {label} must be (inputs..., target) or mappings with {LABELS!r}, not "
            f"{_description(sample)}"
        )
    if len(sample) - 1 != len(names):
        raise JobError(
            f"the samples of {label} have {len(sample) - 1} inputs and a target, but {takes}: give "
            "mappings with the inputs by name, or change the example inputs"
        )
    return dict(zip(names, sample[:-1], strict=True)), sample[-1]


def _tensor(value: object, where: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().to_dense() if value.layout != torch.strided else value.detach()
    if isinstance(value, bool | int):
        return torch.tensor(value)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.get_default_dtype())
    if isinstance(value, np.ndarray | np.generic):
        try:
            return torch.as_tensor(np.ascontiguousarray(value)).reshape(value.shape)
        except TypeError as error:
            raise JobError(f"{where} cannot be converted to a tensor: {error}") from error
    raise JobError(
        f"{where} is {_description(value)}: it must be a tensor or a number; convert it in the dataset, "
        "for example an image with torchvision.transforms.ToTensor()"
    )


def _description(value: object) -> str:
    length = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return f"a {type(value).__name__}{length}"


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor[0].numel() * tensor.element_size()
