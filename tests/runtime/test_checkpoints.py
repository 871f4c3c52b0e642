"""Training that continues from a checkpoint ends as if it had never stopped."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import DEADLINE, LocalCluster, form
from torch import nn
from torch.utils.data import DataLoader
from training_cases import SmallCNN, TiedGPT, image_loaders, token_loaders, token_loss

from ravnest import Node, Trainer, set_seed
from ravnest.runtime.control import checkpoint_policy, root_controller
from ravnest.store.checkpoint import CheckpointFolder
from ravnest.types import CheckpointId

EPOCHS = 3


class StoppedError(Exception):
    """The script stops here."""


@dataclass
class StoppingLoader:
    """Loader that ends the script after a number of batches, counted over all epochs."""

    loader: DataLoader[Any]
    after: int
    pause: float = 0.0
    """Seconds before each batch."""
    batch_size: int = 0

    def __post_init__(self) -> None:
        self.batch_size = self.loader.batch_size or 0
        self.dataset = self.loader.dataset
        self.generator = self.loader.generator

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if self.after == 0:
                raise StoppedError
            self.after -= 1
            time.sleep(self.pause)
            yield batch


@dataclass
class CallingLoader:
    """Loader that calls a function before one of its batches."""

    loader: DataLoader[Any]
    before: int
    call: Callable[[], object]

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            if number == self.before:
                self.call()
            yield batch


def cnn() -> nn.Module:
    return SmallCNN(dropout=0.3)


CASES = {
    "cnn": (cnn, (torch.rand(8, 1, 8, 8),), image_loaders, nn.functional.cross_entropy),
    "tied-gpt": (TiedGPT, (torch.randint(0, 16, (4, 8)),), token_loaders, token_loss),
}


@pytest.fixture(scope="module")
def formed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[tuple[str, int], tuple[Path, list[str]]] = {}

    def get(case: str, nodes: int) -> tuple[Path, list[str]]:
        if (case, nodes) not in made:
            set_seed(7)
            folder = tmp_path_factory.mktemp(f"{case}-{nodes}")
            made[case, nodes] = folder, form(folder, CASES[case][0](), CASES[case][1], nodes)
        return made[case, nodes]

    return get


SCHEDULERS: dict[str, dict[str, Any]] = {
    "epochs": {
        "lr_scheduler": torch.optim.lr_scheduler.StepLR,
        "lr_scheduler_params": {"step_size": 1, "gamma": 0.5},
    },
    "updates": {
        "lr_scheduler": torch.optim.lr_scheduler.OneCycleLR,
        "lr_scheduler_params": {"max_lr": 1e-2, "total_steps": 100},
        "lr_step_on_epoch_change": False,
    },
}


def train(
    folder: Path,
    node_data: Path,
    names: list[str],
    case: str,
    *,
    stop: int | None = None,
    pause: float = 0.0,
    epochs: int = EPOCHS,
    **given: Any,
) -> list[BaseException | None]:
    """Train and return the errors of the nodes.

    ``stop``: the Root's script ends after a batch; ``pause``: it waits so many seconds before each.
    """
    _, _, loaders, criterion = CASES[case]
    cluster = LocalCluster(folder, names, node_data=node_data)
    options = {
        "schedule": "sync",
        "micro_batches": 2 if case == "tied-gpt" else 1,
        "optimizer": torch.optim.AdamW,
        "optimizer_params": {"lr": 1e-2},
        "criterion": criterion,
        "checkpoint_updates": 4,
        **given,
    }

    def script(name: str) -> None:
        train_loader, val_loader = loaders()
        labels = {"labels": train_loader, "test_labels": val_loader}
        with cluster.node(name, **(labels | options)) as own:
            data = (
                train_loader
                if stop is None or not own.is_root
                else StoppingLoader(train_loader, stop, pause)
            )
            Trainer(own, train_loader=data, val_loader=val_loader, epochs=epochs, save=True).train()

    return cluster.errors(script)


def assert_same_result(one: Path, other: Path) -> None:
    """Check that two trainings have made the same updates and the same model."""
    assert (one / "losses.txt").read_text() == (other / "losses.txt").read_text()
    states = [LocalCluster(folder, []).fused() for folder in (one, other)]
    assert list(states[0]) == list(states[1])
    assert [n for n in states[0] if not torch.equal(states[0][n], states[1][n])] == []
    validations = [folder / "val_accuracies.txt" for folder in (one, other)]
    if validations[0].exists():
        assert validations[0].read_text() == validations[1].read_text()


SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "early": (3, {}),  # before the first checkpoint
    "epochs": (14, SCHEDULERS["epochs"]),
    "updates": (14, SCHEDULERS["updates"]),
    "accumulated": (20, {"update_frequency": 3, **SCHEDULERS["updates"]}),  # between two epochs
    "clipped-sgd": (17, {"clip_grad_norm": 0.05, "optimizer": torch.optim.SGD}),
    "amsgrad": (25, {"optimizer_params": {"lr": 1e-2, "amsgrad": True}}),
}
"""Settings, and the batch after which the Root's script ends."""
SHORT = {
    ("early", "cnn", 3),
    ("epochs", "cnn", 3),
    ("epochs", "tied-gpt", 1),
    ("updates", "cnn", 1),
    ("accumulated", "tied-gpt", 3),
    ("clipped-sgd", "tied-gpt", 3),
    ("amsgrad", "cnn", 3),
}
"""Each setting, model and number of nodes; all combinations are in make test-full."""


@pytest.mark.parametrize(
    ("name", "case", "nodes"),
    [
        pytest.param(*each, marks=() if each in SHORT else pytest.mark.full)
        for each in itertools.product(SETTINGS, CASES, (1, 3))
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    formed: Any, tmp_path: Path, name: str, case: str, nodes: int
) -> None:
    stop, settings = SETTINGS[name]
    folder, names = formed(case, nodes)
    node_data = folder / "node_data"
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert not any(train(whole, node_data, names, case, **settings))
    errors = train(resumed, node_data, names, case, stop=stop, **settings)
    assert isinstance(errors[0], StoppedError)
    assert not any(train(resumed, node_data, names, case, resume=True, **settings))
    assert_same_result(whole, resumed)


@pytest.mark.parametrize("case", ["cnn", pytest.param("tied-gpt", marks=pytest.mark.full)])
def test_a_training_that_has_ended_continues_with_more_epochs(
    formed: Any, tmp_path: Path, case: str
) -> None:
    folder, names = formed(case, 3)
    node_data = folder / "node_data"
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    assert not any(train(whole, node_data, names, case))
    assert not any(train(longer, node_data, names, case, epochs=1))
    assert not any(train(longer, node_data, names, case, resume=True))
    assert_same_result(whole, longer)
    assert not any(train(longer, node_data, names, case, resume=True))
    assert_same_result(whole, longer)


def test_a_damaged_checkpoint_is_not_used(
    formed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, names = formed("cnn", 3)
    node_data = folder / "node_data"
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert not any(train(whole, node_data, names, "cnn"))
    assert any(train(resumed, node_data, names, "cnn", stop=14))
    own = CheckpointFolder(resumed / "checkpoints" / names[1])
    newest = own.tensors_path(own.ids()[-1])
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    replica = CheckpointFolder(resumed / "checkpoints" / names[0] / "replica_of_stage_1")
    for checkpoint in replica.ids():
        replica.remove(checkpoint)
    assert not any(train(resumed, node_data, names, "cnn", resume=True))
    assert "a checkpoint is damaged and not used" in caplog.text
    assert_same_result(whole, resumed)


def test_a_node_without_its_disk_gets_its_state_from_its_neighbour(formed: Any, tmp_path: Path) -> None:
    folder, names = formed("cnn", 3)
    node_data = folder / "node_data"
    whole = tmp_path / "whole"
    assert not any(train(whole, node_data, names, "cnn"))
    for lost in names:
        resumed = tmp_path / lost
        assert any(train(resumed, node_data, names, "cnn", stop=14))
        own = resumed / "checkpoints" / lost
        own.rename(own.with_name("gone"))
        assert not any(train(resumed, node_data, names, "cnn", resume=True))
        assert_same_result(whole, resumed)


def test_a_full_disk_at_one_node_leaves_a_checkpoint_that_all_have(
    formed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, names = formed("cnn", 3)
    node_data = folder / "node_data"
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert not any(train(whole, node_data, names, "cnn"))
    write = CheckpointFolder.write_tensors

    def full(self: CheckpointFolder, checkpoint: CheckpointId, tensors: Any) -> Path:
        if self.path.name == names[1] and self.ids():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, checkpoint, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "write_tensors", full)
        patch.setattr(checkpoint_policy, "_COST", 0.0)  # one after each update
        assert any(train(resumed, node_data, names, "cnn", stop=25, pause=0.02, checkpoint_updates=1))
    found = [set(CheckpointFolder(resumed / "checkpoints" / name).ids()) for name in names]
    assert found[0] - found[1], "the other nodes have taken more"
    assert set.intersection(*found)
    assert "no checkpoint after update" in caplog.text
    assert not any(train(resumed, node_data, names, "cnn", resume=True))
    assert_same_result(whole, resumed)


def test_no_update_follows_the_last_checkpoint_of_a_node_that_leaves(
    formed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be made a second time by the node that takes its place."""
    monkeypatch.setattr(root_controller, "LAST_CHECKPOINT", DEADLINE)
    node_data, names = formed("tied-gpt", 2)
    cluster = LocalCluster(tmp_path, names, node_data=node_data / "node_data")
    nodes: dict[str, Node] = {}
    found: list[tuple[bool, int, int]] = []

    def leave() -> None:
        handed_over = nodes[names[1]].hand_over(DEADLINE)
        status = nodes[names[0]]._ensure_started().status
        newest = CheckpointFolder(tmp_path / "checkpoints" / names[1]).ids()[-1]
        found.append((handed_over, newest.update, status.updates))
        status.fail("the Leaf has left")

    def script(name: str) -> None:
        train_loader, _ = token_loaders(batches=1000)
        options = {"labels": train_loader, "criterion": token_loss, "schedule": "sync"}
        with cluster.node(name, **options) as nodes[name]:
            leaving = threading.Thread(target=leave, daemon=True)
            data = CallingLoader(train_loader, 6, leaving.start) if nodes[name].is_root else train_loader
            Trainer(nodes[name], train_loader=data).train()

    errors = cluster.errors(script)
    assert "the Leaf has left" in str(errors[0])
    ((handed_over, stored, made),) = found
    assert handed_over
    assert made == stored >= 6


def test_a_node_that_leaves_while_nobody_trains_says_so(
    formed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node_data, names = formed("tied-gpt", 2)
    node = LocalCluster(tmp_path, names, node_data=node_data / "node_data").node(names[0])
    assert not node.hand_over()
    assert "leaves while its cluster waits for a lost node" in caplog.text


def test_a_new_run_sets_the_checkpoints_of_an_earlier_one_aside(formed: Any, tmp_path: Path) -> None:
    folder, names = formed("cnn", 1)
    for _ in range(2):
        assert not any(train(tmp_path, folder / "node_data", names, "cnn"))
    folders = [
        CheckpointFolder(tmp_path / "checkpoints" / name) for name in (names[0], f"{names[0]}.previous")
    ]
    assert [len(each.ids()) for each in folders] == [2, 2]
