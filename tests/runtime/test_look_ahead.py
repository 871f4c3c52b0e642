"""Prediction of the weights at the time when the gradient returns."""

from __future__ import annotations

import pytest
import torch

from ravnest.runtime.stage.updates import LookAhead
from ravnest.runtime.stage.weight_versions import WeightVersions


def _predicted(history: list[tuple[int, float]], delay: int) -> float:
    """Return the prediction for the last (version, weight)."""
    look_ahead, into = LookAhead(), {"w": torch.zeros(1)}
    for version, weight in history:
        look_ahead.predict(version, delay, {"w": torch.tensor([weight])}, into)
    return into["w"].item()


def test_the_first_version_is_not_changed() -> None:
    assert _predicted([(0, 5.0)], delay=3) == 5.0


def test_no_prediction_without_delay() -> None:
    assert _predicted([(0, 5.0), (1, 4.0)], delay=0) == 4.0


def test_the_last_change_continues_and_decays() -> None:
    assert _predicted([(0, 5.0), (1, 4.0)], delay=2) == pytest.approx(4.0 - 0.9 - 0.81)


def test_a_change_is_divided_by_its_number_of_updates() -> None:
    assert _predicted([(0, 5.0), (2, 3.0)], delay=1) == pytest.approx(3.0 - 0.9)


def test_versions_hold_predicted_weights_and_do_not_change_the_real_ones() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    versions = WeightVersions({"w": weight}, stash=True, look_ahead=LookAhead())
    versions.at(0)
    with torch.no_grad():
        weight.add_(1.0)
    versions.delay = 1
    assert versions.at(1)["w"].item() == pytest.approx(2.9)
    assert versions.at(1)["w"].requires_grad
    assert weight.item() == 2.0
