"""Application of an average to a stage, without a network or a thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ravnest.averaging.ports import RoundAverage
from ravnest.averaging.sinks import DeltaSink
from ravnest.runtime.stage.averaging_adapter import AveragingAdapter
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.inbox import WorkerInbox
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.split import split
from ravnest.split.module import StageModule
from ravnest.store.node_spec import RingSpec
from ravnest.wire.messages import RoundId

RULE = UpdateRule(torch.optim.AdamW, {"lr": 1e-2}, None, {}, scheduler_each_epoch=False)


class SyncInbox(WorkerInbox):
    """An inbox that makes each call at once."""

    def post(self, call: Callable[[], None]) -> None:
        call()

    def post_when_idle(self, call: Callable[[], None]) -> None:
        call()


class Stage:
    """A stage with a BatchNorm, all of it in one ring."""

    def __init__(self, *, with_optimizer: bool = False, ema: float | None = None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        (part,) = split(model, (torch.randn(5, 3),), stages=1, check=False).stages
        self.module = StageModule(part.spec, {k: t.clone() for k, t in part.tensors.items()})
        self.execution = StageExecution(self.module, replace(RULE, ema=ema), seed=0, stash=False)
        # Buffers before weights: the order of names must not matter.
        names = ["1.running_mean", "0.weight", "1.running_var", "0.bias", "1.weight", "1.bias"]
        ring = RingSpec(id=7, names=tuple(names), members=())
        self.adapter = AveragingAdapter(
            self.execution, SyncInbox(), [ring], with_optimizer=with_optimizer
        )
        self.round = 0

    def copy(self, *, idle: bool = False) -> torch.Tensor:
        found: list[dict[int, torch.Tensor]] = []
        self.adapter.copy(idle=idle, then=found.append)
        return found[0][7]

    def average(self, values: torch.Tensor, **how: bool) -> RoundId:
        """Store the result of a round with this average."""
        vector, kind = self.copy(), {"assign": False, "faulty": False} | how
        moving = 0 if any(kind.values()) else self.adapter.moving()[7]
        DeltaSink(vector, moving).keep(0, len(vector), values)
        self.round += 1
        self.adapter.store(RoundAverage(RoundId(self.round), {7: vector}, **kind))
        return RoundId(self.round)

    def apply(self, values: torch.Tensor, **how: bool) -> None:
        self.adapter.settle(self.average(values, **how), commit=True)

    def update(self) -> None:
        self.execution.catch_up()

    @property
    def weight(self) -> torch.Tensor:
        return self.module.state_tensors()["0.weight"].detach()


def test_weights_come_first_in_the_vector() -> None:
    stage = Stage()
    assert stage.adapter.moving() == {7: 12 + 4 + 4 + 4}
    assert stage.adapter.sizes() == {7: 12 + 4 + 4 + 4 + 4 + 4}
    assert torch.equal(stage.copy()[:12].view(4, 3), stage.weight)


def test_after_the_next_update_weights_move_and_buffers_are_replaced() -> None:
    stage = Stage()
    before, average = stage.weight.clone(), torch.arange(32.0)
    stage.apply(average)
    assert torch.equal(stage.weight, before)
    with torch.no_grad():
        stage.execution.trained()["0.weight"].add_(0.5)  # an update since the copy
    stage.update()
    torch.testing.assert_close(stage.weight, average[:12].view(4, 3) + 0.5)
    assert stage.module.state_tensors()["1.running_var"].tolist() == [28, 29, 30, 31]


def test_a_waiting_average_is_not_applied_twice() -> None:
    stage = Stage()
    stage.apply(torch.full((32,), 10.0))
    assert stage.copy().tolist() == pytest.approx([10.0] * 32), "the waiting average counts as applied"
    stage.apply(torch.full((32,), 12.0))
    stage.update()
    torch.testing.assert_close(stage.weight, torch.full((4, 3), 12.0))
    assert stage.module.state_tensors()["1.running_mean"].tolist() == [12] * 4
    assert stage.copy().tolist() == pytest.approx([12.0] * 32)


def test_moving_averages_of_weights_are_averaged_like_them() -> None:
    stage = Stage(ema=0.9)
    assert stage.adapter.moving() == {7: 2 * 24}
    assert stage.adapter.sizes() == {7: 2 * 24 + 8}
    average = stage.execution.updates.average
    assert average is not None
    stage.apply(torch.full((56,), 10.0))
    average.tensors["0.bias"].add_(0.5)  # an update since the copy
    assert stage.copy()[:48].tolist().count(pytest.approx(10.0)) == 44, "the waiting average counts"
    stage.update()
    assert average.tensors["0.weight"].flatten().tolist() == pytest.approx([10.0] * 12)
    assert average.tensors["0.bias"].tolist() == pytest.approx([10.5] * 4)
    average.tensors["0.bias"].fill_(float("nan"))
    stage.apply(torch.full((56,), 3.0), faulty=True)
    stage.update()
    assert average.tensors["0.bias"].tolist() == [3.0] * 4


def test_an_aborted_average_changes_nothing() -> None:
    stage = Stage()
    before = stage.copy()
    stage.adapter.settle(stage.average(torch.ones(32)), commit=False)
    stage.update()
    assert torch.equal(stage.copy(), before)


def test_a_paused_stage_becomes_the_average() -> None:
    stage = Stage()
    stage.apply(torch.full((32,), 0.1), assign=True)
    assert torch.equal(stage.copy(idle=True), torch.full((32,), 0.1))


@pytest.mark.parametrize("waiting", [True, False])
def test_a_stage_with_nan_becomes_the_average_and_resets_its_optimizer(waiting: bool) -> None:
    stage = Stage(with_optimizer=True)
    stage.execution.trained()["0.weight"].grad = torch.ones(4, 3)
    optimizer = stage.execution.updates.optimizer
    assert optimizer is not None
    optimizer.step()
    with torch.no_grad():
        stage.execution.trained()["0.weight"].fill_(torch.nan)
    copy = stage.copy()
    assert "NaN or Inf in 0.weight" in stage.adapter.fault({7: copy})
    stage.apply(torch.full_like(copy, 2.0), faulty=True)
    if not waiting:
        stage.update()
    healed = stage.copy()
    assert healed[:32].tolist() == [2.0] * 32
    assert healed[32:].tolist() == [0.0] * (len(copy) - 32)


def test_optimizer_state_is_averaged_too() -> None:
    stage = Stage(with_optimizer=True)
    trained = stage.execution.trained()
    for weight in trained.values():
        weight.grad = torch.ones_like(weight)
    optimizer: Any = stage.execution.updates.optimizer
    optimizer.step()
    size = len(stage.copy())
    assert size == 32 + 2 * 24
    stage.apply(torch.full((size,), 3.0))
    stage.update()
    assert optimizer.state[trained["0.weight"]]["exp_avg"].tolist() == [[3.0] * 3] * 4
    torch.testing.assert_close(stage.weight, torch.full((4, 3), 3.0))
