"""Plans that use nearly all memory that providers offer: workers stay within them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from world import DEADLINE, World, eventually, providers

from ravnest.jobs.job import Job

WIDTH = 2048
RAM = 0.383
"""GB. The model has 76 MB of weights; a single node that averages needs 4.5 times as much, and 2 MB that
its links keep until they are acknowledged."""


def wide_job() -> Job:
    torch.manual_seed(0)
    widths = [512, *[WIDTH] * 5, 512]
    inputs = torch.randn(128, 512)
    return Job(
        model=nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))),
        example_args=(torch.zeros(16, 512),),
        train_data=(inputs, torch.randint(0, 512, (128,))),
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        optimizer_params={"lr": 1e-4},
        epochs=2,
        batch_size=16,
        clusters=2,
        reduce_factor=3,
        on_insufficient="fail",
    )


@pytest.mark.slow
def test_clusters_average_within_the_offered_memory(world: World) -> None:
    world.serve()
    for name in ("a", "b"):
        world.provide(name, f"--ram={RAM}")
    api = world.requester()
    eventually(lambda: providers(api), lambda found: len(found) == 2)
    handle = world.submit(api, wide_job())
    handle.result(timeout=DEADLINE)
    plan = handle.view().plan
    assert plan.count("averaging with other clusters 151 MB") == 2
    assert plan.count("acknowledged by the neighbours 2 MB") == 2
    assert plan.count("(98%)") == 2
