"""Logits and loss of the Leaf in chunks of positions, as a way to save memory.

The logits of a large vocabulary and what the loss makes of them are often larger than all other
activations of the Leaf. In n chunks they take 1/n of that, at some cost in time. The plan uses as few
chunks as fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ravnest.plan.profile import ModelProfile, UnitCost

LOSS_COPIES = 3
"""Tensors of the size of the outputs that exist at once when a loss runs backward. Of cross entropy
these are the log-softmax, its gradient and the gradient of the logits."""
CHUNKED_WORK = 1.2
"""Time of the layer that makes the logits in chunks, relative to a whole pass (measured with 8)."""
_MOST_CHUNKS = 64
_FEWEST_POSITIONS = 8
"""Positions in a chunk: with fewer, the weight gradients of each chunk take more time than they save."""


def chunk_counts(profile: ModelProfile) -> Sequence[int]:
    """Return the numbers of chunks that can be chosen, ascending; the first is 1."""
    if profile.chunkable is None:
        return [1]
    most = min(_MOST_CHUNKS, profile.chunkable.positions // _FEWEST_POSITIONS)
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts


def with_loss_chunks(profile: ModelProfile, chunks: int) -> ModelProfile:
    """Return the profile of a model whose last stage computes logits and loss in chunks.

    The layer that makes the logits runs forward and backward in the forward pass. Neither the logits nor
    their gradient is kept for later.
    """
    head = profile.chunkable
    if head is None or chunks == 1:
        return profile
    at_once = head.logits_bytes * LOSS_COPIES // chunks + head.gradient_bytes
    units = [*profile.units[: head.unit], *(_nothing(unit) for unit in profile.units[head.unit :])]
    units[head.unit] = replace(
        profile.units[head.unit],
        work=CHUNKED_WORK * profile.units[head.unit].work,
        activation_bytes=head.activation_bytes,
        workspace_bytes=max(head.workspace_bytes, at_once + head.parameter_bytes),
        passing_bytes=max(head.passing_bytes, at_once),
        deferred_bytes=head.deferred_bytes,
    )
    return replace(profile, units=tuple(units), loss_bytes=0)


def _nothing(unit: UnitCost) -> UnitCost:
    """Return a unit behind the head, whose operations run on chunks too."""
    return replace(unit, activation_bytes=0, workspace_bytes=0, passing_bytes=0, deferred_bytes=0)
