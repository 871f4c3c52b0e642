"""Custom losses as graphs, which providers run without the requester's code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ravnest.errors import JobError, OperatorError, RavnestError, StageFormatError
from ravnest.jobs.graph_loss import load_loss, pack_loss
from ravnest.runtime.data import Criterion
from ravnest.split.structure import Record

WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


class Focal(nn.Module):
    def __init__(self, power: float) -> None:
        super().__init__()
        self.power = power
        self.register_buffer("weights", WEIGHTS)

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        likely = functional.softmax(output, 1).gather(1, labels[:, None])[:, 0]
        each = functional.cross_entropy(output, labels, weight=self.weights, reduction="none")
        return ((1 - likely) ** self.power * each).sum() / labels.shape[0]


@dataclass
class Answer:
    logits: torch.Tensor
    rest: torch.Tensor


def _of_parts(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits, labels) + output.rest.abs().mean()


def _with_closure(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, labels, weight=WEIGHTS)


def _tensor(rows: int) -> torch.Tensor:
    return torch.randn(rows, 3)


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "module with buffers": (Focal(2.0), _tensor),
    "loss of torch with weights": (nn.CrossEntropyLoss(weight=WEIGHTS), _tensor),
    "prediction inside a dict": (
        nn.CrossEntropyLoss(weight=WEIGHTS),
        lambda rows: {"rest": torch.ones(rows), "logits": torch.randn(rows, 3)},
    ),
    "function": (_with_closure, _tensor),
    "lambda": (lambda output, labels: (output.sum(1) - labels).square().mean(), _tensor),
    "parts": (_of_parts, lambda rows: Answer(torch.randn(rows, 3), torch.randn(rows, 2))),
    "labels are not used": (lambda output, labels: output.square().mean(), _tensor),
}


@pytest.mark.parametrize("name", list(CASES))
def test_the_graph_computes_the_same_loss_for_any_batch_size(tmp_path: Path, name: str) -> None:
    criterion, make = CASES[name]
    torch.manual_seed(0)
    packed = pack_loss(criterion, make(6), torch.randint(0, 3, (6,)), tmp_path)
    loaded = load_loss(packed.stage, packed.weights)
    for rows in (6, 1, 9):
        output, labels = make(rows), torch.randint(0, 3, (rows,))
        results = []
        for function in (criterion, loaded):
            sent: Any = output
            if isinstance(output, Answer):
                sent = Record(logits=output.logits.clone(), rest=output.rest)
            logits = sent if isinstance(sent, torch.Tensor) else sent["logits"]
            logits.requires_grad_().grad = None
            item = labels if function is criterion else {"labels": labels}
            loss = Criterion(function)(sent, item)
            loss.backward()
            results.append((loss.detach(), logits.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "no gradient": (
        lambda output, labels: (output.argmax(1) == labels).float().mean(),
        "differentiable operations",
    ),
    "many numbers": (lambda output, labels: output * 2, "one number"),
    "no tensor": (lambda output, labels: 1.0, "one number"),
    "fails": (lambda output, labels: output.nothing, "fails on the model's output"),
    "decides": (
        lambda output, labels: output.mean() if output.sum() > 0 else -output.mean(),
        "cannot be captured as a graph",
    ),
    "fixed batch": (
        lambda output, labels: (output.reshape(18) * torch.ones(18)).sum(),
        "only batches of one size",
    ),
    "parameters": (nn.Bilinear(3, 3, 1), "trainable parameters"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_an_unsuitable_criterion_is_refused(tmp_path: Path, name: str) -> None:
    criterion, message = REFUSED[name]
    with pytest.raises(JobError, match=message):
        pack_loss(criterion, torch.randn(6, 3), torch.randint(0, 3, (6,)), tmp_path)


def test_a_criterion_with_hidden_state_is_refused(tmp_path: Path) -> None:
    calls: list[int] = []

    def counting(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return output.mean() * len(calls)

    with pytest.raises(JobError, match="computes another loss"):
        pack_loss(counting, torch.randn(6, 3), torch.randint(0, 3, (6,)), tmp_path)


def _operations(data: dict[str, Any]) -> list[dict[str, Any]]:
    operations: list[dict[str, Any]] = data["graphs"]["train"]["operations"]
    return operations


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda d: _operations(d)[0].update(target="aten::from_file.default"), OperatorError),
        (lambda d: d["signature"].pop(), StageFormatError),
        (lambda d: d.update(stages=2), StageFormatError),
        (lambda d: d.update(format="x"), StageFormatError),
        (lambda d: d["state"].clear(), StageFormatError),
    ],
)
def test_a_forged_loss_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], kind: type[RavnestError]
) -> None:
    packed = pack_loss(Focal(2.0), torch.randn(6, 3), torch.randint(0, 3, (6,)), tmp_path)
    data = json.loads(packed.stage.read_text())
    change(data)
    packed.stage.write_text(json.dumps(data))
    with pytest.raises(kind):
        load_loss(packed.stage, packed.weights)
