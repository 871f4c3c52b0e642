"""Splitting compares the stages with the model, and leaves the model unchanged."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from ravnest.errors import ExactnessError
from ravnest.split import prepare, split, verify


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def test_equal_models_are_bitwise_equal() -> None:
    prepared = prepare(_model(), (torch.randn(6, 4),))
    result = verify(prepared.capture, [prepared.cut([1]).stages, prepared.cut([2]).stages])
    assert result.bitwise
    assert result.batch_size == 6


def test_model_and_random_state_are_unchanged() -> None:
    model = _model()
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    split(model, (torch.randn(6, 4, generator=torch.Generator().manual_seed(1)),))
    assert torch.equal(torch.get_rng_state(), rng), "the random state must not change"
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


def test_a_hook_that_changes_gradients_is_detected() -> None:
    model = _model()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(
        ExactnessError, match=r"the gradient of 0\.weight is the first tensor that differs"
    ):
        split(model, (torch.randn(6, 4),))
    split(model, (torch.randn(6, 4),), check=False)


def test_a_changed_stage_is_detected() -> None:
    prepared = prepare(_model(), (torch.randn(6, 4),))
    stages = prepared.cut([1]).stages
    broken = SimpleNamespace(
        spec=stages[1].spec, tensors={k: t + 1 for k, t in stages[1].tensors.items()}
    )
    with pytest.raises(ExactnessError, match="in train mode output is the first tensor that differs"):
        verify(prepared.capture, [[stages[0], broken]])


def test_a_small_difference_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    prepared = prepare(_model(), (torch.randn(6, 4),))
    stages = prepared.cut([1]).stages
    tensors = dict(stages[1].tensors)
    tensors["3.bias"] = tensors["3.bias"] * (1 + 1e-7) + 3e-8
    nearly = SimpleNamespace(spec=stages[1].spec, tensors=tensors)
    with caplog.at_level(logging.WARNING, logger="ravnest"):
        result = verify(prepared.capture, [[stages[0], nearly]])
    assert not result.bitwise
    assert 0 < max(result.differences.values()) <= 1e-6
    assert "differ in" in caplog.text


@pytest.mark.parametrize(("free", "batch"), [(10**9, 6), (40_000, 2), (1_000, None)])
def test_the_batch_of_the_check_follows_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int, batch: int | None
) -> None:
    prepared = prepare(_model(), (torch.randn(6, 4),))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    with caplog.at_level(logging.WARNING, logger="ravnest"):
        result = verify(prepared.capture, [prepared.cut([1]).stages], activation_bytes=60_000)
    assert result.batch_size == batch
    assert ("not checked" in caplog.text) == (batch is None)
