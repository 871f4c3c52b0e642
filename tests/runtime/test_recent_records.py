"""Results that a killed Root may not have reported: its checkpoint has them for the next Root."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from local_cluster import Formed, LocalCluster
from torch.utils.data import DataLoader
from training_cases import points

from ravnest import Trainer
from ravnest.runtime.control.recent_records import (
    MOST_RECENT,
    decoded_records,
    encoded_records,
)
from ravnest.store.checkpoint import CheckpointFolder
from ravnest.telemetry import LossRecord, ValidationRecord, WorkerRecord

PER_EPOCH, EPOCHS = 40, 3


@dataclass
class Sink:
    """Keeps the records."""

    records: list[WorkerRecord] = field(default_factory=list)

    def emit(self, record: WorkerRecord) -> None:
        self.records.append(record)

    @property
    def losses(self) -> list[LossRecord]:
        return [each for each in self.records if isinstance(each, LossRecord)]

    @property
    def validations(self) -> list[ValidationRecord]:
        return [each for each in self.records if isinstance(each, ValidationRecord)]


class EndedError(Exception):
    """The Root ends here."""


@dataclass
class EndingLoader:
    """Loader that ends the Root once it has a checkpoint of the second epoch."""

    loader: DataLoader[Any]
    folder: CheckpointFolder

    def __post_init__(self) -> None:
        self.batch_size, self.dataset = self.loader.batch_size, self.loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if newest_update(self.folder) > PER_EPOCH:
                raise EndedError
            yield batch


def newest_update(folder: CheckpointFolder) -> int:
    ids = folder.ids()
    return ids[-1].update if ids else 0


def own_checkpoints(local: LocalCluster) -> CheckpointFolder:
    return CheckpointFolder(local.folder / "checkpoints" / local.names[0])


def run(local: LocalCluster, *, ends: bool, **options: Any) -> tuple[Sink, list[BaseException | None]]:
    """Train and return what the Root has reported, and the errors."""
    sink = Sink()

    def script(name: str) -> None:
        loader = points(5 * PER_EPOCH)
        own = {"record_sink": sink} if name == local.names[0] else {}
        labels = {"labels": loader, "test_labels": loader, "checkpoint_updates": 1}
        with local.node(name, **labels, **own, **options) as node:
            data = EndingLoader(loader, own_checkpoints(local)) if ends and node.is_root else loader
            Trainer(node, train_loader=data, val_loader=loader, epochs=EPOCHS).train()

    return sink, local.errors(script)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_root_that_takes_a_place_reports_again_what_its_checkpoint_has(
    cluster: Formed, nodes: int
) -> None:
    local = cluster(nodes=nodes)
    first, errors = run(local, ends=True)
    assert isinstance(errors[0], EndedError)
    again, errors = run(local, ends=False, resume=True, hands_over=True)
    assert errors == [None] * nodes
    assert [each.update for each in again.losses] == list(range(PER_EPOCH * EPOCHS))
    assert again.losses[: PER_EPOCH + 1] == first.losses[: PER_EPOCH + 1]
    assert [(each.number, each.epoch) for each in again.validations] == [(0, 1), (1, 2), (2, 3)]
    assert again.validations[0] == first.validations[0]


def test_without_a_server_nothing_is_reported_twice(cluster: Formed) -> None:
    """Logs and callbacks have what the Root before has reported."""
    local = cluster(nodes=1)
    run(local, ends=True)
    begins = newest_update(own_checkpoints(local))
    again, errors = run(local, ends=False, resume=True)
    assert errors == [None]
    assert [each.update for each in again.losses] == list(range(begins, PER_EPOCH * EPOCHS))
    assert [each.number for each in again.validations] == [1, 2]


LOSSES = [LossRecord(number, 0, 0.5, 1, 0) for number in range(3)]
VALIDATION = ValidationRecord(0, 1, "accuracy", 0.5, 10, {"accuracy": 0.5})


def test_records_survive_a_checkpoint() -> None:
    kept = [*LOSSES, VALIDATION]
    assert decoded_records(encoded_records(kept), 3, 1) == kept


def test_only_what_the_checkpoint_contains_is_repeated() -> None:
    text = encoded_records([*LOSSES, VALIDATION])
    assert decoded_records(text, 2, 0) == LOSSES[:2]


def test_the_number_of_records_is_bounded() -> None:
    many = [LossRecord(number, 0, 0.5, 1, 0) for number in range(1000)]
    assert decoded_records(encoded_records(many), 1000, 0) == many[-MOST_RECENT:]


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        "",
        "{",
        "\ud800",
        "[" * 100_000,
        "[1]",
        '[{"kind": "loss"}]',
        '[{"kind": ["loss"]}]',
        '[{"kind": "work", "number": 1}]',
        msgspec.json.encode([{**msgspec.to_builtins(LOSSES[0]), "loss": "low"}]).decode(),
    ],
)
def test_damaged_records_are_left_out(text: object) -> None:
    assert decoded_records(text, 3, 3) == []
