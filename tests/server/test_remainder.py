"""The rest of an epoch across plans of several clusters: every sample once, whatever is lost when."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from server_cases import spec
from torch.utils.data import DataLoader

from ravnest.runtime.epoch_batches import EpochBatches, begin_epoch
from ravnest.schemas.jobs import TrainingSpec
from ravnest.server.scheduling.remainder import (
    ClusterPosition,
    Remainder,
    RemainderError,
    find_remainder,
    split_rows,
)


def training(**changes: Any) -> TrainingSpec:
    own = {"batch_size": 4, "shuffle": True, "drop_last": False, "epochs": 5, "seed": 7}
    return spec().training.model_copy(update=own | changes)


class Worker:
    """A cluster that trains its share like a provider does, and notes what it has trained."""

    def __init__(
        self, rows: range, settings: TrainingSpec, epoch: int, left: torch.Tensor | None = None
    ) -> None:
        self.rows, self.settings = rows, settings
        self.epoch, self.first, self.left = epoch, epoch, left
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.loader: DataLoader[int]
        if left is None:
            self.loader = DataLoader(
                list(rows),  # type: ignore[arg-type]
                settings.batch_size,
                shuffle=settings.shuffle,
                drop_last=settings.drop_last,
                generator=self.generator,
            )
        else:
            both = [*rows, *range(int(left.max()) + 1)]
            batches = EpochBatches(
                rows,
                settings.batch_size,
                shuffle=settings.shuffle,
                drop_last=settings.drop_last,
                generator=self.generator,
                epoch=epoch,
                samples=len(rows) + left,
            )
            self.loader = DataLoader(
                both,  # type: ignore[arg-type]
                batch_sampler=batches,
                generator=self.generator,
            )
        self.batches = 0
        self.done: list[int] = []
        self._begin()

    def _begin(self) -> None:
        begin_epoch(self.loader, self.epoch)
        self.state = self.generator.get_state().numpy().tobytes()
        self.iterator = iter(self.loader)
        self.batches = 0

    def train(self, batches: int) -> None:
        while batches and self.epoch < self.settings.epochs:
            batch = next(self.iterator, None)
            if batch is None:
                self.epoch += 1
                self._begin()
                continue
            self.done += batch.tolist()
            self.batches += 1
            batches -= 1

    def position(self, unused: int = 0) -> ClusterPosition:
        left = None if self.left is None else (self.first, self.left)
        return ClusterPosition(self.rows, self.epoch, self.epoch, self.batches, unused, self.state, left)


def shares(samples: int, clusters: int) -> list[range]:
    ends = [samples * number // clusters for number in range(clusters + 1)]
    return [range(*pair) for pair in pairwise(ends)]


@pytest.mark.parametrize("seed", range(60))
def test_every_sample_is_trained_once_per_epoch_over_three_plans(seed: int) -> None:
    draw = random.Random(seed)
    samples = draw.randrange(40, 90)
    settings = training(
        batch_size=draw.choice((1, 3, 4)), shuffle=draw.random() < 0.8, epochs=draw.randrange(2, 7)
    )
    done: Counter[int] = Counter()
    workers = [Worker(rows, settings, 0) for rows in shares(samples, draw.randrange(1, 5))]
    for _ in range(2):
        most = settings.epochs * samples // (len(workers) * settings.batch_size)
        for each in workers:
            each.train(draw.randrange(0, most // 3))
        done.update(row for each in workers for row in each.done)
        clusters = draw.randrange(1, 4)
        rates = [draw.uniform(0.2, 3.0) for _ in range(clusters)]
        found = find_remainder([each.position() for each in workers], rates, settings, validates=False)
        workers = [
            Worker(rows, settings, found.epoch, None if found.parts is None else found.parts[number])
            for number, rows in enumerate(shares(samples, clusters))
        ]
    for each in workers:
        each.train(10**6)
    done.update(row for each in workers for row in each.done)
    assert set(done) == set(range(samples))
    assert set(done.values()) == {settings.epochs}


def test_batches_that_a_loader_drops_stay_dropped() -> None:
    settings = training(drop_last=True)
    workers = [Worker(rows, settings, 0) for rows in shares(46, 2)]
    workers[0].train(3)
    workers[1].train(1)
    found = find_remainder(
        [each.position() for each in workers], [1.0, 1.0, 2.0], settings, validates=False
    )
    assert found.parts is not None
    done = [row for each in workers for row in each.done]
    left = [row for part in found.parts for row in part.tolist()]
    assert len(done) + len(left) == 40, "five whole batches of each share"
    assert len({*done, *left}) == 40
    assert [len(part) for part in found.parts] == [8, 8, 8], "whole batches"


def test_samples_whose_updates_are_lost_are_trained_again() -> None:
    settings = training()
    live, lost = (Worker(rows, settings, 0) for rows in shares(40, 2))
    live.train(3)
    lost.train(3)
    found = find_remainder([live.position(), lost.position(unused=8)], [1.0], settings, validates=False)
    assert found.parts is not None
    left = found.parts[0].tolist()
    assert Counter(left) == Counter(set(range(40)) - set(live.done) - set(lost.done[:4]))


def test_the_end_of_an_epoch_in_all_clusters_leaves_a_whole_epoch() -> None:
    settings = training()
    positions = [Worker(rows, settings, 2).position() for rows in shares(40, 2)]
    assert find_remainder(positions, [1.0], settings, validates=False) == Remainder(2, 2, None)


@pytest.mark.parametrize(
    ("epochs", "phases", "expected"),
    [
        ((2, 2), (3, 3), (2, 3)),
        ((2, 2), (3, 2), (2, 3)),
        ((5, 2), (8, 3), (4, 6)),
        ((1, 1), (1, 1), (1, 1)),
    ],
)
def test_phases_continue_where_the_most_advanced_cluster_was(
    epochs: tuple[int, int], phases: tuple[int, int], expected: tuple[int, int]
) -> None:
    """With a validation after every second epoch; an epoch in the middle, and one after the end."""
    settings = training(val_freq=2)
    positions = []
    for rows, epoch, phase in zip(shares(40, 2), epochs, phases, strict=True):
        worker = Worker(rows, settings, epoch)
        worker.train(2)
        positions.append(replace(worker.position(), phase=phase))
    found = find_remainder(positions, [1.0], settings, validates=True)
    assert (found.epoch, found.phase) == expected


def test_an_epoch_whose_batches_are_all_trained_is_over() -> None:
    settings = training()
    one, other = (Worker(rows, settings, 1) for rows in shares(40, 2))
    one.train(5)
    other.train(5)
    positions = [one.position(), other.position()]
    assert find_remainder(positions, [1.0], settings, validates=False) == Remainder(2, 2, None)
    positions[1] = replace(positions[1], unused=4)
    found = find_remainder(positions, [1.0], settings, validates=False)
    assert (found.epoch, found.samples) == (2, 44)
    last = training(epochs=2)
    assert find_remainder([one.position()], [1.0], last, validates=False) == Remainder(2, 2, None)


def test_clusters_that_have_trained_to_the_end_owe_nothing() -> None:
    settings = training(epochs=2)
    ended, lost = (Worker(rows, settings, 0) for rows in shares(40, 2))
    ended.train(10**6)
    lost.train(6)
    found = find_remainder([ended.position(), lost.position()], [1.0], settings, validates=False)
    assert found.epoch == 1, "the last one"
    assert found.samples == 20 - 4
    assert found.parts is not None
    assert set(found.parts[0].tolist()) <= set(range(20, 40))


def test_parts_follow_the_rates_and_the_dataset() -> None:
    rows = torch.randperm(100)
    one, other = split_rows(rows, [3.0, 1.0], training())
    assert (len(one), len(other)) == (75, 25)
    assert set(one.tolist()) == set(range(75))
    assert one.tolist() != sorted(one.tolist())
    one, other = split_rows(rows, [3.0, 1.0], training(shuffle=False))
    assert one.tolist() == list(range(75))
    tiny, _ = split_rows(rows, [1e-9, 1.0], training())
    assert len(tiny) == 1, "an epoch without any sample is none"


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"generator": None}, {}, "lacks the state"),
        ({"generator": b"\0" * 7}, {}, "damaged"),
        ({"batches": 99}, {}, "of which 99 should be trained"),
        ({"rows": range(10**7)}, {}, "limit"),
        ({"batches": 4}, {}, "4 samples of the epoch are too few for 5 clusters"),
        ({"batches": 4, "rows": range(26)}, {"drop_last": True}, "8 samples of the epoch are too few"),
    ],
)
def test_a_remainder_that_cannot_be_found(
    changes: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    position = replace(Worker(range(20), training(), 0).position(), **({"batches": 1} | changes))
    with pytest.raises(RemainderError, match=words):
        find_remainder([position], [1.0] * 5, training(**settings), validates=False)
