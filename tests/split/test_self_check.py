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
from ravnest.split import prepare, self_check, split, verify


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
    prepared = prepare(model, (torch.randn(6, 4),))
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(
        ExactnessError, match=r"the gradient of 0\.weight is the first tensor that differs"
    ):
        verify(prepared.capture, [prepared.cut([1]).stages])


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


def _images() -> tuple[nn.Module, torch.Tensor]:
    """Return a convolution whose activations are large, for a limit that is lowered in tests."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 4)
    )
    return model, torch.randn(7, 3, 8, 8)


@pytest.mark.parametrize(("operation_bytes", "part"), [(1_000, 7), (10_000, 3), (2_800, 3), (1_500, 4)])
def test_a_batch_with_large_operations_is_compared_in_parts(
    monkeypatch: pytest.MonkeyPatch, operation_bytes: int, part: int
) -> None:
    monkeypatch.setattr(self_check, "_SMALL_OPERATION", 1_000)
    monkeypatch.setattr(self_check, "_PARAMETERS_PER_OPERATION", 100)
    monkeypatch.setattr(self_check, "_FURTHER_SIZES", ())
    model, images = _images()
    seen: list[int] = []
    prepared = prepare(model, (images,))
    model.register_forward_pre_hook(lambda _module, args: seen.append(len(args[0])))
    result = verify(prepared.capture, [prepared.cut([1]).stages], operation_bytes=operation_bytes)
    assert result.bitwise
    assert result.batch_size == 7
    assert result.part_size == part
    assert seen[:4] == [2] * 4, "the model repeats a small batch in each mode"
    assert sum(seen[4:]) == 2 * 7, "every sample is compared once per mode"
    assert min(seen) >= 2


@pytest.mark.parametrize("row", [0, 6])
def test_a_difference_in_any_part_is_detected(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """The bias of a broken stage differs only if a sample is negative, so that one part shows it."""
    monkeypatch.setattr(self_check, "_SMALL_OPERATION", 1)
    monkeypatch.setattr(self_check, "_PARAMETERS_PER_OPERATION", 10**6)
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(0.0)
    samples = torch.ones(7, 1) * -1
    samples[row] = 1.0
    prepared = prepare(model, (samples,))
    stages = prepared.cut([2]).stages
    tensors = dict(stages[1].tensors)
    tensors["2.weight"] = tensors["2.weight"] + 1
    broken = SimpleNamespace(spec=stages[1].spec, tensors=tensors)
    step = "" if row == 0 else r" \(step 3\)"
    with pytest.raises(ExactnessError, match=f"in train mode output{step} is the first tensor"):
        verify(prepared.capture, [[stages[0], broken]], operation_bytes=100)


class _Pairs(nn.Module):
    """A model of pairs: it takes an even number of samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).reshape(-1, 8))


def test_parts_have_a_size_that_the_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_SMALL_OPERATION", 1)
    monkeypatch.setattr(self_check, "_PARAMETERS_PER_OPERATION", 10**6)
    prepared = prepare(_Pairs(), (torch.randn(10, 4),))
    result = verify(prepared.capture, [prepared.cut([1]).stages], operation_bytes=100)
    assert result.bitwise
    assert result.batch_size == 10
    assert result.part_size is not None
    assert result.part_size % 2 == 0


def test_a_model_that_fails_on_parts_is_compared_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(self_check, "_SMALL_OPERATION", 1)
    monkeypatch.setattr(self_check, "_PARAMETERS_PER_OPERATION", 10**6)
    monkeypatch.setattr(self_check, "_FURTHER_SECONDS", 60.0)
    model, seen = _model(), []
    prepared = prepare(model, (torch.randn(6, 4),))

    def refuse(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(len(args[0]))
        if len(args[0]) != 6:
            raise RuntimeError("six samples are needed")

    model.register_forward_pre_hook(refuse)
    with caplog.at_level(logging.INFO, logger="ravnest"):
        result = verify(prepared.capture, [prepared.cut([1]).stages], operation_bytes=100)
    assert result.bitwise
    assert result.part_size == 6
    assert seen[:7] == [2, 6, 6, 6, 6, 2, 6], "a small batch fails, then one part"
    assert seen[7:] == [6, 3, 2], "the other mode of the whole, and sizes that the model refuses"
    assert "six samples are needed" in caplog.text


@pytest.mark.parametrize(("seconds", "sizes"), [(60.0, {6, 3, 1, 2}), (0.0, {6})])
def test_further_steps_have_other_sizes_if_there_is_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, sizes: set[int]
) -> None:
    monkeypatch.setattr(self_check, "_FURTHER_SECONDS", seconds)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    prepared = prepare(model, (torch.randn(6, 4),))
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _module, args: seen.append(len(args[0])))
    monkeypatch.setattr(self_check, "check_repeatable", lambda _capture, _example: None)
    assert verify(prepared.capture, [prepared.cut([1]).stages]).bitwise
    assert set(seen) == sizes


def test_state_after_the_steps_is_compared() -> None:
    """A stage whose statistics move at another rate gives equal outputs in training."""
    prepared = prepare(_model(), (torch.randn(6, 4),))
    stages = prepared.cut([2]).stages
    tensors = dict(stages[0].tensors)
    tensors["1.num_batches_tracked"] = tensors["1.num_batches_tracked"] + 1
    broken = SimpleNamespace(spec=stages[0].spec, tensors=tensors)
    with pytest.raises(ExactnessError, match="num_batches_tracked after the run is the first"):
        verify(prepared.capture, [[broken, stages[1]]])
