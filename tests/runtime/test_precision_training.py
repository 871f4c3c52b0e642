"""Mixed precision: a synchronous pipeline trains as one process does under autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from ravnest.split import shared_casts

EPOCHS = 2


@pytest.fixture(autouse=True)
def _share_small_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share the casts of weights of any size between micro-batches."""
    monkeypatch.setattr(shared_casts, "LEAST_ELEMENTS", 1)


Trained = tuple[dict[str, torch.Tensor], list[float]]


def _image_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[-1])


class Autocast(nn.Module):
    """A model that one process runs under autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(x)


def _under_autocast(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(output: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(output, batch)

    return call


CASES = {
    "cnn": (SmallCNN, (torch.rand(8, 1, 8, 8),), image_loaders, _image_loss),
    "tied-gpt": (TiedGPT, (torch.randint(0, 16, (4, 8)),), token_loaders, token_loss),
}


def _alone(case: str, model: nn.Module) -> Trained:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = _under_autocast(CASES[case][3])
    losses = train_alone(Autocast(model), CASES[case][2]()[0], loss, optimizer, epochs=EPOCHS)
    return model.state_dict(), losses


def _pipeline(case: str, model: nn.Module, folder: Path, **node: Any) -> Trained:
    names = form(folder, model, CASES[case][1], 3, precision="bf16")
    cluster = LocalCluster(folder, names)
    settings = {
        "schedule": "sync",
        "optimizer": torch.optim.AdamW,
        "optimizer_params": {"lr": 1e-2},
        "criterion": CASES[case][3] if case == "tied-gpt" else nn.functional.cross_entropy,
    }
    cluster.train(lambda: (CASES[case][2]()[0], None), node=settings | node, epochs=EPOCHS, save=True)
    losses = [float(line) for line in (folder / "losses.txt").read_text().split()]
    return cluster.fused(), losses


@pytest.mark.parametrize("case", CASES)
def test_sync_training_has_the_bits_of_one_process_under_autocast(tmp_path: Path, case: str) -> None:
    set_seed(7)
    model = CASES[case][0]()
    found, losses = _pipeline(case, copy.deepcopy(model), tmp_path, micro_batches=1)
    expected, expected_losses = _alone(case, model)
    assert list(found) == list(expected)
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]
    assert all(tensor.dtype != torch.bfloat16 for tensor in found.values())
    assert losses == pytest.approx(expected_losses, rel=1e-6)


def test_micro_batches_differ_from_whole_batches_by_the_rounding_of_their_gradients(
    tmp_path: Path,
) -> None:
    """Each micro-batch rounds its gradients to bfloat16 before they are added in float32."""
    set_seed(7)
    model = TiedGPT()
    found, losses = _pipeline("tied-gpt", copy.deepcopy(model), tmp_path, micro_batches=2)
    expected, expected_losses = _alone("tied-gpt", model)
    assert losses == pytest.approx(expected_losses, rel=1e-2)
    assert losses[0] == pytest.approx(expected_losses[0], rel=1e-6), "forward has the same bits"
    assert all(tensor.dtype == expected[name].dtype for name, tensor in found.items())
