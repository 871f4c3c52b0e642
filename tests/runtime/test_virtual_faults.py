"""A cluster that loses nodes at any time applies each micro-batch once, under virtual time."""

from __future__ import annotations

import itertools

import pytest
from virtual_case import VirtualCase, case_of
from virtual_cluster import VirtualCluster
from virtual_disk import Applied, StageContent

FEW, MANY = 2_000, 20_000
BLOCK = 250
"""Seeds of one test."""


def assert_complete(case: VirtualCase, contents: list[StageContent]) -> None:
    """Check that each stage has applied everything once and in order, and that all agree."""
    first = contents[0]
    assert [batches(update) for update in first.updates] == expected(case)
    trains = [phase for phase, (trains, _) in enumerate(case.phases) if trains]
    assert list(first.epochs) == trains
    assert list(first.validations) == [p for p in range(len(case.phases)) if p not in trains]
    assert all(content == first for content in contents)


def expected(case: VirtualCase) -> list[list[tuple[int, int]]]:
    """Return the batches of each update of a training in which nothing happens."""
    every = case.update_frequency
    return [
        [(phase, batch) for batch in range(first, min(first + every, count))]
        for phase, (trains, count) in enumerate(case.phases)
        if trains
        for first in range(0, count, every)
    ]


def batches(update: tuple[Applied, ...]) -> list[tuple[int, int]]:
    """Return the batches of an update; each has all its micro-batches, in order."""
    found = []
    for batch, parts in itertools.groupby(update, lambda each: (each.phase, each.batch, each.parts)):
        assert [each.part for each in parts] == list(range(batch[2]))
        found.append(batch[:2])
    return found


def check(seed: int) -> VirtualCluster:
    """Train with the faults of a seed; if anything is wrong, print what happened."""
    case = case_of(seed)
    cluster = VirtualCluster(case)
    try:
        assert_complete(case, cluster.run())
    except Exception as error:
        raise AssertionError(
            f"{error or type(error).__name__}\nat {cluster.clock.now:.2f} s, after starts at "
            f"{[str(each) for each in cluster.resumed]}, of\n{case}\n"
            f"Replay it with test_virtual_faults.check({seed})"
        ) from error
    return cluster


@pytest.mark.parametrize("first", range(0, FEW, BLOCK))
def test_every_update_is_applied_once_whatever_is_lost(first: int) -> None:
    for seed in range(first, first + BLOCK):
        check(seed)


@pytest.mark.full
@pytest.mark.parametrize("first", range(FEW, MANY, 10 * BLOCK))
def test_every_update_is_applied_once_whatever_is_lost_in_many_more_runs(first: int) -> None:
    for seed in range(first, min(first + 10 * BLOCK, MANY)):
        check(seed)
