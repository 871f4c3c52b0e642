"""Providers that cannot hold a tensor of the model train it together, each with a block of its rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from world import DEADLINE, World, eventually, providers

from ravnest.http.api import ApiClient
from ravnest.jobs.job import Job

RAM = 0.0134
"""GB. Weights of 5,000 to 8,000 x 128 have 2.6 to 4.1 MB; AdamW needs 10 to 16 MB for them, and two
temporaries of their size."""
EPS = 1e-4
"""With a smaller one, AdamW turns rounding errors of gradients that are nearly 0 into steps."""
BATCH, EPOCHS = 16, 2


class Classifier(nn.Module):
    """A large embedding and a small layer."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.output = nn.Linear(width, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.embed(tokens).mean(1))


class NextWord(nn.Module):
    """A large embedding whose weight is also that of the output layer."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.hidden = nn.Linear(width, width)
        self.output = nn.Linear(width, words, bias=False)
        self.output.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.hidden(self.embed(tokens).mean(1))))


OWN: dict[str, dict[str, float]] = {
    "embed.weight": {"lr": 2e-2},
    "output.bias": {"weight_decay": 0.0, "lr": 5e-3},
}
"""Settings of the optimizer for two parameters."""


def large_job(model: nn.Module, words: int, classes: int, **settings: Any) -> Job:
    tokens = torch.randint(0, words, (64, 8), generator=torch.Generator().manual_seed(0))
    return Job(
        model=model,
        example_args=(tokens[:BATCH],),
        train_data=(tokens, tokens.sum(1) % classes),
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW,
        epochs=EPOCHS,
        batch_size=BATCH,
        clusters=1,
        shuffle=False,
        schedule="sync",
        on_insufficient="fail",
        **settings,
    )


def trained_alone(job: Job) -> dict[str, torch.Tensor]:
    """Return the weights that the job has after training in one process."""
    model = copy.deepcopy(job.model)
    groups = [dict(OWN.get(name, {}), params=[each]) for name, each in model.named_parameters()]
    optimizer = torch.optim.AdamW(
        groups if job.parameter_groups else model.parameters(), **job.optimizer_params
    )
    updates = EPOCHS * len(job.train_data[0]) // BATCH
    rate = (lambda step: 1 - step / updates) if job.lr_scheduler == "linear" else (lambda _: 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for _ in range(EPOCHS):
        for tokens, labels in zip(*(data.split(BATCH) for data in job.train_data), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), labels).backward()
            if job.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
            optimizer.step()
            scheduler.step()
    return model.state_dict()


@pytest.fixture(scope="module")
def small_providers(shared_world: World) -> ApiClient:
    """Start a server and four providers that cannot hold a large weight."""
    shared_world.serve()
    for name in ("a", "b", "c", "d"):
        shared_world.provide(name, f"--ram={RAM}")
    api = shared_world.requester()
    eventually(lambda: providers(api), lambda found: len(found) == 4)
    return api


@pytest.mark.slow
def test_providers_train_an_embedding_that_none_of_them_can_hold(
    shared_world: World, small_providers: ApiClient
) -> None:
    torch.manual_seed(0)
    job = large_job(
        Classifier(7_000, 128),
        7_000,
        4,
        optimizer_params={"lr": 1e-2, "eps": EPS},
        parameter_groups=[{"match": name, **own} for name, own in OWN.items()],
        lr_scheduler="linear",
    )
    handle = shared_world.submit(small_providers, job)
    trained = handle.result(timeout=DEADLINE)
    assert "embed.weight (4 MB) is cut into 2 blocks of rows" in handle.view().plan
    for name, tensor in trained_alone(job).items():
        assert (trained[name] - tensor).abs().max() < 2e-5, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "blocks", "clip"),
    [pytest.param(5_000, 2, None, marks=pytest.mark.full), (8_000, 4, 0.5)],
)
def test_providers_train_a_tied_weight_that_none_of_them_can_hold(
    shared_world: World, small_providers: ApiClient, words: int, blocks: int, clip: float | None
) -> None:
    torch.manual_seed(0)
    settings = {"optimizer_params": {"lr": 1e-2, "eps": EPS}, "clip_grad_norm": clip}
    job = large_job(NextWord(words, 128), words, words, **settings)
    handle = shared_world.submit(small_providers, job)
    trained = handle.result(timeout=DEADLINE)
    plan = handle.view().plan
    assert f"is cut into {blocks} blocks of rows" in plan
    assert "each batch of 16 is split into" in plan
    assert torch.equal(trained["embed.weight"], trained["output.weight"])
    for name, tensor in trained_alone(job).items():
        assert (trained[name] - tensor).abs().max() < 2e-5, name
