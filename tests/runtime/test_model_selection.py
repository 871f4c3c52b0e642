"""Early stopping and the best model by a metric: the rules, and runs that equal one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import Formed, LocalCluster
from many_clusters import form_clusters, raise_errors
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_cases import points, small_model

from ravnest import Trainer, model_fusion
from ravnest.errors import SettingsError
from ravnest.runtime.model_selection import (
    EarlyStopping,
    SelectionRule,
    early_stopping_rule,
    keep_best_rule,
)
from ravnest.runtime.stage.validation_metrics import choose_metrics, with_needed
from ravnest.store.best_model import BestModel, BestModelFolder
from ravnest.telemetry import BestRecord, WarningRecord

EPOCHS = 12


@pytest.mark.parametrize(
    ("values", "stops"),
    [
        ([3.0, 2.0, 1.0], False),
        ([1.0, 2.0], False),
        ([1.0, 2.0, 1.5], True),
        ([1.0, 0.95, 0.91], True),  # not better by more than 0.1
        ([1.0, 2.0, 0.5, 0.6], False),
        ([math.nan, math.nan], True),
        ([math.nan, 1.0, math.nan], False),
    ],
)
def test_training_stops_after_validations_without_a_better_value(
    values: list[float], *, stops: bool
) -> None:
    stopping = EarlyStopping(SelectionRule("loss", "min", 0.1), patience=2)
    assert bool(stopping.reason(values)) is stops


def test_the_reason_has_the_best_value() -> None:
    stopping = EarlyStopping(SelectionRule("accuracy", "max"), patience=1)
    reason = stopping.reason([0.5, 0.75, 0.75])
    assert reason == ("accuracy was not better than 0.75 (validation 2) in 1 validations in a row")


def test_the_direction_follows_from_the_metric() -> None:
    metrics = with_needed(choose_metrics(["f1", max]), ["loss", "f1", "max"])
    assert [metric.label for metric in metrics] == ["f1", "max", "loss"]
    stopping = early_stopping_rule({"metric": "loss", "patience": 5}, metrics)
    assert stopping == EarlyStopping(SelectionRule("loss", "min", 0.0), 5)
    assert keep_best_rule("f1", metrics) == SelectionRule("f1", "max")
    assert keep_best_rule({"metric": "max", "mode": "min"}, metrics) == SelectionRule("max", "min")
    assert keep_best_rule(None, metrics) is None
    assert early_stopping_rule(None, metrics) is None


@pytest.mark.parametrize(
    ("early_stopping", "keep_best", "message"),
    [
        ("loss", None, "early_stopping must be a mapping such as"),
        ({"metric": "loss", "wait": 3}, None, "early_stopping has no 'wait', only metric, patience"),
        ({"metric": "loss", "patience": 0}, None, "patience of early_stopping must be a whole number"),
        ({"metric": "loss", "min_delta": -1}, None, "min_delta of early_stopping must be a number"),
        ({"metric": "acc"}, None, "names the metric 'acc', which is not one of max, loss, accuracy, "),
        ({"patience": 3}, None, "early_stopping needs the name of a metric"),
        (None, 3, "keep_best must be the name of a metric"),
        (None, "max", "say with a mode whether small or large values are better"),
        (None, {"metric": "loss", "mode": "up"}, "mode of keep_best must be 'min' or 'max', not 'up'"),
    ],
)
def test_wrong_rules_are_refused(early_stopping: Any, keep_best: Any, message: str) -> None:
    metrics = with_needed(choose_metrics([max]), ["loss"])
    check, given = (
        (keep_best_rule, keep_best) if early_stopping is None else (early_stopping_rule, early_stopping)
    )
    with pytest.raises(SettingsError, match=message):
        check(given, metrics)


def test_a_damaged_description_is_none(tmp_path: Path) -> None:
    folder = BestModelFolder(tmp_path, 0)
    assert folder.read() is None
    (folder.incoming / "cluster_0").mkdir(parents=True)
    folder.replace(BestModel("run", 3, "loss", 0.5))
    assert folder.read() == BestModel("run", 3, "loss", 0.5)
    assert folder.stages.is_dir()
    (tmp_path / "best" / "cluster_0.json").write_text("{")
    assert folder.read() is None


# Runs


def validation(seed: int = 5) -> DataLoader:
    """Return points with random classes: the loss on them grows at some time."""
    made = torch.Generator().manual_seed(seed)
    inputs = torch.randn(23, 4, generator=made)
    noise = torch.randint(0, 3, (23,), generator=made)
    true = inputs[:, :3].argmax(1)
    return DataLoader(TensorDataset(inputs, torch.where(torch.arange(23) < 12, true, noise)), 5)


def alone() -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Train in one process; return the validation loss and the weights after each epoch."""
    model = small_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses, states = [], []
    for _ in range(EPOCHS):
        for inputs, labels in points():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        with torch.no_grad():
            each = [(nn.functional.cross_entropy(model(x), y).item(), len(y)) for x, y in validation()]
        losses.append(sum(loss * size for loss, size in each) / 23)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return losses, states


class _Sink:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def emit(self, record: Any) -> None:
        self.records.append(record)


OPTIONS = {"schedule": "sync", "micro_batches": 1, "optimizer_params": {"lr": 1.0}}


def train(local: LocalCluster, *, epochs: int = EPOCHS, node: Any = None, **options: Any) -> list[Any]:
    """Train on all nodes and return the records of the Root."""
    sink = _Sink()

    def script(name: str) -> None:
        loaders = {"labels": points(), "test_labels": validation()}
        with local.node(name, record_sink=sink, **loaders, **(node or {})) as own:
            Trainer(
                own,
                train_loader=points(),
                val_loader=validation(),
                epochs=epochs,
                keep_best="loss",
                **options,
            ).train()

    local.results(script)
    return sink.records


def best_of(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(
        model_fusion(0, folder=folder / "trained" / "best"), weights_only=True
    )
    return state


def expected() -> tuple[int, int, dict[str, torch.Tensor]]:
    """Return the epoch after which training stops, the best epoch, and its weights."""
    losses, states = alone()
    stopping = EarlyStopping(SelectionRule("loss", "min"), patience=2)
    stop = next(n for n in range(1, EPOCHS) if stopping.reason(losses[:n]))
    best = min(range(stop), key=losses.__getitem__)
    assert 0 < best < stop < EPOCHS, "the case shows something"
    return stop, best, states[best]


def test_a_run_stops_and_keeps_the_weights_of_one_process(cluster: Formed, tmp_path: Path) -> None:
    stop, best, state = expected()
    local = cluster(nodes=3, **OPTIONS)
    records = train(local, early_stopping={"metric": "loss", "patience": 2})
    assert len(Path("losses.txt").read_text().split()) == 5 * stop
    found = best_of(tmp_path)
    assert all(torch.equal(found[name], state[name]) for name in state)
    kept = [record for record in records if isinstance(record, BestRecord)]
    assert (kept[-1].epoch, kept[-1].metric) == (best + 1, "loss")
    said = [record.message for record in records if isinstance(record, WarningRecord)]
    assert f"training stops after epoch {stop} of {EPOCHS}: loss was not better than" in said[-1]


def test_a_resumed_run_stops_at_the_same_epoch(cluster: Formed, tmp_path: Path) -> None:
    stop, best, state = expected()
    local = cluster(**OPTIONS)
    rule = {"metric": "loss", "patience": 2}
    train(local, epochs=best + 1, early_stopping=rule)
    train(local, early_stopping=rule, node={"resume": True})
    assert len(Path("losses.txt").read_text().split()) == 5 * stop
    found = best_of(tmp_path)
    assert all(torch.equal(found[name], state[name]) for name in state)


class _NanAfter:
    """Cross entropy that is NaN from some call of training on."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def __call__(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        self._left -= output.requires_grad
        return nn.functional.cross_entropy(output, batch[-1]) * (1.0 if self._left >= 0 else math.nan)


def test_a_diverged_run_has_its_best_model(cluster: Formed, tmp_path: Path) -> None:
    losses, states = alone()
    local = cluster(nodes=1, **OPTIONS)
    with pytest.raises(Exception, match="is nan: training stops"):
        train(local, node={"criterion": _NanAfter(5 * 3 + 2)})
    best = min(range(3), key=losses.__getitem__)
    found = best_of(tmp_path)
    assert all(torch.equal(found[name], states[best][name]) for name in found)
    assert not (tmp_path / "trained" / "cluster_0").exists()


def test_clusters_stop_by_their_own_validations_and_end_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    clusters = form_clusters(
        tmp_path, small_model("mlp"), (torch.rand(5, 4),), (1, 1), optimizer_params={"lr": 1.0}
    )
    ended: dict[str, int] = {}

    def stop(name: str, trainer: Trainer) -> None:
        ended[name] = trainer.node.epoch

    outcomes = clusters.train(
        lambda name: (points(seed=3 + clusters.of(name)), validation(5 + 2 * clusters.of(name))),
        then=stop,
        epochs=EPOCHS,
        save=True,
        early_stopping={"metric": "loss", "patience": 1},
        keep_best="loss",
    )
    raise_errors(outcomes)
    assert all(1 < epoch <= EPOCHS for epoch in ended.values())
    first, second = clusters.fused(0), clusters.fused(1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {path.name for path in (tmp_path / "trained" / "best").glob("cluster_*.json")} == {
        "cluster_0.json",
        "cluster_1.json",
    }
