"""Large tensors cut along their rows, for nodes that cannot hold them whole.

A unit is the smallest piece that a stage can hold, and it holds its tensors whole: no node may be able
to train an embedding of a large vocabulary. The tensor is then cut into blocks of rows, which stages
hold separately. It costs a little time and the last bits of the gradients, so that it is done only if
no plan exists otherwise, and with as few blocks as possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from ravnest.plan.profile import ModelProfile
from ravnest.plan.profiler import profile_model
from ravnest.split.element_wise import element_wise
from ravnest.split.row_blocks import cuttable_tensors
from ravnest.split.splitter import PreparedModel

BLOCK_COUNTS = (2, 3, 4, 6, 8, 12, 16)
"""Numbers of blocks of the largest tensor that are tried in turn."""

SHIPPED_COUNTS = (2, 4, 8)
"""Numbers of blocks that a requester prepares, because it does not know the providers."""
_WORTH_SHIPPING = 1 << 20
"""Bytes of the smallest tensor for which a requester prepares blocks."""
_SHARE = 1 / 20
"""Share of the model's weights that such a tensor has at least: any pool of up to some 20 nodes that
can hold the model has nodes that can hold a smaller one."""


@dataclass(frozen=True)
class RowCutModel:
    """A prepared model with tensors cut along their rows, and its profile."""

    prepared: PreparedModel
    profile: ModelProfile


def row_cut_models(
    prepared: PreparedModel,
    profile: ModelProfile,
    ram: Sequence[float] | None = None,
    counts: Iterable[int] = BLOCK_COUNTS,
) -> Iterator[RowCutModel]:
    """Yield the model with its largest tensors cut into ever more blocks, measured again.

    With ``ram``, the bytes of each node, models that cannot fit them are left out.
    """
    tensors = cuttable_tensors(prepared.capture)
    if ram is not None and sum(ram) < least_bytes(profile):
        return
    seen: list[dict[str, int]] = []
    for count in counts:
        blocks = blocks_of(tensors, count)
        if not blocks or blocks in seen:
            continue
        seen.append(blocks)
        largest = max(t.nbytes for t in tensors.values()) / count
        if ram is None or largest * _bytes_per_byte(profile) <= max(ram):
            cut = prepared.with_row_blocks(blocks)
            yield RowCutModel(cut, _profile(cut, profile))


def row_cuts_to_ship(prepared: PreparedModel, profile: ModelProfile) -> Iterator[RowCutModel]:
    """Yield the models with cut tensors that a server may need, for providers not known yet."""
    largest = max((t.nbytes for t in cuttable_tensors(prepared.capture).values()), default=0)
    total = sum(tensor.bytes for tensor in profile.state)
    if largest >= max(_WORTH_SHIPPING, total * _SHARE):
        yield from row_cut_models(prepared, profile, counts=SHIPPED_COUNTS)


def blocks_of(tensors: Mapping[str, torch.Tensor], count: int) -> dict[str, int]:
    """Return how many blocks to cut each tensor into: ``count`` for the largest.

    The other tensors are cut into blocks of about the same size; those that are smaller stay whole.
    """
    size = max((tensor.nbytes for tensor in tensors.values()), default=0) / count
    counts = {key: min(ceil(t.nbytes / size), t.shape[0]) for key, t in tensors.items() if t.nbytes}
    return {key: found for key, found in counts.items() if found > 1}


def least_bytes(profile: ModelProfile) -> float:
    """Return a lower bound of the memory of one cluster: weights, gradients and optimizer state."""
    factor = _bytes_per_byte(profile)
    return sum(tensor.bytes * (factor if tensor.trainable else 1) for tensor in profile.state)


def whole_reason(optimizer: type[torch.optim.Optimizer] | None) -> str:
    """Return why no tensor may be cut along its rows with this optimizer; empty if it may."""
    if optimizer is None or element_wise(optimizer):
        return ""
    return f"tensors are not cut along their rows, because {optimizer.__name__} reads them as a whole"


def _bytes_per_byte(profile: ModelProfile) -> float:
    """Return the bytes of weight, gradient and optimizer state per byte of a trained tensor."""
    return 2 + profile.optimizer_bytes_per_parameter_byte


def _profile(prepared: PreparedModel, whole: ModelProfile) -> ModelProfile:
    """Return the profile of a cut model; its batches can be split if those of the whole model can."""
    found = profile_model(
        prepared, optimizer_factor=whole.optimizer_bytes_per_parameter_byte, splits=False
    )
    return replace(
        found,
        smallest_rows=whole.smallest_rows,
        unsplit_reason=whole.unsplit_reason,
        update_copies=whole.update_copies,
    )
