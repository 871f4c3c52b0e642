"""A dataset as files, written once on the requester's side."""

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

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and how much there is."""
Fields = dict[str, torch.Tensor]
Take = Callable[[torch.Tensor], tuple[Fields, torch.Tensor]]
"""Inputs by name and labels of some samples, stacked."""

PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class PackedData:
    """A dataset on disk: files and how many samples each holds, in order."""

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
    progress: Progress | None = None,
    what: str = "train_data",
) -> PackedData:
    """Write a dataset in pieces, with never more than one of them in memory.

    A dataset has a length and an index; its samples are ``(inputs..., target)``, the inputs in the
    order of ``names``, or mappings with the inputs by name and ``labels``. A tuple of tensors
    ``(inputs..., targets)`` will do. Of a ``DataLoader`` its dataset is taken, not its sampler. What a
    dataset draws at random (augmentation) is drawn once. With ``shuffle`` the samples are put in an
    order that ``seed`` gives, so that every run of them is a fair share.
    """
    samples, take = _reader(_dataset(dataset, what), names, what)
    order = torch.arange(samples)
    if shuffle:
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    fields, labels = take(order[:1])
    widest = max(sum(_row_bytes(t) for t in fields.values()), _row_bytes(labels), 1)
    rows = max(1, piece_bytes // widest)
    inputs_files: list[tuple[Path, int]] = []
    labels_files: list[tuple[Path, int]] = []
    for part in torch.split(order, rows):
        fields, labels = take(part)
        number = len(inputs_files)
        for files, name, tensors in (
            (inputs_files, "inputs", fields),
            (labels_files, LABELS, {LABELS: labels}),
        ):
            path = folder / f"{name}_{number:05}.safetensors"
            save_weights(path, tensors)
            files.append((path, len(part)))
        if progress is not None:
            progress(f"packing {what}", sum(count for _, count in inputs_files), samples)
    return PackedData(samples, tuple(inputs_files), tuple(labels_files))


def batch_size_of(dataset: object) -> int | None:
    """Of a ``DataLoader``; other datasets have none."""
    return dataset.batch_size if isinstance(dataset, DataLoader) else None


def _dataset(dataset: object, what: str) -> Any:
    """The dataset in what a user gives for one."""
    if isinstance(dataset, DataLoader):
        if dataset.collate_fn is not default_collate and dataset.batch_size is not None:
            raise JobError(
                f"the DataLoader of {what} has a collate_fn, which providers could not run: do what it "
                "does in the dataset, so that all samples have the same shape"
            )
        if type(dataset.sampler) not in (RandomSampler, SequentialSampler):
            raise JobError(
                f"the DataLoader of {what} has a sampler of its own, which would be lost: give the "
                "dataset alone, or one that holds the samples that it chooses"
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
            f"{what} must be a dataset with a length and an index, a tuple of tensors (inputs, targets) "
            f"or a DataLoader, not a {type(dataset).__name__}: collect what it yields in a list first"
        )
    return dataset


def _reader(dataset: Any, names: Sequence[str], what: str) -> tuple[int, Take]:
    """The number of samples and how to take some of them."""
    whole = isinstance(dataset, tuple) and bool(dataset)
    if whole and all(isinstance(item, torch.Tensor) and item.dim() for item in dataset):
        lengths = [len(item) for item in dataset]
        if len(set(lengths)) != 1:
            raise JobError(f"the tensors of {what} have {lengths} samples: they must be equally many")
        samples = lengths[0]
        take = _take_columns(dataset, names, what)
    else:
        samples = len(dataset)
        take = _take_samples(dataset, names, what)
    if samples == 0:
        raise JobError(f"{what} has no samples")
    return samples, take


def _take_columns(columns: Sequence[torch.Tensor], names: Sequence[str], what: str) -> Take:
    fields, labels = _fields(columns, names, what)

    def take(indices: torch.Tensor) -> tuple[Fields, torch.Tensor]:
        return {name: column[indices] for name, column in fields.items()}, labels[indices]

    return take


def _take_samples(dataset: Any, names: Sequence[str], what: str) -> Take:
    models: dict[str, tuple[int, torch.Tensor]] = {}
    """For each field, the first sample that was taken: all others must be like it."""

    def checked(value: object, name: str, index: int) -> torch.Tensor:
        tensor = _tensor(value, f"{name!r} of sample {index} of {what}")
        first, model = models.setdefault(name, (index, tensor))
        if (tensor.shape, tensor.dtype) != (model.shape, model.dtype):
            raise JobError(
                f"{name!r} of sample {index} of {what} has shape {list(tensor.shape)} and dtype "
                f"{tensor.dtype}, that of sample {first} has {list(model.shape)} and {model.dtype}: "
                "samples must be alike; pad, crop or convert them in the dataset"
            )
        return tensor

    def take(indices: torch.Tensor) -> tuple[Fields, torch.Tensor]:
        inputs: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        labels: list[torch.Tensor] = []
        for index in indices.tolist():
            fields, label = _fields(dataset[index], names, what)
            for name, value in fields.items():
                inputs[name].append(checked(value, name, index))
            labels.append(checked(label, "the target", index))
        return {name: torch.stack(column) for name, column in inputs.items()}, torch.stack(labels)

    return take


def _fields(sample: Any, names: Sequence[str], what: str) -> tuple[dict[str, Any], Any]:
    """Inputs by name, and the target."""
    takes = f"the model takes {', '.join(names)}"
    if isinstance(sample, Mapping):
        if LABELS not in sample:
            raise JobError(f"the samples of {what} are mappings without {LABELS!r}: add the target")
        if missing := [name for name in names if name not in sample]:
            raise JobError(
                f"the samples of {what} have {', '.join(map(str, sample))}, not {missing[0]}; {takes}"
            )
        return {name: sample[name] for name in names}, sample[LABELS]
    if not isinstance(sample, Sequence) or isinstance(sample, str) or len(sample) < 2:
        raise JobError(
            f"the samples of {what} must be (inputs..., target) or mappings with {LABELS!r}, not "
            f"{_described(sample)}"
        )
    if len(sample) - 1 != len(names):
        raise JobError(
            f"the samples of {what} have {len(sample) - 1} inputs and a target, but {takes}: give "
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
            raise JobError(f"{where} cannot become a tensor: {error}") from error
    raise JobError(
        f"{where} is {_described(value)}: it must be a tensor or a number; convert it in the dataset, "
        "for an image with a transform such as torchvision.transforms.ToTensor()"
    )


def _described(value: object) -> str:
    length = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return f"a {type(value).__name__}{length}"


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor[0].numel() * tensor.element_size()
