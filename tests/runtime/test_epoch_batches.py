"""An epoch that is the rest of another plan's epoch: its batches at Root and Leaf, and resuming."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import LocalCluster, form
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader
from training_cases import SmallCNN, image_loaders

from ravnest import Trainer
from ravnest.runtime.epoch_batches import EpochBatches, begin_epoch

SIZE, LEFT = 8, 37
EPOCHS, SPECIAL = 3, 1
USUAL_BATCHES, LEFT_BATCHES = 10, 5


def loader() -> DataLoader[Any]:
    """Return usual batches, and in one epoch those of 37 other samples."""
    usual, _ = image_loaders()
    other, _ = image_loaders(seed=2)
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    batches = EpochBatches(
        usual.dataset,  # type: ignore[arg-type]
        SIZE,
        shuffle=True,
        drop_last=False,
        generator=generator,
        epoch=SPECIAL,
        samples=len(usual.dataset) + order[:LEFT],  # type: ignore[arg-type]
    )
    return DataLoader(
        ConcatDataset([usual.dataset, other.dataset]), batch_sampler=batches, generator=generator
    )


class StoppedError(Exception):
    """The script stops here."""


class StoppingLoader:
    """Loader that ends the script after a number of batches."""

    def __init__(self, loader: DataLoader[Any], after: int) -> None:
        self.loader, self.after = loader, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if self.after == 0:
                raise StoppedError
            self.after -= 1
            yield batch


def train(folder: Path, formed: tuple[Path, list[str]], stop: int | None = None, **given: Any) -> None:
    node_data, names = formed
    cluster = LocalCluster(folder, names, node_data=node_data / "node_data")

    def script(name: str) -> None:
        data: Any = loader()
        with cluster.node(name, labels=data, schedule="sync", checkpoint_updates=4, **given) as own:
            if stop is not None and own.is_root:
                data = StoppingLoader(data, stop)
            Trainer(own, train_loader=data, epochs=EPOCHS, save=True).train()

    errors = cluster.errors(script)
    if stop is None:
        assert not any(errors)
    else:
        assert isinstance(errors[0], StoppedError)


@pytest.mark.parametrize("stop", [USUAL_BATCHES + 3, USUAL_BATCHES + LEFT_BATCHES + 6])
def test_a_run_that_is_resumed_in_or_after_such_an_epoch_equals_an_uninterrupted_one(
    tmp_path: Path, stop: int
) -> None:
    formed = tmp_path, form(tmp_path, SmallCNN(), (torch.rand(8, 1, 8, 8),), 2)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(whole, formed, micro_batches=1)
    train(resumed, formed, stop, micro_batches=1)
    train(resumed, formed, resume=True, micro_batches=1)
    lines = (whole / "losses.txt").read_text().splitlines()
    assert len(lines) == (EPOCHS - 1) * USUAL_BATCHES + LEFT_BATCHES
    assert (resumed / "losses.txt").read_text().splitlines() == lines
    one, other = (LocalCluster(folder, []).fused() for folder in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_only_one_epoch_is_special() -> None:
    found = loader()
    counts = []
    for epoch in range(EPOCHS):
        begin_epoch(found, epoch)
        counts.append(sum(len(batch[0]) for batch in found))
    assert counts == [77, LEFT, 77]
    assert len(found) == USUAL_BATCHES
    begin_epoch(found, SPECIAL)
    once, again = ([batch[1].tolist() for batch in found] for _ in range(2))
    assert once == again, "in the order that was given"


def test_incomplete_batches_are_dropped_if_the_job_says_so() -> None:
    batches = EpochBatches(
        range(20),
        SIZE,
        shuffle=False,
        drop_last=True,
        generator=torch.Generator(),
        epoch=0,
        samples=torch.arange(20, 20 + LEFT),
    )
    assert [len(batch) for batch in batches] == [8] * 4
    batches.begin_epoch(1)
    assert list(batches) == [list(range(8)), list(range(8, 16))]


def test_other_loaders_need_not_know_about_epochs() -> None:
    begin_epoch([1, 2], 3)
    begin_epoch(DataLoader(nn.Identity(), batch_sampler=[[0]]), 3)  # type: ignore[arg-type]
