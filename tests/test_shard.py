"""``shard``: each sample in one share, and the same share on all nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from node_files import node_file
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import ravnest
from ravnest.errors import SettingsError, StageFormatError
from ravnest.store.node_spec import NeighbourSpec, write_node


def write_plan(folder: Path, sizes: list[int]) -> list[list[str]]:
    """Write a plan with ``sizes`` nodes per cluster, and return the names of the nodes by cluster."""
    roots = tuple(NeighbourSpec(sum(sizes[:c]), "127.0.0.1:1") for c in range(len(sizes)))
    names, node = [], 0
    for cluster, size in enumerate(sizes):
        names.append([f"node_{node + stage}" for stage in range(size)])
        for stage in range(size):
            spec = node_file(node, stage=stage, stages=size, cluster=cluster, roots=roots)
            write_node(folder, spec)
            node += 1
    return names


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def values(dataset: Any) -> list[int]:
    return [int(dataset[index][0]) for index in range(len(dataset))]


def test_each_sample_is_in_one_share(tmp_path: Path) -> None:
    first, second, third = write_plan(tmp_path, [2, 1, 1])
    data = numbers(100)
    shares = [
        values(ravnest.shard(data, names[0], 7, folder=tmp_path)) for names in (first, second, third)
    ]
    assert sorted(chain(*shares)) == list(range(100))
    assert [len(share) for share in shares] == [33, 33, 34]
    assert shares[0] != sorted(shares[0]), "a share is random, not a contiguous slice"


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_shares_differ_by_at_most_one(
    tmp_path_factory: pytest.TempPathFactory, clusters: int, more: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("plan")
    names = write_plan(folder, [1] * clusters)
    data = numbers(clusters + more)
    shares = [values(ravnest.shard(data, name, seed, folder=folder)) for (name,) in names]
    assert sorted(chain(*shares)) == list(range(clusters + more))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_nodes_of_a_cluster_get_the_same_share_in_the_same_order(tmp_path: Path) -> None:
    (root, leaf), _ = write_plan(tmp_path, [2, 1])
    data = numbers(50)
    torch.manual_seed(1)
    share = values(ravnest.shard(data, root, 3, folder=tmp_path))
    torch.manual_seed(2)
    assert values(ravnest.shard(data, leaf, 3, folder=tmp_path)) == share


def test_the_seed_determines_the_shares_and_defaults_to_42(tmp_path: Path) -> None:
    (name,), _ = write_plan(tmp_path, [1, 1])
    data = numbers(50)
    shares = {seed: values(ravnest.shard(data, name, seed, folder=tmp_path)) for seed in (0, 1, 42)}
    assert set(shares[0]) != set(shares[1])
    assert values(ravnest.shard(data, name, folder=tmp_path)) == shares[42]


def test_the_global_generator_is_not_used(tmp_path: Path) -> None:
    (name,), _ = write_plan(tmp_path, [1, 1])
    before = torch.get_rng_state()
    ravnest.shard(numbers(50), name, folder=tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_data_loader_accepts_a_share(tmp_path: Path) -> None:
    (name,), _ = write_plan(tmp_path, [1, 1])
    share = ravnest.shard(numbers(10), name, folder=tmp_path)
    assert isinstance(share, Subset)
    assert sum(len(batch[0]) for batch in DataLoader(share, batch_size=2)) == 5


def test_a_single_cluster_gets_the_whole_dataset(tmp_path: Path) -> None:
    ((name, _),) = write_plan(tmp_path, [2])
    data = numbers(10)
    assert ravnest.shard(data, name, folder=tmp_path) is data


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Endless(torch.utils.data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("dataset", [Stream(), Endless()])
def test_a_dataset_without_a_length_is_refused(tmp_path: Path, dataset: Any) -> None:
    (name,), _ = write_plan(tmp_path, [1, 1])
    with pytest.raises(SettingsError, match=f"{type(dataset).__name__} has none.*every k-th sample"):
        ravnest.shard(dataset, name, folder=tmp_path)


def test_fewer_samples_than_clusters_are_refused(tmp_path: Path) -> None:
    (name,), _ = write_plan(tmp_path, [1, 1])
    with pytest.raises(SettingsError, match="1 samples cannot be split between 2 clusters"):
        ravnest.shard(numbers(1), name, folder=tmp_path)


@pytest.mark.parametrize("seed", [-1, 2**32, True, 1.5, "1"])
def test_a_bad_seed_is_refused(tmp_path: Path, seed: Any) -> None:
    (name,), _ = write_plan(tmp_path, [1, 1])
    with pytest.raises(SettingsError, match="seed of shard"):
        ravnest.shard(numbers(4), name, seed, folder=tmp_path)


def test_an_unknown_node_is_refused(tmp_path: Path) -> None:
    write_plan(tmp_path, [1, 1])
    with pytest.raises(StageFormatError, match="node_9"):
        ravnest.shard(numbers(4), "node_9", folder=tmp_path)
