"""Training stops at losses and weights that are not finite; the checkpoint before is kept."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from local_cluster import Formed
from torch import nn
from training_cases import points

from ravnest import Trainer
from ravnest.errors import RunError
from ravnest.runtime.control.checkpoints import Checkpoints
from ravnest.runtime.stage.divergence import DivergedError, Divergence
from ravnest.types import CheckpointId


def test_the_first_loss_that_is_not_finite_stops_training() -> None:
    checked = Divergence(1)
    checked.check_loss(3.0, 0, 0)
    with pytest.raises(DivergedError, match=r"the loss of update 8 \(epoch 2\) is inf: training stops"):
        checked.check_loss(math.inf, 7, 1)


def test_a_limit_counts_updates_in_a_row() -> None:
    checked = Divergence(3)
    for loss in (math.nan, math.nan, 1.0, math.nan, None, math.nan):
        if loss is not None:
            checked.check_loss(loss, 0, 0)
        checked.updated(loss)
    with pytest.raises(DivergedError, match="those of the 2 updates before were not finite either"):
        checked.check_loss(math.nan, 6, 0)


def test_without_a_limit_training_goes_on() -> None:
    checked = Divergence(None)
    checked.check_loss(math.nan, 0, 0)
    checked.check_weights({"weight": torch.tensor([math.nan])}, 1)


def test_weights_that_are_not_finite_are_named() -> None:
    checked = Divergence(1)
    huge = torch.full((4,), 3e38)  # finite, but their sum is not
    checked.check_weights({"huge": huge, "half": torch.full((3,), 6e4, dtype=torch.float16)}, 5)
    with pytest.raises(DivergedError, match=r"head\.bias has values that are NaN or infinite after 5"):
        checked.check_weights({"huge": huge, "head.bias": torch.tensor([1.0, -math.inf])}, 5)


class _NanAt:
    """Cross entropy that is NaN in one call."""

    def __init__(self, call: int) -> None:
        self.calls = 0
        self._call = call

    def __call__(self, output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        if output.requires_grad:  # not when the loss is checked at the start
            self.calls += 1
        factor = math.nan if self.calls == self._call and output.requires_grad else 1.0
        return nn.functional.cross_entropy(output, batch[-1]) * factor


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_diverged_run_fails_on_all_nodes_and_names_the_checkpoint(
    cluster: Formed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    # Which one the Leaf knows of depends on the threads that write them.
    monkeypatch.setattr(Checkpoints, "complete", CheckpointId(4, 0))
    local = cluster(nodes=3, schedule=schedule, micro_batches=1, checkpoint_updates=2)

    def script(name: str) -> None:
        with local.node(name, labels=points(), criterion=_NanAt(9)) as own:
            Trainer(own, train_loader=points(), epochs=4, save=True).train()

    errors = [str(outcome.error) for outcome in local.run(script).values()]
    assert len(set(errors)) == 1, "every node has the same reason"
    assert f"{local.names[-1]}: the loss of update 9 (epoch 2) is nan" in errors[0]
    assert errors[0].endswith("The checkpoint of update 4 is kept: resume=True continues from it")
    assert not list(tmp_path.glob("trained/**/*.safetensors")), "no model with NaN is delivered"
    losses = len(Path("losses.txt").read_text().split())
    assert losses == 8 if schedule == "sync" else 6 <= losses <= 8  # later gradients were on their way

    def again(name: str) -> None:
        with local.node(name, labels=points(), resume=True) as own:
            Trainer(own, train_loader=points(), epochs=4, save=True).train()

    local.results(again)
    assert len(Path("losses.txt").read_text().split()) == 20


def test_a_run_whose_weights_are_not_finite_delivers_no_model(cluster: Formed, tmp_path: Path) -> None:
    local = cluster(optimizer_params={"lr": math.inf}, checkpoints=False)

    def script(name: str) -> None:
        batch = list(points())[:1]
        with local.node(name, labels=batch) as own:
            Trainer(own, train_loader=batch, save=True).train()

    errors = [outcome.error for outcome in local.run(script).values()]
    assert all(isinstance(error, RunError) for error in errors)
    assert "has values that are NaN or infinite after 1 updates" in str(errors[0])
    assert not list(tmp_path.glob("trained/**/*.safetensors"))


def test_a_run_that_goes_on_saves_what_it_has(cluster: Formed, tmp_path: Path) -> None:
    local = cluster(stop_on_nan=None)

    def script(name: str) -> None:
        with local.node(name, labels=points(), criterion=_NanAt(2)) as own:
            Trainer(own, train_loader=points(), save=True).train()

    local.results(script)
    assert list(tmp_path.glob("trained/**/*.safetensors"))
