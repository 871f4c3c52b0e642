"""Layer dropping with a fixed outcome can be captured; a random outcome cannot."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from zoo_models.exactness import Unsplit, compare, record_training

from ravnest.errors import CaptureError
from ravnest.split import Chain, split
from ravnest.split.static_conditions import StaticConditions


class LayerDrop(nn.Module):
    def __init__(self, chance: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.dropout = nn.Dropout(0.5)
        self.chance = chance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.chance:
                continue
            x = self.dropout(layer(x))
        return x


@pytest.mark.parametrize("chance", [0.0, -1])
def test_a_fixed_outcome_is_captured_with_its_random_draws(chance: float) -> None:
    torch.manual_seed(0)
    model, args = LayerDrop(chance), (torch.randn(4, 4),)
    expected = record_training(Unsplit(copy.deepcopy(model)), args, {})
    assert compare(expected, record_training(Chain.of(split(model, args)), args, {})) is None


def test_a_random_outcome_is_rejected_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"torch\.rand\(\[\]\) < self\.chance"):
        split(LayerDrop(0.1), (torch.randn(4, 4),))


@pytest.mark.parametrize(
    ("compare_with", "outcome"),
    [
        (lambda r: r < 0.0, False),
        (lambda r: r < 1.0, True),
        (lambda r: r <= 1, True),
        (lambda r: r <= -0.1, False),
        (lambda r: r >= 0, True),
        (lambda r: r > 1, False),
        (lambda r: r > -1, True),
        (lambda r: torch.ge(r, 1.0), False),
    ],
)
def test_known_outcomes(compare_with, outcome: bool) -> None:
    with StaticConditions():
        condition = compare_with(torch.rand([]))
        condition.fill_(not outcome)  # the known outcome counts, not the value of the tensor
        assert bool(condition) is outcome


@pytest.mark.parametrize(
    "compare_with", [lambda r: r < 0.5, lambda r: r <= 0, lambda r: r > 0, lambda r: r + 2 < 1]
)
def test_random_outcomes_are_not_changed(compare_with) -> None:
    with StaticConditions():
        for value in (True, False):
            condition = compare_with(torch.rand([]))
            condition.fill_(value)
            assert bool(condition) is value
