"""Mean of the checkpoints of several clusters, as an averaging round would make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ravnest.errors import StageFormatError
from ravnest.store.checkpoint import EMA, OPTIMIZER, STATE, LazyTensor
from ravnest.store.checkpoint_sets import CheckpointSet
from ravnest.store.robust_mean import trim_of, trimmed_mean


@dataclass(frozen=True)
class WeightedSet:
    """Checkpoints of a cluster, and their weight in a mean."""

    checkpoints: CheckpointSet
    weight: float


@dataclass(frozen=True)
class StageContents:
    """Contents of a stage's checkpoint."""

    tensors: Mapping[str, LazyTensor]
    """By their names in the file."""
    fields: Mapping[str, Mapping[str, Any]] | None
    """Plain values of the optimizer, by key; None if nothing trains."""


def sample_weights(samples: Sequence[int], *, robust: bool = False) -> list[float]:
    """Return the weights of clusters with so many samples since their last average.

    They are those of an averaging round: shares of the samples, or equal ones if nobody has any. With a
    robust mean, those that have samples have equal weights: the samples are their own words.
    """
    if robust:
        samples = [min(each, 1) for each in samples]
    total = sum(samples)
    if not total:
        return [1 / len(samples)] * len(samples)
    return [each / total for each in samples]


def mean_contents(
    own: StageContents,
    averaged: Sequence[tuple[StageContents, float]],
    *,
    optimizer: bool,
    robust: bool = False,
) -> StageContents:
    """Return ``own`` with the mean of the weights and buffers of several clusters.

    Integers stay, like in an averaging round. ``optimizer``: optimizer state in the shape of its weight
    is averaged too; moving averages of weights always are. ``robust``: from three clusters on, the
    trimmed mean is taken, for which a tensor of all of them is in memory at once. ``StageFormatError``
    if the mean is not finite.
    """
    tensors = dict(own.tensors)
    for name, tensor in own.tensors.items():
        found = [(each.tensors[name], weight) for each, weight in averaged if name in each.tensors]
        is_alike = len(found) == len(averaged) and all(
            (each.shape, each.dtype) == (tensor.shape, tensor.dtype) for each, _ in found
        )
        if tensor.dtype.is_floating_point and is_alike and _is_averaged(name, own, optimizer):
            used = [(each, weight) for each, weight in found if weight]
            tensors[name] = LazyTensor(tensor.dtype, tensor.shape, partial(_mean, name, used, robust))
    return StageContents(tensors, own.fields)


def _is_averaged(name: str, own: StageContents, optimizer: bool) -> bool:
    if name.startswith(STATE):
        return True
    key, _, field = name.removeprefix(OPTIMIZER).rpartition("/")
    weight = STATE + key
    return (
        (optimizer or field == EMA)
        and weight in own.tensors
        and own.tensors[weight].shape == own.tensors[name].shape
    )


def _mean(name: str, tensors: Sequence[tuple[LazyTensor, float]], robust: bool) -> torch.Tensor:
    """Load the tensors and return their weighted mean, or the trimmed one."""
    if len(tensors) == 1:
        return tensors[0][0].load()
    wide = torch.promote_types(tensors[0][0].dtype, torch.float32)
    trim = trim_of(len(tensors)) if robust else 0
    if trim:
        values = [tensor.load().to(wide).flatten().numpy() for tensor, _ in tensors]
        total = torch.from_numpy(trimmed_mean(values, trim)).reshape(tensors[0][0].shape)
    else:
        total = torch.zeros(tensors[0][0].shape, dtype=wide)
        for tensor, weight in tensors:
            total.add_(tensor.load().to(wide), alpha=weight)
    if not bool(total.isfinite().all()):
        raise StageFormatError(f"the mean of {name} over the clusters is not finite")
    return total.to(tensors[0][0].dtype)
