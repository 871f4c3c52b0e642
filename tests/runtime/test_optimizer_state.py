"""Optimizer state in 8 bits: small errors without a bias, exact checkpoints, little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import LocalCluster, form
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ravnest import Trainer, set_seed
from ravnest.errors import SettingsError
from ravnest.plan.profiler import kept_state, optimizer_state_factor
from ravnest.runtime.settings import NodeSettings, check_state_form
from ravnest.runtime.stage.optimizer_state import PackedState
from ravnest.runtime.stage.packed_tensor import PackedTensor
from ravnest.runtime.stage.updates import UpdateRule, Updates
from ravnest.store.checkpoint import LazyTensor

SIZE = 64 * 64


def _values(kind: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(5)
    normal = torch.randn(3 * SIZE + 17, generator=draw)
    return {
        "normal": normal,
        "squares": normal.square(),
        "wide": normal**9 * 1e-12,
        "tiny": normal * 1e-38,
        "zeros": torch.zeros(SIZE),
        "powers": torch.exp2(torch.arange(SIZE) % 40 - 20.0),
        "one negative": torch.cat([torch.ones(SIZE), torch.tensor([-1e-30])]),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["normal", "squares", "wide", "tiny", "zeros", "powers", "one negative"]
)
def test_unpacked_values_are_packed_to_the_same_bytes(kind: str) -> None:
    packed = PackedTensor.of(_values(kind), 1)
    again = PackedTensor.of(packed.unpack(), 2)
    assert torch.equal(again.codes, packed.codes)
    assert torch.equal(again.scales, packed.scales)
    assert torch.equal(again.unpack(), packed.unpack())


def test_values_keep_their_signs_and_a_relative_precision() -> None:
    for kind, error in (("normal", 0.02), ("squares", 0.02)):
        values = _values(kind)
        found = PackedTensor.of(values, 1).unpack()
        assert torch.equal(found.sign(), values.sign()), "what divides a step does not become zero"
        assert float((found - values).norm() / values.norm()) < error
    small = torch.full((256,), 1e-6)
    small[0] = 1.0
    found = PackedTensor.of(small, 1).unpack()
    assert float(found[1:].sqrt().div(1e-3).sub(1).abs().max()) < 0.25


def test_rounding_has_no_bias() -> None:
    values = _values("squares")[:SIZE]
    mean = sum(PackedTensor.of(values, seed).unpack() for seed in range(300)) / 300
    assert isinstance(mean, torch.Tensor)
    assert float(((mean - values) / values).median().abs()) < 1e-3
    assert float((mean - values).norm() / values.norm()) < 2e-3


def test_what_is_not_finite_stays_so() -> None:
    values = torch.ones(2 * 256)
    values[3] = torch.nan
    found = PackedTensor.of(values, 1).unpack()
    assert not found[:256].isfinite().any()
    assert torch.equal(found[256:], torch.ones(256))


def test_other_memory_layouts_are_kept() -> None:
    weight = torch.randn(8, 16, 4, 8).to(memory_format=torch.channels_last)
    found = PackedTensor.of(weight, 1).unpack(weight)
    assert found.stride() == weight.stride()
    torch.testing.assert_close(found, weight, atol=0.1, rtol=0.1)


def _model() -> nn.Module:
    set_seed(3)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def _updates(optimizer: Any = torch.optim.AdamW, form: Any = "int8", **params: Any) -> Any:
    model = _model()
    rule = UpdateRule(optimizer, {"lr": 1e-3, **params}, state=form)
    return Updates(rule, dict(model.named_parameters())), model


def _train(updates: Updates, model: nn.Module, steps: int, first: int = 0) -> list[float]:
    losses = []
    for number in range(first, first + steps):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(number))
        loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
        loss.backward()
        updates.step(1)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("optimizer", "params"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adamax, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adagrad, {"lr": 1e-2}),
        (torch.optim.Adadelta, {"lr": 1.0}),
        (torch.optim.ASGD, {"lr": 0.1}),
        (torch.optim.Rprop, {}),
        (torch.optim.Adafactor, {"lr": 1e-2}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_optimizers_learn_as_with_float32(optimizer: Any, params: dict[str, Any]) -> None:
    packed = _train(*_updates(optimizer, **params), 30)
    exact = _train(*_updates(optimizer, "float32", **params), 30)
    assert exact[-1] < exact[0]
    assert packed[-1] == pytest.approx(exact[-1], rel=0.02)


def test_large_tensors_are_packed_and_small_ones_stay() -> None:
    updates, model = _updates()
    _train(updates, model, 2)
    state = updates._state
    assert isinstance(state, PackedState)
    large, small = state.fields("0.weight"), state.fields("0.bias")
    assert isinstance(large["exp_avg"], PackedTensor)
    assert isinstance(large["exp_avg_sq"], PackedTensor)
    assert large["exp_avg"].nbytes == SIZE + 4 * SIZE // 256
    assert small["exp_avg"].dtype == torch.float32
    assert "exp_avg" not in updates.optimizer.state[model[0].weight], "nothing is unpacked"
    assert [len(group["params"]) for group in updates.optimizer.param_groups] == [4]


def test_a_step_that_fails_leaves_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    updates, model = _updates()
    monkeypatch.setattr(updates.optimizer, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _train(updates, model, 1)
    assert [len(group["params"]) for group in updates.optimizer.param_groups] == [4]


def _loaded(updates: Updates, into: Updates) -> Any:
    """Return a checkpoint as another stage gets it."""
    tensors, plain = updates.capture()
    found = {}
    for name, tensor in tensors.items():
        loaded = tensor.load() if isinstance(tensor, LazyTensor) else tensor
        found[name] = into.stored(name, loaded.clone())
    return found, plain


def test_a_checkpoint_has_every_bit_and_fits_other_forms() -> None:
    updates, model = _updates()
    _train(updates, model, 3)
    for kind in ("int8", "float32"):
        other, copied = _updates(form=kind)
        copied.load_state_dict(model.state_dict())
        other.restore(*_loaded(updates, other))
        own, same = _updates()
        same.load_state_dict(model.state_dict())
        own.restore(*_loaded(updates, own))
        found, expected = _train(other, copied, 2, 3), _train(own, same, 2, 3)
        assert found == (expected if kind == "int8" else pytest.approx(expected, rel=1e-3))
    _train(updates, model, 2, 3)
    assert all(
        torch.equal(one, two) for one, two in zip(model.parameters(), same.parameters(), strict=True)
    )


def test_predictions_use_the_packed_state() -> None:
    updates, model = _updates()
    _train(updates, model, 2)
    look_ahead, before = updates.look_ahead(), model[0].weight.detach().clone()
    assert look_ahead is not None
    look_ahead.apply()
    assert not torch.equal(model[0].weight, before)
    look_ahead.take_back()
    torch.testing.assert_close(model[0].weight.detach(), before, atol=1e-7, rtol=1e-6)
    assert isinstance(updates._state.fields("0.weight")["exp_avg"], PackedTensor)


def test_the_plan_counts_the_smaller_state() -> None:
    factor = optimizer_state_factor(torch.optim.AdamW)
    parameters = list(nn.Linear(1024, 64).parameters())
    exact, packed = (kept_state(factor, parameters, kind) for kind in ("float32", "int8"))
    assert exact.factor == 2
    assert packed.factor == pytest.approx(2 * 0.254, abs=0.002)
    assert packed.update_copies == exact.update_copies + 2, "the largest tensor is unpacked"
    halves = list(nn.Linear(1024, 64).to(torch.bfloat16).parameters())
    assert kept_state(factor, halves, "int8").factor == 2, "state in 16 bits is not packed"


class _OwnOptimizer(torch.optim.SGD):
    """Optimizer that is not one of torch."""


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SettingsError, match="average_optim=True needs the optimizer's state in float32"):
        check_state_form("int8", average_optim=True)
    with pytest.raises(SettingsError, match="must be 'float32' or 'int8', not 'int4'"):
        NodeSettings.of({"optimizer_state": "int4"})
    with pytest.raises(SettingsError, match="which _OwnOptimizer may not expect"):
        UpdateRule(_OwnOptimizer, {"lr": 0.1}, state="int8").check()


def test_a_resumed_pipeline_ends_with_the_same_weights(tmp_path: Path) -> None:
    names = form(tmp_path, _model(), (torch.rand(8, 64),), 2)
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 64, generator=made)

    def run(folder: str, epochs: int, **node: Any) -> LocalCluster:
        local = LocalCluster(tmp_path / folder, names, node_data=tmp_path / "node_data")
        options = {
            "schedule": "sync",
            "micro_batches": 1,
            "optimizer": torch.optim.AdamW,
            "optimizer_params": {"lr": 1e-2},
            "optimizer_state": "int8",
            "criterion": nn.functional.mse_loss,
        }

        def script(name: str) -> None:
            loader = DataLoader(TensorDataset(inputs, inputs.roll(1, 1)), 8)
            with local.node(name, labels=loader, **options, **node) as own:
                Trainer(own, train_loader=loader, epochs=epochs, save=True).train()

        local.results(script)
        return local

    for folder in ("whole", "resumed"):
        (tmp_path / folder).mkdir()
    expected = run("whole", 3).fused()
    run("resumed", 1)
    found = run("resumed", 3, resume=True).fused()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
