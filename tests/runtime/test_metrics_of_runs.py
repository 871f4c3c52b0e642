"""Named metrics in a run: computed at the Leaf, reported by name on all nodes, stored in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import Formed
from sklearn.metrics import f1_score
from torch import nn
from training_cases import points, small_model

from ravnest import Trainer
from ravnest.errors import SettingsError
from ravnest.telemetry import ValidationRecord


class _Sink:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def emit(self, record: Any) -> None:
        self.records.append(record)


def margin(output: torch.Tensor, labels: Any) -> torch.Tensor:
    """Return the distance between the two highest scores of each sample."""
    best = output.topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


def test_metrics_have_the_values_of_one_process(
    cluster: Formed, capsys: pytest.CaptureFixture[str]
) -> None:
    local = cluster(nodes=3, schedule="sync", micro_batches=1)
    metrics = ["f1", {"name": "accuracy", "top_k": 2}, "loss", margin]
    sinks = {name: _Sink() for name in local.names}

    def script(name: str) -> float | None:
        loaders = {"labels": points(), "test_labels": points(17)}
        with local.node(name, metrics=metrics, record_sink=sinks[name], **loaders) as own:
            trainer = Trainer(own, train_loader=points(), val_loader=points(17), save=True)
            trainer.train()
            return trainer.evaluate()

    values = local.results(script)
    model = small_model("mlp")
    model.load_state_dict(local.fused())
    with torch.no_grad():
        batches = [(model(inputs), labels) for inputs, labels in points(17)]
    outputs = torch.cat([output for output, _ in batches])
    labels = torch.cat([labels for _, labels in batches])
    expected = {
        "f1": float(f1_score(labels, outputs.argmax(1), average="macro")),
        "top_2_accuracy": float((outputs.topk(2).indices == labels[:, None]).any(1).float().mean()),
        "loss": float(nn.functional.cross_entropy(outputs, labels)),
        "margin": float(margin(outputs, labels).mean()),
    }
    assert values == [pytest.approx(expected["f1"])] * 3, "evaluate returns the first metric everywhere"
    (last,) = [r for r in sinks[local.names[0]].records if isinstance(r, ValidationRecord)][-1:]
    assert (last.name, last.metrics) == ("f1", pytest.approx(expected))
    shown = capsys.readouterr().out
    assert f"epoch 1, validation f1 {expected['f1']:.4f}, top_2_accuracy " in shown


def test_metrics_are_part_of_checkpoints(cluster: Formed, tmp_path: Path) -> None:
    local = cluster(schedule="sync", metrics=["accuracy", "loss"], checkpoint_updates=2)

    def script(name: str, **more: Any) -> list[dict[str, float]]:
        loaders = {"labels": points(), "test_labels": points(17)}
        with local.node(name, **loaders, **more) as own:
            Trainer(own, train_loader=points(), val_loader=points(17), epochs=3).train()
            found = own._ensure_started().status.validations
            return [found[phase].metrics for phase in sorted(found)]

    first = local.results(script)
    assert len(first[0]) == 3
    assert all(set(each) == {"accuracy", "loss"} for each in first[0])
    again = local.results(lambda name: script(name, resume=True))
    assert again[0] == first[0]


def test_the_loss_needs_a_criterion(cluster: Formed) -> None:
    local = cluster(metrics=["loss"], criterion=None, connect_timeout=2.0)

    def script(name: str) -> None:
        with local.node(name, test_labels=points(17)) as own:
            Trainer(own, val_loader=points(17)).evaluate()

    errors = local.errors(script)
    assert any(isinstance(error, SettingsError) for error in errors)


def test_wrong_metrics_are_refused_when_the_node_is_made(cluster: Formed) -> None:
    local = cluster()
    with pytest.raises(SettingsError, match="no metric is called 'acc'"):
        local.node(local.names[0], metrics=["acc"])
