"""A cluster's share of a dataset, so that clusters together see each sample once an epoch."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from ravnest.errors import SettingsError
from ravnest.store.node_spec import read_node

T = TypeVar("T")


class Shard(Subset[T]):
    """A cluster's share; a type of its own, so that training can tell."""


def shard(
    dataset: Dataset[T], name: str, seed: int = 42, *, folder: str | Path = "node_data"
) -> Dataset[T]:
    """The share of ``dataset`` for the cluster of node ``name``, such as ``"node_0"``.

    A random permutation, the same on all nodes for one ``seed``, is cut into one part a cluster;
    parts differ by at most one sample in size. All nodes of a cluster get the same part in the same
    order. All clusters must use the same seed. With a single cluster it is the dataset itself.
    """
    samples = _length(dataset)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise SettingsError(
            f"the seed of shard() must be a whole number from 0 to 2**32 - 1, not {seed!r}"
        )
    place = read_node(Path(folder), name)
    clusters = len(place.roots)
    if clusters == 1:
        return dataset
    if samples < clusters:
        raise SettingsError(
            f"{samples} samples cannot be shared by {clusters} clusters: each needs one at least"
        )
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    first, end = (samples * part // clusters for part in (place.cluster, place.cluster + 1))
    return Shard(dataset, order[first:end].tolist())


def _length(dataset: Dataset[T]) -> int:
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise SettingsError(
            f"shard() needs a dataset with a length and an index; {type(dataset).__name__} has none."
            " Let it yield every k-th sample itself, from the number of the cluster on, of k clusters"
        )
    return len(dataset)
