"""The planned memory of a stage is enough for what training it takes, and not much more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import load_benchmark
from torch import nn

from ravnest.plan.profiler import profile_model, unit_names
from ravnest.split import Chain, prepare, recurrent_deferral

memory = load_benchmark("memory")


class Subject:
    """A model with an example, as the benchmark takes it."""

    def __init__(self, model: nn.Module, *args: torch.Tensor) -> None:
        self._model = model
        self._args = args

    def build(self) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]:
        return self._model, self._args, {}


def layers(*inner: nn.Module) -> nn.Module:
    return nn.Sequential(*inner, nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())


class Recurrent(nn.Module):
    """Three GRU layers, whose weight gradients are deferred."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(64, 64, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.layers(x)
        return y


SUBJECTS = {
    "large activations": Subject(layers(nn.Linear(256, 256), nn.GELU()), torch.randn(2048, 256)),
    "large weights": Subject(layers(nn.Linear(64, 2048), nn.Linear(2048, 256)), torch.randn(16, 64)),
    "batch norm": Subject(layers(nn.Linear(256, 256), nn.BatchNorm1d(256)), torch.randn(1024, 256)),
    "recurrent": Subject(Recurrent(), torch.randn(64, 32, 64)),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_plan_is_enough_and_not_much_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(place: Path, load: Any, what: str) -> int:
        return int(memory.tensor_peak(place, load)) if what == "tensors" else 0

    monkeypatch.setattr(memory, "_worker", peak)
    monkeypatch.setattr(recurrent_deferral, "LEAST_PRODUCT", 0)
    compared = memory.compare(SUBJECTS[name], 3)
    assert len(compared) == (5 if name == "batch norm" else 9)
    for found in compared:
        ratio = found.planned.total / found.measured.tensors
        # The plan counts inputs that wait at the Leaf; the benchmark has none of them.
        waiting = found.stage == found.stages - 1 and "kept" in str(found.load)
        limit = 2.3 if waiting else 1.3
        assert 0.99 <= ratio <= limit, f"stage {found.stage} with {found.load}: {ratio:.2f}"


def test_an_input_that_the_stage_writes_to_counts_besides_its_copy() -> None:
    """The stage behind a cut must not write to a tensor that it has received."""
    inner = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 64)]
    prepared = prepare(nn.Sequential(*inner), (torch.randn(32, 64),))
    units = profile_model(prepared).units
    names = unit_names(prepared)
    size = 32 * 64 * 4
    before, behind = names.index("2") - 1, names.index("2")
    assert units[before].crossing_bytes == units[before].held_bytes == size
    assert units[before].sent_bytes == size, "batch norm does not keep its result"
    assert units[behind].held_bytes == size, "the linear layer keeps its input"
    stage = Chain.of(prepared.cut([prepared.cuts[before]])).modules[1]
    received = torch.randn(32, 64, requires_grad=True)
    value = received.detach().clone()
    stage(received)
    assert torch.equal(received, value)
