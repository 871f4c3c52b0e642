"""Frozen weights cost their bytes and nothing else: no gradients, optimizer state or traffic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from local_cluster import LocalCluster, form
from torch import nn
from training_cases import HalfFrozenMLP, points, small_model

from ravnest import model_fusion
from ravnest.errors import FusionError
from ravnest.plan.profiler import profile_model
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.split import StageModule, split
from ravnest.split.splitter import prepare
from ravnest.split.written_state import changing_state
from ravnest.store.trained import fuse_trained, lacks_frozen_weights, trained_tensors
from ravnest.store.weights import save_weights
from ravnest.types import MicrobatchId

RULE = UpdateRule(torch.optim.AdamW, {"lr": 0.1})


class Momentum(nn.Module):
    """Forward moves a weight that is not trained towards one that is, as a momentum encoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.fast = nn.Parameter(torch.ones(4))
        self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.slow.lerp_(self.fast, 0.5)
        return x * self.fast + self.slow * self.fixed


def stages_of_half_frozen() -> list[StageExecution]:
    """Return two stages, of which the first is frozen as a whole."""
    parts = split(HalfFrozenMLP(), (torch.rand(5, 4),), stages=2)
    first, second = (StageModule(part.spec, part.tensors) for part in parts.stages)
    return [StageExecution(each, RULE, seed=1, stash=True, defer=True) for each in (first, second)]


def test_a_frozen_stage_keeps_nothing_for_a_backward_pass() -> None:
    first, second = stages_of_half_frozen()
    assert (first.module.spec.has_gradients, second.module.spec.has_gradients) == (False, True)
    assert not any(value.gradient for value in second.module.graph.inputs), "nothing is sent back"
    batch = MicrobatchId(0, 0)
    values, _ = first.forward(batch, 0, {first.module.graph.inputs[0].name: torch.rand(5, 4)})
    assert not first._saved[batch].inputs
    assert first._saved[batch].stage_pass is None
    assert not any(value.requires_grad for value in values.values())
    assert first.backward(batch, {}) == {}
    first.step(1)
    assert not first.trained()
    assert not first.defers, "there are no weight gradients"


def test_optimizer_and_versions_have_trained_weights_only() -> None:
    _, second = stages_of_half_frozen()
    own = second.module.parameters_by_key()
    assert set(second.trained()) == {key for key, weight in own.items() if weight.requires_grad}
    assert second.updates.optimizer is not None
    held = [p for group in second.updates.optimizer.param_groups for p in group["params"]]
    assert {p.data_ptr() for p in held} == {w.data_ptr() for w in second.trained().values()}


def test_the_plan_counts_frozen_weights_once() -> None:
    """The first half needs neither optimizer state nor gradients nor a second version."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    model[:3].requires_grad_(False)
    profile = profile_model(prepare(model, (torch.rand(8, 64),)))
    trained = sum(tensor.bytes for tensor in profile.state if tensor.trainable)
    assert sum(tensor.bytes for tensor in profile.state) == 2 * trained
    assert sum(tensor.bytes for tensor in profile.state if tensor.averaged) == trained
    frozen, last = profile.units[1], profile.units[-1]
    assert frozen.work * 3 == last.work, "forward only, of three passes"
    assert (frozen.activation_bytes, frozen.gradient_bytes) == (0, 0)


def test_half_of_the_backward_pass_through_frozen_layers_is_counted() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model[1].requires_grad_(False)
    units = profile_model(prepare(model, (torch.rand(8, 64),))).units
    assert units[1].work * 3 == units[2].work * 2


def test_trained_stages_have_no_frozen_weights(tmp_path: Path) -> None:
    model = small_model("half-frozen")
    names = form(tmp_path, model, (torch.rand(5, 4),), 2)
    local = LocalCluster(tmp_path, names, {"save_frozen": False})
    local.train(lambda: (points(), None), node={}, epochs=1, save=True)
    stages = tmp_path / "trained" / "cluster_0"

    assert lacks_frozen_weights(stages)
    trained = trained_tensors(stages)
    assert set(trained) == {"third.weight", "third.bias", "last.weight", "last.bias"}
    with pytest.raises(FusionError, match=r"has no frozen weights, such as first\.weight"):
        model_fusion(0, folder=tmp_path / "trained")

    before = model.state_dict()
    save_weights(tmp_path / "model.safetensors", before)
    fused = fuse_trained(stages, tmp_path / "model.safetensors")
    assert list(fused) == list(before)
    for name, tensor in fused.items():
        assert torch.equal(tensor, trained.get(name, before[name]))
        assert torch.equal(tensor, before[name]) == (name not in trained)


def test_weights_that_forward_writes_are_part_of_the_result() -> None:
    (stage,) = split(Momentum(), (torch.rand(2, 4),), stages=1).stages
    assert {entry.key for entry in changing_state(stage.spec)} == {"slow", "fast"}
