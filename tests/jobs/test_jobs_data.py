"""Datasets as files, and the share of a provider read back from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from ravnest.errors import DataError, JobError, RavnestError
from ravnest.jobs.dataset_reader import Rows, SharedData
from ravnest.jobs.dataset_writer import PackedData, pack_data
from ravnest.store.weights import save_weights


class Squares(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, samples: int = 20) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index)), index


def _pack(dataset: object, folder: Path, names: tuple[str, ...] = ("x",), **kwargs: Any) -> PackedData:
    return pack_data(dataset, names, folder, **{"seed": 1, "shuffle": False, **kwargs})


def _all(packed: PackedData) -> SharedData:
    return SharedData(
        [Rows(path, 0, rows) for path, rows in packed.inputs],
        [Rows(path, 0, rows) for path, rows in packed.labels],
    )


def test_samples_come_back_in_order(tmp_path: Path) -> None:
    shared = _all(_pack(Squares(), tmp_path))
    assert len(shared) == 20
    assert [int(shared[i]["labels"]) for i in range(20)] == list(range(20))
    assert torch.equal(shared[7]["x"], torch.full((3,), 7.0))
    assert shared[7]["labels"].dtype == torch.int64


def test_files_have_the_given_size_and_inputs_and_labels_the_same_rows(tmp_path: Path) -> None:
    reported: list[tuple[str, int, int]] = []
    packed = _pack(
        Squares(), tmp_path, piece_bytes=3 * 4 * 6, progress=lambda *step: reported.append(step)
    )
    assert [rows for _, rows in packed.inputs] == [6, 6, 6, 2]
    assert [rows for _, rows in packed.labels] == [6, 6, 6, 2]
    assert [done for _, done, _ in reported] == [6, 12, 18, 20]
    assert [int(_all(packed)[i]["labels"]) for i in (0, 5, 6, 19)] == [0, 5, 6, 19]


def test_the_seed_determines_the_order_of_shuffled_samples(tmp_path: Path) -> None:
    orders = []
    for number, seed in enumerate((1, 1, 2)):
        shared = _all(_pack(Squares(), tmp_path / str(number), seed=seed, shuffle=True))
        orders.append([int(shared[i]["labels"]) for i in range(20)])
        assert all(int(shared[i]["x"][0]) == label for i, label in enumerate(orders[-1]))
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == list(range(20))


def test_a_share_spans_several_files(tmp_path: Path) -> None:
    packed = _pack(Squares(), tmp_path, piece_bytes=72)
    labels = [
        Rows(packed.labels[0][0], 4, 6),
        Rows(packed.labels[1][0], 0, 6),
        Rows(packed.labels[2][0], 0, 1),
    ]
    share = SharedData(labels=labels)
    assert [int(share[i]["labels"]) for i in range(len(share))] == list(range(4, 13))
    assert set(share[0]) == {"labels"}
    root = SharedData([Rows(packed.inputs[3][0], 1, 2)])
    assert [sample["x"][0].item() for sample in root] == [19.0]
    with pytest.raises(IndexError):
        share[9]


def test_a_data_loader_batches_a_share(tmp_path: Path) -> None:
    batches = list(DataLoader(_all(_pack(Squares(), tmp_path)), batch_size=8))
    assert [batch["x"].shape[0] for batch in batches] == [8, 8, 4]
    assert batches[0]["labels"].tolist() == list(range(8))


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
SOURCES: dict[str, object] = {
    "tuple of tensors": (X, Y),
    "TensorDataset": TensorDataset(X, Y),
    "Subset": Subset(TensorDataset(X, Y), range(6)),
    "DataLoader": DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True),
    "list of tuples": [(X[i], Y[i]) for i in range(6)],
    "mappings": [{"labels": int(Y[i]), "x": X[i], "more": "text"} for i in range(6)],
    "numpy": [(X[i].numpy(), np.int64(i)) for i in range(6)],
    "not contiguous": (X.t().contiguous().t(), Y),
}


@pytest.mark.parametrize("name", list(SOURCES))
def test_every_form_of_dataset_is_accepted(tmp_path: Path, name: str) -> None:
    shared = _all(_pack(SOURCES[name], tmp_path))
    assert torch.equal(torch.stack([sample["x"] for sample in shared]), X)
    assert torch.equal(torch.stack([sample["labels"] for sample in shared]), Y)


def test_python_numbers_become_tensors(tmp_path: Path) -> None:
    shared = _all(_pack([(1.5, 2.5), (2.5, 3.5)], tmp_path))
    assert shared[1]["x"].dtype == torch.float32
    assert shared[1]["labels"].item() == 3.5


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex64]
)
def test_dtypes_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (4, 3)).to(dtype)
    shared = _all(_pack((x, torch.arange(4)), tmp_path))
    assert torch.equal(torch.stack([sample["x"] for sample in shared]), x)
    assert shared[0]["x"].dtype == dtype


def test_labels_can_be_inputs_of_the_model_too(tmp_path: Path) -> None:
    samples = [{"x": X[i], "labels": Y[i]} for i in range(6)]
    packed = _pack(samples, tmp_path, names=("x", "labels"))
    root = SharedData([Rows(path, 0, rows) for path, rows in packed.inputs])
    assert set(root[0]) == {"x", "labels"}


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


REFUSED: dict[str, tuple[Any, str]] = {
    "iterable": (Endless(), "collect its samples"),
    "generator": ((i for i in range(3)), "collect its samples"),
    "empty": ([], "no samples"),
    "no target": ([torch.ones(3)], "mappings with 'labels'"),
    "mapping without labels": ([{"x": torch.ones(3)}], "add the target"),
    "mapping without an input": ([{"y": torch.ones(3), "labels": 1}], "have y, labels, not x"),
    "too many inputs": ([(torch.ones(3), torch.ones(3), 1)], "have 2 inputs and a target"),
    "unequal shapes": ([(torch.ones(3), 1), (torch.ones(4), 1)], "pad, crop"),
    "unequal dtypes": (
        [(torch.ones(3), 1), (torch.ones(3), 1.0)],
        "float32, but sample 0 has .* torch.int64",
    ),
    "text": ([("text", 1)], "must be a tensor or a number"),
    "nested": ([((torch.ones(3), torch.ones(3)), 1)], "is a tuple of 2"),
    "objects": ([(np.array([object()]), 1)], "cannot be converted to a tensor"),
    "unequal lengths": ((torch.ones(3, 2), torch.ones(4)), r"differ in length: \[3, 4\]"),
    "collate": (DataLoader(Squares(), collate_fn=list), "collate_fn"),
    "sampler": (
        DataLoader(Squares(), sampler=WeightedRandomSampler([1.0] * 20, 5)),
        "custom sampler",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_an_unsuitable_dataset_is_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    dataset, message = REFUSED[name]
    with pytest.raises(JobError, match=message):
        _pack(dataset, tmp_path)


def test_forged_files_are_refused(tmp_path: Path) -> None:
    packed = _pack(Squares(), tmp_path)
    inputs, labels = packed.inputs[0][0], packed.labels[0][0]
    other = tmp_path / "other.safetensors"
    save_weights(other, {"x": torch.zeros(5, 4)})
    scalar = tmp_path / "scalar.safetensors"
    save_weights(scalar, {"labels": torch.zeros(())})
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(inputs.read_bytes()[:-4])
    cases: list[tuple[list[Rows], list[Rows]]] = [
        ([Rows(inputs, 0, 21)], []),
        ([Rows(inputs, 5, 5)], []),
        ([Rows(inputs, -1, 5)], []),
        ([Rows(inputs, 0, 5)], [Rows(labels, 0, 6)]),
        ([Rows(inputs, 0, 5), Rows(other, 0, 5)], []),
        ([], [Rows(inputs, 0, 5)]),
        ([], [Rows(scalar, 0, 1)]),
        ([Rows(damaged, 0, 5)], []),
        ([Rows(tmp_path / "nothing", 0, 5)], []),
        ([], []),
    ]
    for rows in cases:
        with pytest.raises(RavnestError) as refusal:
            SharedData(*rows)
        assert isinstance(refusal.value, ValueError)
    inputs.write_bytes(inputs.read_bytes()[:100])
    with pytest.raises((DataError, RavnestError)):
        SharedData([Rows(inputs, 0, 20)])
