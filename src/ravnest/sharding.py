"""Split of a dataset between clusters, so that together they see each sample once per epoch."""

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
    """A cluster's share of a dataset; its type tells the trainer that the data is split."""


def shard(
    dataset: Dataset[T], name: str, seed: int = 42, *, folder: str | Path = "node_data"
) -> Dataset[T]:
    """Return the share of ``dataset`` for the cluster of node ``name``, such as ``"node_0"``.

    A random permutation, which depends on ``seed`` only, is cut into one share per cluster; shares
    differ by at most one sample in size. All nodes of a cluster get the same share in the same order.
    All clusters must use the same seed. A single cluster gets the dataset itself.
    """
    samples = _length(dataset)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise SettingsError(f"the seed of shard() must be an integer from 0 to 2**32 - 1, not {seed!r}")
    spec = read_node(Path(folder), name)
    clusters = len(spec.roots)
    if clusters == 1:
        return dataset
    if samples < clusters:
        raise SettingsError(
            f"{samples} samples cannot be split between {clusters} clusters: each needs at least one"
        )
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    first, end = (samples * cluster // clusters for cluster in (spec.cluster, spec.cluster + 1))
    return Shard(dataset, order[first:end].tolist())


def _length(dataset: Dataset[T]) -> int:
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise SettingsError(
            f"shard() needs a dataset with a length and an index; {type(dataset).__name__} has none. "
            "With k clusters, let it yield every k-th sample itself, starting at the cluster's number"
        )
    return len(dataset)
