"""The last linear layer of a training graph, and positions that are cut into chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ravnest.split import prepare
from ravnest.split.graph import StageGraph
from ravnest.split.loss_head import (
    LossHead,
    cut_positions,
    few_positions,
    made_up_logits,
    match_loss_head,
)


class Model(nn.Module):
    """A layer and a head; ``end`` makes the output of the logits and of the layer's result."""

    def __init__(self, end: Callable[..., Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9)
        self._end = end

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        return self._end(self.head(hidden), hidden)


def graph_of(end: Callable[..., Any]) -> StageGraph:
    (stage,) = prepare(Model(end), (torch.rand(3, 5, 4),)).cut(()).stages
    return stage.spec.graphs["train"]


@pytest.mark.parametrize(
    ("end", "behind"),
    [
        (lambda z, _: z, 0),
        (lambda z, _: {"logits": z.float() / 2}, 1),
        (lambda z, _: z.reshape(-1, 9), 1),
        (lambda z, _: torch.log_softmax(z.transpose(1, 2), 1), 2),
    ],
)
def test_a_head_is_found(end: Callable[..., Any], behind: int) -> None:
    graph = graph_of(end)
    head = match_loss_head(graph)
    assert isinstance(head, LossHead)
    assert (head.weight, head.bias) == ("head.weight", "head.bias")
    assert len(head.tail.operations) >= behind
    assert len(head.trunk.operations) + 1 + len(head.tail.operations) == len(graph.operations)
    assert {use.key for use in head.trunk.state} == {"first.weight", "first.bias"}


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda z, h: (z, h), "2 outputs"),
        (lambda z, _: torch.relu(z), "not the result of a linear layer"),
        (lambda z, _: z.flatten(0, 1) + z.flatten(0, 1).mean(0), "not the result of a linear layer"),
        (lambda _, h: torch.relu(h), "not the result of a linear layer"),
    ],
)
def test_other_graphs_have_no_head(end: Callable[..., Any], reason: str) -> None:
    found = match_loss_head(graph_of(end))
    assert isinstance(found, str)
    assert reason in found


def test_tensors_with_positions_are_cut() -> None:
    labels, weights = torch.arange(10).reshape(2, 5), torch.rand(7)
    parts = cut_positions([labels, weights], 5, (2, 2, 1))
    assert parts is not None
    assert torch.equal(torch.cat([part[0] for part in parts], 1), labels)
    assert all(part[1] is weights for part in parts)
    assert cut_positions(weights, 5, (2, 3)) is None


def test_checks_take_positions_with_rare_labels() -> None:
    labels = torch.full((2, 30), -100)
    labels[:, 20:24] = torch.arange(8).reshape(2, 4)
    few = few_positions({"labels": labels}, 30)["labels"]
    assert few.shape == made_up_logits((2, 30, 9), 2, torch.float32).shape[:2]
    assert (few >= 0).sum() == 8
