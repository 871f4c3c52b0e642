"""LSTM layers defer the weight gradients of some micro-batches where the stage would wait."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import LocalCluster, form
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ravnest import set_seed
from ravnest.runtime.batch_parts import part_sizes
from ravnest.runtime.control import microbatch_tuner
from ravnest.runtime.schedule.costly_deferral import CostlyDeferral
from ravnest.runtime.schedule.events import Action, RunForward, RunWeights
from ravnest.runtime.schedule.simulator import LinkCost, Scenario, StageCost, simulate
from ravnest.runtime.stage.execution import LossPart, StageExecution
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.split import lstm_deferral, split
from ravnest.split.module import StageModule
from ravnest.types import MicrobatchId

PARTS = 12
EXTRA = 1.14
"""Time of an LSTM layer that defers, as a multiple of the time of one that does not."""


def deferred_of(choice: CostlyDeferral, parts: int = PARTS) -> int:
    """Return how many of the micro-batches of an update are deferred: the first ones."""
    found = [choice.defers_next() for _ in range(parts)]
    assert found == sorted(found, reverse=True)
    return sum(found)


class TestChoice:
    def test_nothing_is_deferred_while_batches_are_not_split(self) -> None:
        choice = CostlyDeferral()
        for _ in range(5):
            choice.waits()
            assert deferred_of(choice, 4) == 0
            choice.update_done(4, batches=4)

    def test_half_of_the_first_split_batch_then_one_more_while_the_stage_waits(self) -> None:
        choice, numbers = CostlyDeferral(), []
        for _ in range(9):
            numbers.append(deferred_of(choice))
            choice.waits()
            choice.update_done(PARTS, batches=1)
        assert numbers == [0, 6, 7, 8, 9, 10, 11, 12, 12]

    def test_a_stage_that_never_waits_defers_no_more(self) -> None:
        choice = CostlyDeferral()
        for _ in range(3):
            choice.update_done(PARTS, batches=1)
        assert deferred_of(choice) == 6

    def test_as_many_fewer_as_delay_the_next_update(self) -> None:
        choice = CostlyDeferral()
        choice.update_done(PARTS, batches=1)
        for delaying, expected in ((2, 4), (1, 3), (9, 0)):
            choice.waits()
            for _ in range(delaying):
                choice.delays_forward()
            choice.update_done(PARTS, batches=1)
            assert deferred_of(choice) == expected
            choice.update_done(PARTS, batches=1)  # nothing waited and nothing was delayed

    def test_a_small_last_batch_does_not_lower_the_number(self) -> None:
        choice = CostlyDeferral()
        choice.update_done(PARTS, batches=1)
        choice.waits()
        choice.update_done(2, batches=1)
        assert deferred_of(choice) == 6


def lstm_stage(seconds: float) -> StageCost:
    """Return the costs of a stage of LSTM layers."""
    third = seconds / 3
    slower = third * (1 + 1.5 * (EXTRA - 1))
    return StageCost(third, 2 * third, deferring=StageCost(slower, slower, weights=third))


def pipeline(costs: list[StageCost], delay: float, parts: int = PARTS) -> Scenario:
    """Return a scenario of 60 updates."""
    links = (LinkCost(delay, delay),) * (len(costs) - 1)
    return Scenario(tuple(costs), links, parts, parts, "sync", 60 * parts)


def without(scenario: Scenario) -> Scenario:
    """Return the scenario with stages that do not defer."""
    costs = [cost for cost in scenario.costs if isinstance(cost, StageCost)]
    return replace(scenario, costs=tuple(replace(cost, deferring=None) for cost in costs))


class TestPipeline:
    def test_it_gains_where_stages_wait(self) -> None:
        for count in (3, 8):
            scenario = pipeline([lstm_stage(0.03)] * count, 0.02, parts=4 * count)
            assert simulate(scenario).rate > 1.06 * simulate(without(scenario)).rate

    def test_it_never_costs_more_than_it_gains(self) -> None:
        drawn = random.Random(0)
        ratios = []
        for _ in range(40):
            costs = [lstm_stage(drawn.uniform(0.01, 0.05)) for _ in range(drawn.randint(2, 6))]
            scenario = pipeline(costs, drawn.choice((0.0, 0.005, 0.02)), drawn.randint(2, 24))
            ratios.append(simulate(scenario).rate / simulate(without(scenario)).rate)
        assert min(ratios) > 0.99
        assert sum(ratios) / len(ratios) > 1.03

    def test_a_slowest_stage_that_does_not_wait_defers_next_to_nothing(self) -> None:
        runs: dict[type[Action], int] = {}

        def observe(_: float, stage: int, action: Action) -> None:
            if stage == 1 and (
                isinstance(action, RunWeights) or getattr(action, "defers_costly", False)
            ):
                runs[type(action)] = runs.get(type(action), 0) + 1

        scenario = pipeline([StageCost(0.001, 0.002), lstm_stage(0.03)], 0.0)
        simulate(scenario, observe=observe)
        assert runs[RunForward] == runs[RunWeights], "what is deferred is computed"
        assert runs[RunForward] < 0.1 * scenario.microbatches

    def test_the_root_and_async_defer_nothing(self) -> None:
        def observe(_: float, stage: int, action: Action) -> None:
            assert not (isinstance(action, RunForward) and action.defers_costly and stage == 0)
            assert schedule == "sync" or not isinstance(action, RunWeights)

        for schedule in ("sync", "async"):
            scenario = replace(pipeline([lstm_stage(0.03)] * 3, 0.02), schedule=schedule)
            simulate(scenario, observe=observe)


class Tagger(nn.Module):
    """LSTM layers between linear ones, with a small width."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(4, 24), nn.LSTM(8, 8, 3, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.layers(self.first(x).view(-1, 3, 8))
        return self.head(y[:, -1])


@pytest.fixture
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers of any size defer."""
    monkeypatch.setattr(lstm_deferral, "LEAST_WIDTH", 1)
    monkeypatch.setattr(lstm_deferral, "LEAST_PRODUCT", 1)


@pytest.mark.usefixtures("small_layers")
@pytest.mark.parametrize("kept", [None, 1])
def test_a_stage_adds_up_the_gradients_of_deferred_and_other_micro_batches(kept: int | None) -> None:
    torch.manual_seed(0)
    model, batches = Tagger(), torch.randn(3, 6, 4)
    (stage,) = split(model, batches[0], stages=1).stages
    module = StageModule(stage.spec, {key: t.clone() for key, t in stage.tensors.items()})
    rule = UpdateRule(torch.optim.SGD, {"lr": 0.1})
    execution = StageExecution(module, rule, seed=0, stash=False, defer=True, kept=kept)
    assert execution.may_defer_costly
    (name,) = [spec.name for spec in module.graph.inputs]
    loss_part = LossPart(lambda outputs: outputs[0].square().mean())
    ids = [MicrobatchId(0, index) for index in range(3)]
    for number, (microbatch, x) in enumerate(zip(ids, batches, strict=True)):
        model(x).square().mean().backward()
        execution.forward(microbatch, 0, {name: x}, loss_part, costly=number < 2)
    for microbatch in ids:
        execution.backward(microbatch, {})
    for microbatch in ids:
        execution.weight_gradients(microbatch)
    found = execution.updates.gradients
    assert found.keys() == dict(model.named_parameters()).keys()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, rtol=1e-5, atol=1e-7)


BATCH, UPDATES = 12, 6


def loaders() -> tuple[DataLoader[Any], None]:
    """Return the same batches each time."""
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(UPDATES * BATCH, width, generator=generator) for width in (4, 3))
    return DataLoader(TensorDataset(x, y), BATCH), None


def train(folder: Path, model: nn.Module, **settings: Any) -> dict[str, torch.Tensor]:
    """Train a copy of the model on three nodes and return the weights."""
    names = form(folder, copy.deepcopy(model), (torch.rand(BATCH, 4),), 3)
    cluster = LocalCluster(folder, names)
    node = {
        "optimizer": torch.optim.SGD,
        "optimizer_params": {"lr": 0.1, "momentum": 0.9},
        "criterion": nn.functional.mse_loss,
        "schedule": "sync",
        **settings,
    }
    cluster.train(loaders, node=node, epochs=2, save=True)
    return cluster.fused()


def train_parts(model: nn.Module, parts: int) -> dict[str, torch.Tensor]:
    """Train in one process, with the gradients of the parts of each batch added up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for inputs, targets in loaders()[0]:
            optimizer.zero_grad()
            sizes = part_sizes(len(inputs), parts)
            for x, y in zip(inputs.split(sizes), targets.split(sizes), strict=True):
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward(torch.full_like(loss, len(x) / len(inputs)))
            optimizer.step()
    return model.state_dict()


@pytest.fixture
def deferred_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an entry for each LSTM layer whose gradients were deferred."""
    calls: list[int] = []
    run = lstm_deferral.run_backward

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return run(*arguments)

    monkeypatch.setattr(lstm_deferral, "run_backward", counted)
    return calls


@pytest.mark.usefixtures("small_layers")
def test_a_number_of_micro_batches_that_is_set_keeps_the_bits(
    tmp_path: Path, deferred_calls: list[int]
) -> None:
    set_seed(3)
    model = Tagger()
    found = train(tmp_path, model, micro_batches=4)
    assert not deferred_calls
    for name, value in train_parts(model, 4).items():
        assert torch.equal(found[name], value), name


@pytest.mark.usefixtures("small_layers")
def test_training_with_deferral_is_that_of_one_process_within_float_error(
    tmp_path: Path, deferred_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microbatch_tuner, "LEAST_BATCHES", 1)
    monkeypatch.setattr(microbatch_tuner, "choose_microbatches", lambda *_: 6)
    monkeypatch.setattr(microbatch_tuner, "WORTHWHILE", 100.0)
    monkeypatch.setattr(microbatch_tuner, "FASTER", 100.0)
    monkeypatch.setattr(microbatch_tuner, "LEAST_SECONDS", 0.0)
    set_seed(3)
    model = Tagger()
    found = train(tmp_path, model)
    assert deferred_calls
    for name, value in train_parts(model, 1).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
