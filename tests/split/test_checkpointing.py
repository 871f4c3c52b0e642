"""Stages ignore checkpointing inside a model; a warning says where that makes a difference."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ravnest.split import Chain, split


class Checkpointed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), norm, nn.ReLU())
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(self.block, x, use_reentrant=False))


def test_gradients_equal_those_of_the_model() -> None:
    model, x = Checkpointed(nn.LayerNorm(4)), torch.randn(3, 4)
    chain = Chain.of(split(model, x))
    chain.backward(chain(x).square().sum())
    model(x).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in chain.named_parameters()}
    assert all(torch.equal(gradients[name], p.grad) for name, p in model.named_parameters())


def test_batch_norm_is_updated_once_and_the_warning_names_the_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = Checkpointed(nn.BatchNorm1d(4)), torch.randn(3, 4)
    with caplog.at_level(logging.WARNING, logger="ravnest"):
        chain = Chain.of(split(model, x))
    assert "return self.out(checkpoint(self.block, x, use_reentrant=False))" in caplog.text
    assert len(caplog.records) == 1, "evaluation does not update, so it needs no warning"
    chain.backward(chain(x).square().sum())
    assert chain.state_dict()["block.1.num_batches_tracked"] == 1
    model(x).square().sum().backward()
    assert model.state_dict()["block.1.num_batches_tracked"] == 2, "torch has changed its behaviour"


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False)])
def test_no_warning_without_statistics(norm: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ravnest"):
        split(Checkpointed(norm), torch.randn(3, 4))
    assert not caplog.records
