"""Batches split into micro-batches: the updates are those of whole batches."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import LocalCluster, form
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_cases import MLP, SmallCNN, TiedGPT, image_loaders, token_loaders, token_loss

from ravnest import set_seed
from ravnest.errors import RunError, SettingsError
from ravnest.plan.schedule_choice import DELAY_COST
from ravnest.runtime.batch_parts import BatchSplit, part_sizes
from ravnest.runtime.control import microbatch_tuner
from ravnest.runtime.control.runtime_config import DELAY_WARNING
from ravnest.runtime.data import Criterion
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.leaf import Leaf
from ravnest.split import recurrent_deferral
from ravnest.telemetry import (
    LossRecord,
    QueueRecord,
    ScheduleRecord,
    WarningRecord,
    WorkerRecord,
)

BATCH = 12
SAMPLES = 3 * BATCH + 7
"""The last batch is smaller, and not a multiple of the number of micro-batches."""


def regression() -> tuple[DataLoader[Any], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, 3, generator=generator)
    )
    return DataLoader(data, BATCH), DataLoader(data, BATCH)


def classes() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Labels of which a varying number is ignored: the whole of some micro-batches."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 3, (SAMPLES,), generator=generator)
    labels[::5] = labels[12:16] = -100
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=generator), labels)
    return DataLoader(data, BATCH), DataLoader(data, BATCH)


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOSSES: dict[str, tuple[Any, Loss]] = {
    "mean": (regression, nn.functional.mse_loss),
    "sum": (regression, nn.MSELoss(reduction="sum")),
    "ignored": (classes, nn.functional.cross_entropy),
}


def train_whole(
    model: nn.Module, loader: Iterable[Any], loss_of: Loss, lr: float, epochs: int = 2
) -> dict[str, torch.Tensor]:
    """Train in one process, a whole batch at a time."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
    return model.state_dict()


class Records:
    """Sink of all nodes of a test."""

    def __init__(self) -> None:
        self.records: list[WorkerRecord] = []

    def emit(self, record: WorkerRecord) -> None:
        self.records.append(record)


def train_split(
    folder: Path, names: list[str], loaders: Any, loss: Any, lr: float, **settings: Any
) -> dict[str, torch.Tensor]:
    cluster = LocalCluster(folder, names)
    cluster.train(
        loaders,
        node={
            "optimizer": torch.optim.SGD,
            "optimizer_params": {"lr": lr, "momentum": 0.9},
            "criterion": loss,
            **settings,
        },
        epochs=2,
        save=True,
    )
    return cluster.fused()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("parts", [2, 5])
def test_micro_batches_give_the_updates_of_whole_batches(tmp_path: Path, loss: str, parts: int) -> None:
    set_seed(3)
    model = MLP()
    names = form(tmp_path, copy.deepcopy(model), (torch.rand(BATCH, 4),), 3)
    loaders, loss_of = LOSSES[loss]
    lr = 1e-3 if loss == "sum" else 1e-2
    found = train_split(tmp_path, names, loaders, loss_of, lr, schedule="sync", micro_batches=parts)
    expected = train_whole(model, loaders()[0], loss_of, lr)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_a_number_that_changes_during_the_run_does_not_change_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured times are random here, so that the choice is given."""
    numbers = iter((4, 2, 12))

    def choose(_times: object, batch: int, smallest: int) -> int:
        assert (batch, smallest) == (BATCH, 1)
        return next(numbers)

    monkeypatch.setattr(microbatch_tuner, "choose_microbatches", choose)
    monkeypatch.setattr(microbatch_tuner, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(microbatch_tuner, "LEAST_BATCHES", 1)
    monkeypatch.setattr(microbatch_tuner, "FASTER", float("inf"))
    monkeypatch.setattr(microbatch_tuner, "WORTHWHILE", float("inf"))
    data = TensorDataset(torch.randn(20 * BATCH + 5, 4), torch.randn(20 * BATCH + 5, 3))

    def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
        return DataLoader(data, BATCH), DataLoader(data, BATCH)

    set_seed(3)
    model = MLP()
    names = form(tmp_path, copy.deepcopy(model), (torch.rand(BATCH, 4),), 3)
    sink = Records()
    found = train_split(tmp_path, names, loaders, nn.functional.mse_loss, 1e-2, record_sink=sink)
    printed = capsys.readouterr().out
    for number in (4, 2, 12):
        assert f"Root: {number} micro-batches per batch from now on" in printed
    told = [each for each in sink.records if isinstance(each, ScheduleRecord)]
    assert [each.microbatches for each in told[1:]] == [4, 2, 12]
    assert {each.schedule for each in told} == {"sync"}
    assert told[-1].reason == "faster than 2, by the measured times of stages and links"
    expected = train_whole(model, loaders()[0], nn.functional.mse_loss, 1e-2)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


class Recurrent(nn.Module):
    """GRU layers between linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.layers = nn.Linear(4, 24), nn.GRU(8, 8, 3, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.layers(self.steps(x).view(-1, 3, 8))
        return self.head(y[:, -1])


@pytest.mark.parametrize(
    ("make", "recompute"), [(MLP, False), (MLP, True), (Recurrent, False), (Recurrent, True)]
)
def test_the_sums_are_those_of_accumulated_gradients_to_the_last_bit(
    tmp_path: Path, make: Callable[[], nn.Module], recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent_deferral, "LEAST_PRODUCT", 0)
    set_seed(3)
    model = make()
    names = form(tmp_path, copy.deepcopy(model), (torch.rand(BATCH, 4),), 3)
    found = train_split(
        tmp_path,
        names,
        regression,
        nn.functional.mse_loss,
        1e-2,
        schedule="sync",
        micro_batches=4,
        recompute=recompute,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for _ in range(2):
        for inputs, targets in regression()[0]:
            optimizer.zero_grad()
            sizes = part_sizes(len(inputs), 4)
            for x, y in zip(inputs.split(sizes), targets.split(sizes), strict=True):
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward(torch.full_like(loss, len(x) / len(inputs)))
            optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name


class TiedLayers(nn.Module):
    """Layers of which the last two have the same weight, owned by a stage that is not the Root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.third = nn.Linear(4, 4, bias=False)
        self.third.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_a_stage_is_saved_after_an_update_that_waits_for_gradients_of_a_tied_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_shared = StageExecution.take_shared
    waited: list[int] = []

    def slow(self: StageExecution) -> dict[str, torch.Tensor]:
        waited.append(self.index)
        time.sleep(0.3)
        return take_shared(self)

    monkeypatch.setattr(StageExecution, "take_shared", slow)
    set_seed(3)
    model = TiedLayers()
    names = form(tmp_path, copy.deepcopy(model), (torch.rand(BATCH, 4),), 4)
    data = TensorDataset(torch.randn(2 * BATCH, 4), torch.randn(2 * BATCH, 4))

    def loaders() -> tuple[DataLoader[Any], None]:
        return DataLoader(data, BATCH), None  # a validation would wait for the update

    found = train_split(tmp_path, names, loaders, nn.functional.mse_loss, 1e-1, schedule="sync")
    assert waited
    expected = train_whole(model, loaders()[0], nn.functional.mse_loss, 1e-1)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_tied_weights_and_a_clip_over_the_model(tmp_path: Path) -> None:
    set_seed(5)
    model = TiedGPT()
    names = form(tmp_path, copy.deepcopy(model), (torch.randint(0, 16, (4, 8)),), 3)
    cluster = LocalCluster(tmp_path, names)
    cluster.train(
        token_loaders,
        node={
            "schedule": "sync",
            "micro_batches": 2,
            "clip_grad_norm": 0.05,
            "optimizer": torch.optim.SGD,
            "optimizer_params": {"lr": 0.1},
            "criterion": token_loss,
        },
        epochs=1,
        save=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in token_loaders()[0]:
        optimizer.zero_grad()
        token_loss(model(batch[0]), batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    found = cluster.fused()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_batch_norm_keeps_batches_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    set_seed(3)
    names = form(tmp_path, SmallCNN(), (torch.rand(8, 1, 8, 8),), 2)
    sink = Records()
    train_split(tmp_path, names, image_loaders, nn.functional.cross_entropy, 1e-2, record_sink=sink)
    said = capsys.readouterr().out
    assert "schedule async" in said
    assert "norm1" in said
    assert _delay_warnings(caplog) == [DELAY_WARNING], "the cost is told once"
    assert WarningRecord(DELAY_WARNING) in sink.records, "the requester sees it"


def test_the_cost_of_a_delay_is_that_of_the_plan() -> None:
    cost = f"up to about {DELAY_COST:g} times the samples"
    assert cost in DELAY_WARNING
    assert cost in (Path(__file__).parents[2] / "docs" / "tutorials.md").read_text()


def _delay_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    return [each.getMessage() for each in warnings if "one update late" in each.getMessage()]


def _coupled(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output - batch[-1]).square().mean(1).max()


@pytest.mark.parametrize(
    ("fits", "settings", "schedule"),
    [
        (True, {}, "async"),
        (False, {}, "sync"),
        (True, {"schedule": "sync"}, "sync"),
        (True, {"in_flight": 1}, "sync"),
    ],
)
def test_a_loss_that_forbids_splitting_makes_gradients_late_if_memory_allows(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    fits: bool,
    settings: dict[str, Any],
    schedule: str,
) -> None:
    names = form(tmp_path, MLP(), (torch.rand(BATCH, 4),), 2)
    for name in names:
        spec = tmp_path / "node_data" / "nodes" / f"{name}.json"
        content = json.loads(spec.read_text())
        assert content["delay_fits"], "a small model fits twice"
        assert (content["microbatches"], content["in_flight"]) == (1, 1), "a plan for one at a time"
        spec.write_text(json.dumps(content | {"delay_fits": fits}))
    sink = Records()
    options = {"progress": True, "record_sink": sink, **settings}
    train_split(tmp_path, names, regression, _coupled, 1e-2, **options)
    said = capsys.readouterr().out
    stale = {each.staleness for each in sink.records if isinstance(each, LossRecord)}
    assert stale <= {0, 1}
    assert (1 in stale) == (schedule == "async"), "batches overlap"
    windows = {each.window for each in sink.records if isinstance(each, QueueRecord)}
    assert (2 in windows) == (schedule == "async")
    assert f"schedule {schedule}; batches are not split: " in said
    assert bool(_delay_warnings(caplog)) == (schedule == "async")


def test_a_loss_that_couples_samples_is_refused(tmp_path: Path) -> None:
    names = form(tmp_path, MLP(), (torch.rand(BATCH, 4),), 2)
    with pytest.raises((SettingsError, RunError), match="micro_batches=3 is not possible"):
        train_split(tmp_path, names, regression, _coupled, 1e-2, micro_batches=3)


@pytest.mark.parametrize(
    ("split", "batch", "parts"),
    [
        (BatchSplit(), 64, 1),
        (BatchSplit(rows=8), 64, 8),
        (BatchSplit(rows=8), 61, 8),
        (BatchSplit(rows=8), 7, 1),
        (BatchSplit(rows=1, smallest=2), 5, 2),
        (BatchSplit(count=4), 64, 4),
        (BatchSplit(count=4), 3, 3),
        (BatchSplit(count=4, smallest=2), 1, 1),
    ],
)
def test_the_number_of_parts(split: BatchSplit, batch: int, parts: int) -> None:
    assert split.parts(batch) == parts
    sizes = part_sizes(batch, parts)
    assert sum(sizes) == batch
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({}, 1),
        ({"micro_batches": 4}, 4),
        ({"schedule": "async"}, 2),
        ({"schedule": "async", "micro_batches": 4}, 4),
        ({"micro_batches": 4, "in_flight": 3}, 3),
    ],
    ids=str,
)
def test_the_window_follows_the_users_micro_batches(
    tmp_path: Path, settings: dict[str, Any], window: int
) -> None:
    names = form(tmp_path, MLP(), (torch.rand(BATCH, 4),), 2)
    node = LocalCluster(tmp_path, names, settings).node(names[0])
    assert node._config.spec.microbatches == 1
    assert node._config.window == window


@pytest.mark.parametrize("samples", [2, 6, BATCH])
def test_labels_may_be_a_list_of_batches_of_any_size(samples: int) -> None:
    labels = [(torch.rand(samples, 4), torch.rand(samples, 3))]
    leaf = Leaf(Criterion(nn.functional.mse_loss), labels, None)
    assert leaf.find_weighting(lambda rows, _length: torch.rand(rows, 3), 6).allowed
