"""Packing of a job into files and a message, and refusal of jobs that cannot be trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ravnest.errors import JobError, RavnestError
from ravnest.jobs.dataset_reader import Rows, SharedData
from ravnest.jobs.graph_loss import load_loss
from ravnest.jobs.job import Job, PackedJob, pack_job
from ravnest.jobs.model import check_weights, read_units
from ravnest.schemas.jobs import GraphLoss, JobSpec, NamedComponent
from ravnest.store.files import sha256_of


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def _job(**changes: Any) -> Job:
    data = TensorDataset(torch.randn(50, 4), torch.randint(0, 3, (50,)))
    job = Job(_model(), (torch.randn(6, 4),), data, nn.CrossEntropyLoss(), torch.optim.SGD, {"lr": 0.1})
    return replace(job, **changes)


def _files_exist(packed: PackedJob) -> None:
    assert all(sha256_of(path) == digest for digest, path in packed.files.items())
    text = packed.spec.model_dump_json()
    assert JobSpec.model_validate_json(text) == packed.spec, "it round-trips through JSON"
    assert all(digest in text for digest in packed.files)


def test_all_parts_of_a_job_are_packed(tmp_path: Path) -> None:
    job = _job(val_data=(torch.randn(9, 4), torch.randint(0, 3, (9,))), epochs=3, compression=True)
    before, rng = copy.deepcopy(job.model.state_dict()), torch.get_rng_state()
    reported: list[tuple[str, int, int]] = []
    packed = pack_job(job, tmp_path, lambda *step: reported.append(step))
    _files_exist(packed)
    spec = packed.spec
    assert (spec.name, spec.training.batch_size, spec.training.epochs) == ("Sequential", 6, 3)
    assert spec.training.compression == "fp16"
    assert spec.training.optimizer == NamedComponent(name="SGD", params={"lr": 0.1})
    assert isinstance(spec.training.loss, NamedComponent)
    assert spec.train.samples == 50
    assert spec.validation is not None
    assert spec.validation.samples == 9
    model = read_units(packed.files[spec.model.units.sha256])
    check_weights(model, packed.files[spec.model.weights.sha256])
    assert model.profile.batch_size == 6
    assert model.profile.optimizer_bytes_per_parameter_byte == 0.0, "SGD has no state"
    assert reported[0][0] == "capturing the model"
    assert ("packing train_data", 50, 50) in reported
    assert all(torch.equal(before[key], value) for key, value in job.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert job.model.training


def test_a_custom_loss_is_packed_as_a_graph(tmp_path: Path) -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])

    def weighted(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, labels, weight=weights) + output.square().mean()

    packed = pack_job(_job(criterion=weighted), tmp_path)
    _files_exist(packed)
    loss = packed.spec.training.loss
    assert isinstance(loss, GraphLoss)
    loaded = load_loss(packed.files[loss.stage.sha256], packed.files[loss.weights.sha256])
    output, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 2, 1])
    assert torch.equal(loaded(output, {"labels": labels}), weighted(output, labels))


def test_the_batch_size_comes_from_the_job_the_loader_or_the_example(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(50, 4), torch.randint(0, 3, (50,)))
    cases = {
        "loader": ({"train_data": DataLoader(data, batch_size=10, shuffle=True)}, 10),
        "given": ({"batch_size": 5}, 5),
        "one": ({"example_args": torch.randn(1, 4)}, 64),
        "single": ({"batch_size": 1}, 1),
    }
    for name, (changes, expected) in cases.items():
        packed = pack_job(_job(**changes), tmp_path / name)
        assert packed.spec.training.batch_size == expected, name
        units = read_units(packed.files[packed.spec.model.units.sha256])
        assert units.profile.batch_size == max(expected, 2), "costs are measured for the real batch size"


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"logits": self.layer(x * mask) * scale, "rest": 3}


def test_inputs_by_name_and_an_output_of_several_parts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    samples = [{"x": torch.randn(4), "mask": torch.ones(4), "labels": i % 3, "id": i} for i in range(20)]
    job = Job(
        TwoInputs(),
        (torch.randn(4, 4),),
        samples,
        lambda output, labels: cross_entropy(output["logits"], labels),
        example_kwargs={"mask": torch.ones(4, 4), "scale": 2.0},
        shuffle=False,
    )
    packed = pack_job(job, tmp_path)
    pieces = [
        [Rows(packed.files[piece.artifact.sha256], 0, piece.rows) for piece in kind]
        for kind in (packed.spec.train.inputs, packed.spec.train.labels)
    ]
    shared = SharedData(*pieces)
    assert set(shared[3]) == {"x", "mask", "labels"}
    assert torch.equal(shared[3]["x"], samples[3]["x"])  # type: ignore[arg-type]


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).view(6, 3)


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        return (y, y * 2) if self.training else y


def _tensors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(50, *shape, dtype=dtype), torch.zeros(50, dtype=torch.long)


REFUSED: dict[str, tuple[Callable[[], Job], str]] = {
    "epochs": (lambda: _job(epochs=0), "epochs=0"),
    "batch size": (lambda: _job(batch_size=0), "batch_size must be"),
    "clusters": (lambda: _job(clusters=0), "clusters=0"),
    "compression": (lambda: _job(compression="zip"), "compression must be"),
    "optimizer": (lambda: _job(optimizer=torch.optim.LBFGS), "a pipeline cannot do"),
    "optimizer parameters": (lambda: _job(optimizer_params={"speed": 1}), "does not accept"),
    "other shape": (lambda: _job(train_data=_tensors(5)), "train_data does not fit"),
    "other dtype": (lambda: _job(train_data=_tensors(4, dtype=torch.float64)), "float64"),
    "validation": (lambda: _job(val_data=_tensors(5)), "val_data does not fit"),
    "labels": (lambda: _job(train_data=(torch.zeros(50, 4), torch.zeros(50, 2))), "criterion fails"),
    "fixed batch": (lambda: _job(model=Fixed()), "use drop_last=True"),
    "structure": (
        lambda: _job(
            model=Auxiliary(),
            criterion=lambda output, labels: cross_entropy(output[0], labels),
            val_data=_tensors(4),
        ),
        "another structure in evaluation",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_job_that_cannot_be_trained_is_refused_before_upload(tmp_path: Path, name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(JobError, match=message):
        pack_job(make(), tmp_path)


def test_a_model_whose_split_is_not_exact_is_refused(tmp_path: Path) -> None:
    job = _job()
    job.model[0].weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[index,union-attr,operator]
    with pytest.raises(RavnestError, match="first tensor that differs"):
        pack_job(job, tmp_path)
