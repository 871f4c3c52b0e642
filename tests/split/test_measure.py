"""Costs measured with fake tensors equal those of a real run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ravnest.split import PreparedModel, prepare


def _cnn() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 49, 10)), torch.randn(5, 3, 16, 16)


def _transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    return layer, torch.randn(5, 7, 16)


@pytest.mark.parametrize("make", [_cnn, _transformer])
def test_flops_and_saved_bytes_equal_eager(make) -> None:
    model, x = make()
    prepared = prepare(model, x)
    costs = prepared.measurements["train"].costs
    with FlopCounterMode(display=False) as counter:
        saved = _saved_bytes(model, x)
    assert sum(cost.flops for cost in costs) == counter.get_total_flops()
    assert sum(cost.saved_bytes for cost in costs) == pytest.approx(saved, rel=0.02)


@pytest.mark.parametrize("make", [_cnn, _transformer])
def test_a_real_run_measures_the_same_flops(make) -> None:
    model, x = make()
    model.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fake, real = prepare(model, x), prepare(model, x, pass_data=True)
    assert _flops(fake) == _flops(real)
    assert real.measurements["train"].measured
    assert any(cost.seconds for cost in real.measurements["train"].costs)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_lstm_has_costs() -> None:
    prepared = prepare(nn.LSTM(8, 16, num_layers=2, batch_first=True), torch.randn(4, 6, 8))
    products = 2 * 4 * 6 * (4 * 16 * (8 + 16) + 4 * 16 * (16 + 16))
    assert sum(_flops(prepared)) == products
    assert sum(cost.saved_bytes for cost in prepared.measurements["train"].costs) > 0


def _flops(prepared: PreparedModel) -> list[int]:
    return [cost.flops for cost in prepared.measurements["train"].costs]


def _saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    parameters = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _kept_alive = model(x)
    return sum(seen.values())
