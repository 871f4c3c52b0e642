"""Augmentation of training batches: captured, drawn anew in each epoch, and equal to one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import Formed
from torch import nn
from torch.utils.data import DataLoader
from training_cases import small_model

from ravnest import Trainer
from ravnest.errors import JobError
from ravnest.jobs.augmentation import (
    AugmentedBatches,
    augmentation_seed,
    load_augmentation,
    pack_augmentation,
)
from ravnest.jobs.job import Job
from ravnest.jobs.packing import pack_job
from ravnest.server.assignments import needed_files


def jitter(x: torch.Tensor) -> torch.Tensor:
    """Flip half of the samples, and add noise to all."""
    flips = torch.rand(x.shape[0], 1) < 0.5
    return torch.where(flips, x.flip(1), x) + 0.1 * torch.randn_like(x)


def samples(count: int = 22) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, generator=made)
    return [{"x": row, "labels": row[:3].argmax()} for row in inputs]


def batches(augment: Any, *, epoch: int = 0) -> AugmentedBatches:
    made = AugmentedBatches(list(DataLoader(samples(), 5)), ("x",), augment, seed=7, cluster=0)
    made.begin_epoch(epoch)
    return made


def test_an_epoch_is_drawn_anew_and_can_be_repeated(tmp_path: Path) -> None:
    packed = pack_augmentation(jitter, {"x": torch.randn(6, 4)}, tmp_path)
    augment = load_augmentation(packed.stage, packed.weights)
    epochs = [batches(augment, epoch=number) for number in (0, 0, 1)]
    before = torch.get_rng_state()
    first, again, second = ([batch["x"] for batch in epoch] for epoch in epochs)
    assert torch.equal(before, torch.get_rng_state()), "other random numbers are not affected"
    assert [len(x) for x in first] == [5, 5, 5, 5, 2]
    for number, (one, two, other) in enumerate(zip(first, again, second, strict=True)):
        assert torch.equal(one, two)
        assert not torch.equal(one, other)
        with torch.random.fork_rng():
            torch.manual_seed(augmentation_seed(7, 0, 0, number))
            rows = [sample["x"] for sample in samples()[5 * number : 5 * number + 5]]
            assert torch.equal(one, jitter(torch.stack(rows))), "the documented rule"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x[:, :2], r"augment returns shape \[6, 2\] and torch.float32 for the input x"),
        (lambda x: (x, x), "augment returns 2 tensors for 1 inputs: x"),
        (lambda x: x.double(), "and torch.float64 for the input x"),
        (lambda x: x @ x, "augment fails on the first samples of train_data: RuntimeError"),
        (lambda x: x + float(x.sum()), "augment cannot be captured as a graph"),
    ],
)
def test_functions_that_cannot_be_used_are_refused(tmp_path: Path, function: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        pack_augmentation(function, {"x": torch.randn(6, 4)}, tmp_path)


def test_a_job_has_its_augmentation_as_data(tmp_path: Path) -> None:
    data = (torch.randn(20, 4), torch.randint(0, 3, (20,)))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    job = Job(model, (torch.randn(6, 4),), data, nn.CrossEntropyLoss(), augment=jitter)
    spec = pack_job(job, tmp_path).spec
    found = spec.training.augmentation
    assert found is not None
    assert found.inputs == ("input",)
    digests = {file.sha256 for file in needed_files(spec)}
    assert {found.graph.stage.sha256, found.graph.weights.sha256} <= digests


def test_a_run_with_augmentation_equals_one_process(cluster: Formed, tmp_path: Path) -> None:
    packed = pack_augmentation(jitter, {"x": torch.randn(6, 4)}, tmp_path / "graph")
    augment = load_augmentation(packed.stage, packed.weights)
    local = cluster(schedule="sync", micro_batches=1)

    def script(name: str) -> None:
        with local.node(name, labels=DataLoader(samples(), 5)) as own:
            Trainer(own, train_loader=batches(augment), epochs=2, save=True).train()

    local.results(script)
    model = small_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for number, batch in enumerate(DataLoader(samples(), 5)):
            with torch.random.fork_rng():
                torch.manual_seed(augmentation_seed(7, 0, epoch, number))
                inputs = jitter(batch["x"])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), batch["labels"]).backward()
            optimizer.step()
    trained = local.fused()
    assert all(torch.equal(trained[name], tensor) for name, tensor in model.state_dict().items())
