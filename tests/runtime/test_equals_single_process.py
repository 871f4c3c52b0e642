"""Synchronous training of the stages equals training of the unsplit model, bit for bit."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import LocalCluster, form
from torch import nn
from training_cases import (
    SmallCNN,
    TiedGPT,
    image_loaders,
    token_loaders,
    token_loss,
    train_alone,
)

from ravnest import set_seed

EPOCHS = 2


def _image_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[-1])


CASES = {
    "cnn": (SmallCNN, (torch.rand(8, 1, 8, 8),), image_loaders, _image_loss),
    "tied-gpt": (TiedGPT, (torch.randint(0, 16, (4, 8)),), token_loaders, token_loss),
}


@pytest.fixture(scope="module")
def formed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Factory of clusters by model and number of nodes; each is created once."""
    made: dict[tuple[str, int], tuple[Path, nn.Module, list[str]]] = {}

    def get(case: str, nodes: int) -> tuple[Path, nn.Module, list[str]]:
        if (case, nodes) not in made:
            set_seed(7)
            model = CASES[case][0]()
            folder = tmp_path_factory.mktemp(f"{case}-{nodes}")
            names = form(folder, copy.deepcopy(model), CASES[case][1], nodes)
            made[case, nodes] = folder, model, names
        folder, model, names = made[case, nodes]
        return folder, copy.deepcopy(model), names

    return get


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"update_frequency": 4},
    {"clip_grad_norm": 0.05},
    {"recompute": True},
    {"in_flight": 1},
)
SIZES = {"cnn": 2, "tied-gpt": 3}
"""Number of nodes with which each setting is tried; all combinations are in make test-full."""


@pytest.mark.parametrize(
    ("settings", "case", "nodes"),
    [
        pytest.param(
            settings,
            case,
            nodes,
            marks=() if not settings or SIZES[case] == nodes else pytest.mark.full,
            id=f"{settings}-{case}-{nodes}",
        )
        for settings, case, nodes in itertools.product(SETTINGS, CASES, (1, 2, 3, 4))
    ],
)
def test_sync_training_equals_a_single_process(
    formed: Any, case: str, nodes: int, settings: dict[str, Any]
) -> None:
    _, _, loaders, loss_of = CASES[case]
    folder, model, names = formed(case, nodes)
    cluster = LocalCluster(folder, names)
    cluster.train(
        loaders,
        node={
            "schedule": "sync",
            "micro_batches": 1,
            "optimizer": torch.optim.AdamW,
            "optimizer_params": {"lr": 1e-2},
            "lr_scheduler": torch.optim.lr_scheduler.StepLR,
            "lr_scheduler_params": {"step_size": 1, "gamma": 0.5},
            "criterion": loss_of if case == "tied-gpt" else nn.functional.cross_entropy,
            **settings,
        },
        epochs=EPOCHS,
        save=True,
        val_freq=1,
    )
    train_loader, val_loader = loaders()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def validate() -> None:
        for _ in val_loader or ():
            """Iterate only: validation shares the generator with training."""

    losses = train_alone(
        model,
        train_loader,
        loss_of,
        optimizer,
        epochs=EPOCHS,
        scheduler=scheduler,
        update_frequency=settings.get("update_frequency", 1),
        clip=settings.get("clip_grad_norm"),
        after_epoch=validate,
    )
    # With several batches per update, a tied weight's gradient is summed by stage, then over stages.
    same_sums = nodes == 1 or case == "cnn" or "update_frequency" not in settings
    if same_sums:
        _same(cluster.fused(), model.state_dict())
    written = [float(line) for line in (folder / "losses.txt").read_text().split()]
    assert written == pytest.approx(losses, rel=1e-6 if same_sums else 1e-4)
