"""Plans count the memory of deferred weight gradients of LSTM layers that are large enough to defer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ravnest.plan.profiler import profile_model
from ravnest.split import prepare
from ravnest.split.lstm_deferral import LEAST_WIDTH


@pytest.mark.parametrize(
    ("layer", "copies"),
    [
        (nn.LSTM(8, LEAST_WIDTH, batch_first=True), 5),
        (nn.LSTM(8, LEAST_WIDTH - 1, batch_first=True), 0),
        (nn.LSTM(8, LEAST_WIDTH, batch_first=True, bidirectional=True), 0),
        (nn.LSTM(8, LEAST_WIDTH, batch_first=True, proj_size=16), 0),
    ],
    ids=["large", "narrow", "two directions", "projected"],
)
def test_gates_and_hidden_states_are_kept(layer: nn.LSTM, copies: int) -> None:
    samples, steps = 2, 3
    profile = profile_model(prepare(layer, torch.randn(samples, steps, 8)))
    deferred = sum(unit.deferred_bytes for unit in profile.units)
    if not copies:
        assert deferred == 0
        return
    output = 4 * samples * steps * layer.hidden_size
    states = 2 * 4 * samples * layer.hidden_size
    assert copies * output <= deferred <= copies * (output + states) + 4 * samples * steps * 8
