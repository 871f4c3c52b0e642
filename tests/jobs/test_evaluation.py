"""Jobs with ``epochs=0`` before submission: their files, their memory, and what is refused."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from job_server import small_job
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ravnest.errors import JobError
from ravnest.jobs.estimate import pack_estimate
from ravnest.jobs.model import read_units
from ravnest.jobs.packing import pack_job
from ravnest.plan.cost import ModelCosts

DATA = TensorDataset(torch.arange(40.0).reshape(10, 4) / 40, torch.arange(10) % 3)


def evaluation(**fields: Any) -> Any:
    return small_job(**{"epochs": 0, "train_data": None, "val_data": DATA, **fields})


def test_data_is_packed_once_and_in_order(tmp_path: Path) -> None:
    packed = pack_job(evaluation(val_data=DataLoader(DATA, 5)), tmp_path)
    spec = packed.spec
    assert spec.train == spec.validation
    assert len(packed.files) == 4, "graph, weights, inputs and labels"
    assert (spec.training.epochs, spec.training.batch_size, spec.clusters) == (0, 5, 1)
    labels = packed.files[spec.train.labels[0].artifact.sha256].read_bytes()
    assert labels.endswith(DATA.tensors[1].numpy().tobytes())


def test_it_is_planned_without_gradients_and_optimizer(tmp_path: Path) -> None:
    trains = pack_job(small_job(val_data=DATA, optimizer=torch.optim.AdamW), tmp_path / "trains")
    only = pack_job(evaluation(optimizer=torch.optim.AdamW), tmp_path / "only")
    one, other = (
        ModelCosts.of(read_units(each.files[each.spec.model.units.sha256]).profile)
        for each in (only, trains)
    )
    weights = sum(p.nbytes for p in small_job().model.parameters())
    # AdamW keeps two numbers for each weight, and there is a gradient of each.
    assert one.smallest_total <= other.smallest_total - 3 * weights
    assert pack_estimate(evaluation()).spec.training.epochs == 0


def test_a_model_without_trained_weights_is_evaluated(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).requires_grad_(requires_grad=False)
    packed = pack_job(evaluation(model=model), tmp_path)
    profile = read_units(packed.files[packed.spec.model.units.sha256]).profile
    assert not any(asdict(tensor)["trainable"] for tensor in profile.state)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"val_data": None}, "epochs=0 evaluates the model without training: give val_data"),
        ({"keep_best": "loss"}, "keep_best is about training"),
        ({"early_stopping": {"metric": "loss"}}, "early_stopping is about training"),
        ({"resume_from": "job-1"}, "resume_from is about training"),
        ({"clusters": 2}, "clusters=2 would all compute the same"),
        ({"epochs": -1, "train_data": DATA}, "epochs=-1"),
    ],
)
def test_what_only_training_has_is_refused(tmp_path: Path, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(JobError) as caught:
        pack_job(evaluation(**fields), tmp_path)
    assert why in str(caught.value)
