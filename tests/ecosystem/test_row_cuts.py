"""Providers that cannot hold a tensor of the model train it together, each with a block of its rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from world import World, eventually, providers

from ravnest.jobs.job import Job

WORDS, WIDTH = 40_000, 512
RAM = 0.3
"""GB. The embedding has 82 MB; with AdamW it needs 328 MB and two temporaries of its size."""


class Classifier(nn.Module):
    """A large embedding and a small layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.output = nn.Linear(WIDTH, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.embed(tokens).mean(1))


def large_job(model: nn.Module) -> Job:
    tokens = torch.randint(0, WORDS, (64, 8), generator=torch.Generator().manual_seed(0))
    labels = tokens.sum(1) % 4
    return Job(
        model=model,
        example_args=(tokens[:16],),
        train_data=(tokens, labels),
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW,
        optimizer_params={"lr": 1e-2},
        epochs=2,
        batch_size=16,
        clusters=1,
        shuffle=False,
        schedule="sync",
        on_insufficient="fail",
    )


@pytest.mark.slow
def test_providers_train_an_embedding_that_none_of_them_can_hold(world: World) -> None:
    world.serve()
    for name in ("a", "b", "c"):
        world.provide(name, f"--ram={RAM}")
    api = world.requester()
    eventually(lambda: providers(api), lambda found: len(found) == 3)
    torch.manual_seed(0)
    model = Classifier()
    job = large_job(model)
    handle = world.submit(api, job)
    trained = handle.result(timeout=240)
    assert "embed.weight (82 MB) is cut into 2 blocks of rows" in handle.view().plan
    expected = Classifier()
    expected.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    tokens, labels = job.train_data
    for start in [*range(0, 64, 16)] * 2:
        optimizer.zero_grad()
        batch = slice(start, start + 16)
        nn.functional.cross_entropy(expected(tokens[batch]), labels[batch]).backward()
        optimizer.step()
    found = Classifier()
    found.load_state_dict(trained, strict=True)
    for name, tensor in expected.state_dict().items():
        # AdamW turns rounding errors of gradients that are nearly 0 into steps: a few elements in 20M.
        different = (found.state_dict()[name] - tensor).abs() > 1e-4
        assert different.float().mean() < 1e-5, name
