"""Prediction of the weights of late gradients from the state of the optimizer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from local_cluster import Splits
from scripted_pipeline import ScriptedPipeline
from torch import nn
from training_cases import points

from ravnest.runtime.schedule.machine import ScheduleMachine
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.look_ahead import LookAhead
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.runtime.stage.weight_versions import WeightVersions
from ravnest.store.bundle import load_module
from ravnest.store.node_spec import read_node

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
PREDICTING: dict[str, MakeOptimizer] = {
    "Adam": lambda weights: torch.optim.Adam(weights, lr=0.1),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.0),
    "AMSGrad": lambda weights: torch.optim.Adam(weights, lr=0.1, amsgrad=True),
    "maximising Adam": lambda weights: torch.optim.Adam(weights, lr=0.1, maximize=True),
    "Adamax": lambda weights: torch.optim.Adamax(weights, lr=0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.9),
}


def _trained(
    make: MakeOptimizer, updates: int, dtype: torch.dtype = torch.float32
) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """Return a weight after updates with a constant gradient, and its optimizer."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype))
    optimizer = make([weight])
    for _ in range(updates):
        _update(weight, optimizer)
    return weight, optimizer


def _update(weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    weight.grad = torch.tensor([0.5, -3.0], dtype=weight.dtype)
    optimizer.step()


@pytest.mark.parametrize("name", PREDICTING)
def test_a_steady_gradient_is_predicted_exactly(name: str) -> None:
    weight, optimizer = _trained(PREDICTING[name], 300)
    look_ahead, before = LookAhead(optimizer, {"w": weight}), weight.detach().clone()
    look_ahead.apply()
    predicted = weight.detach().clone()
    look_ahead.take_back()
    assert not look_ahead.applied
    torch.testing.assert_close(weight.detach(), before, rtol=2e-7, atol=0)
    _update(weight, optimizer)
    torch.testing.assert_close(predicted, weight.detach(), rtol=1e-4, atol=1e-5)
    assert not torch.equal(predicted, before)


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: torch.optim.SGD(weights, lr=0.1),
        lambda weights: torch.optim.Adagrad(weights, lr=0.1),
    ],
)
def test_an_optimizer_whose_state_shows_no_direction_predicts_nothing(make: MakeOptimizer) -> None:
    weight, optimizer = _trained(make, 3)
    before = weight.detach().clone()
    LookAhead(optimizer, {"w": weight}).apply()
    assert torch.equal(weight, before)


def test_nothing_is_predicted_before_the_first_update_nor_in_half_precision() -> None:
    for updates, dtype in ((0, torch.float32), (3, torch.bfloat16)):
        weight, optimizer = _trained(PREDICTING["Adam"], updates, dtype)
        before = weight.detach().clone()
        LookAhead(optimizer, {"w": weight}).apply()
        assert torch.equal(weight, before)


def test_a_prediction_is_taken_back_with_the_learning_rate_it_was_made_with() -> None:
    weight, optimizer = _trained(PREDICTING["Adam"], 3)
    look_ahead, before = LookAhead(optimizer, {"w": weight}), weight.detach().clone()
    look_ahead.apply()
    optimizer.param_groups[0]["lr"] = 5.0
    look_ahead.take_back()
    torch.testing.assert_close(weight.detach(), before, rtol=2e-7, atol=0)


def _versions() -> tuple[nn.Parameter, torch.optim.Optimizer, WeightVersions]:
    weight, optimizer = _trained(PREDICTING["Adam"], 3)
    look_ahead = LookAhead(optimizer, {"w": weight})
    return weight, optimizer, WeightVersions({"w": weight}, stash=True, look_ahead=look_ahead)


def test_a_late_gradient_uses_predicted_weights_in_two_buffers() -> None:
    weight, optimizer, versions = _versions()
    for version in range(4):
        before = weight.detach().clone()
        used = versions.at(version, late=True)["w"]
        predicted = used.detach().clone()
        assert not torch.equal(predicted, before)
        copy = {"w": used.detach().clone()}
        versions.undo_prediction(copy)
        torch.testing.assert_close(copy["w"], before, rtol=2e-7, atol=0)
        if version:
            versions.free(version - 1)
        versions.before_update(in_use=True)
        assert not versions.predicted
        torch.testing.assert_close(weight.detach(), before, rtol=2e-7, atol=0)
        _update(weight, optimizer)
        assert torch.equal(used, predicted), "the update must not change weights in use"
        assert len(versions) == 1, "one buffer besides the newest weights'"


def test_a_gradient_that_is_not_late_uses_the_weights_themselves() -> None:
    weight, _, versions = _versions()
    before = weight.detach().clone()
    assert torch.equal(versions.at(0)["w"], before)
    assert torch.equal(versions.at(0, late=True)["w"], before)
    assert not versions.predicted


def test_replaced_weights_are_not_predicted_ones() -> None:
    weight, _, versions = _versions()
    versions.at(0, late=True)
    with torch.no_grad():
        weight.fill_(7.0)
    versions.renew(in_use=False)
    versions.before_update(in_use=False)
    assert torch.equal(weight, torch.full((2,), 7.0))


def _train(splits: Splits, schedule: Any, *, look_ahead: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Return the weights of a scripted pipeline, and the most copies of them at each stage."""
    folder, names = splits("mlp", 3)
    specs = [read_node(folder / "node_data", name) for name in names]
    modules = [
        load_module(folder / "node_data" / s.bundle, s.sha256, torch.device("cpu")) for s in specs
    ]
    rule = UpdateRule(torch.optim.AdamW, {"lr": 0.05}, look_ahead=look_ahead)
    executions = [
        StageExecution(module, rule, seed=1, stash=schedule == "async" and at < 2, defer=at > 0)
        for at, module in enumerate(modules)
    ]
    machines = [ScheduleMachine(at, 3, schedule=schedule, window=2) for at in range(3)]
    (name,) = [spec.name for spec in modules[0].graph.inputs]
    data = [({name: x}, y) for x, y in points(60)]
    pipeline = ScriptedPipeline(machines, executions, data, nn.functional.cross_entropy)
    pipeline.train(random.Random(2))
    weights = [w.detach() for e in executions for w in e.trained().values()]
    assert not any(execution.predicted for execution in executions)
    return weights, pipeline.versions


def test_a_pipeline_predicts_in_async_only_and_without_a_further_copy(splits: Splits) -> None:
    with_it, copies = _train(splits, "async", look_ahead=True)
    without, _ = _train(splits, "async", look_ahead=False)
    assert max(copies) == 1
    assert not all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
    with_it, _ = _train(splits, "sync", look_ahead=True)
    without, _ = _train(splits, "sync", look_ahead=False)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
