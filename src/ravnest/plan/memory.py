"""Memory that a stage needs while it trains.

A batch that can be split into micro-batches is trained without delay: at most one batch is in progress.
A stage keeps activations for a ``share`` of a batch at most (1 unless memory is short) and works on a
``part`` of it, one micro-batch, at a time. A batch that cannot be split is trained with a delay of one
update: all stages but the Leaf keep two batches, and share and part are 1.

A stage needs, all the time,

- its weights: every tensor that its units use, once;
- with a delay, one older version of its trained parameters and the activations of another batch (not
  the Leaf, which finishes each batch before it starts the next);
- the optimizer state of its trained parameters, without those that an earlier stage owns (tied weights);
- its outputs of each micro-batch in flight, and the gradients at both ends of two micro-batches, one
  that is computed and one that has arrived or is being sent;
- with several clusters, the copies for averaging (``averaging_copies``).

The largest of these moments comes on top:

- Backward. The micro-batches in flight have the tensors that autograd saves and the inputs of the
  stage, or, once the gradients of their inputs are computed, what the deferred weight gradients need
  (the Root does not defer). One of them runs backward, from the last unit to the first: at unit u it
  has the activations up to u, what is deferred behind u, and the workspace of u. The stage also has the
  gradients of all its parameters, to which micro-batches add theirs, and the gradient that is being
  added, at most the largest. If a batch is an update, gradients appear one after the other instead.
- The update: gradients of all parameters and temporaries for the largest. No activations of the update
  are left then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Bytes = TypeVar("Bytes", float, FloatArray)
"""Bytes of one stage, or of a grid of stages."""


@dataclass(frozen=True)
class MemorySettings:
    """Settings that the memory of a stage depends on, besides the model and the cuts."""

    optimizer_factor: float
    """Bytes of optimizer state per byte of trainable parameters."""
    update_copies: float = 0.0
    """Temporaries of the update, as a multiple of the largest parameter."""
    averaging: float = 0.0
    """Bytes that averaging keeps per byte of trainable parameters."""
    max_delay: int = 0
    """Updates by which gradients may be late."""
    share: float = 1.0
    """Share of a batch for which a stage keeps activations at once."""
    part: float = 1.0
    """Share of a batch in one micro-batch, at most."""
    accumulates: bool = False
    """Several micro-batches add to the same gradients."""


def averaging_copies(
    *, compressed: bool = False, with_optimizer: bool = False, optimizer_factor: float = 0.0
) -> float:
    """Return the bytes that averaging keeps per byte of trainable parameters.

    These are the copy of the current round, and the previous average while it waits for an update.
    Compression also keeps the last average and the accumulated rounding errors.
    """
    copies = 4 if compressed else 2
    return copies * (1 + optimizer_factor) if with_optimizer else copies


@dataclass(frozen=True)
class StageLoad(Generic[Bytes]):
    """Bytes that a run of units needs for one batch."""

    state: Bytes
    trainable: Bytes
    owned: Bytes
    """Trainable tensors that no earlier stage uses. Only they have optimizer state, older versions and
    copies for averaging; the others are replicas of tied weights."""
    largest: Bytes
    """Largest trainable tensor."""
    activations: Bytes
    deferred: Bytes
    """Tensors that deferred weight gradients keep; 0 at the Root, which does not defer."""
    incoming: Bytes
    """Inputs that the stage keeps besides its activations."""
    leaving: Bytes
    """Activations that leave at the end and that autograd does not keep."""
    returning: Bytes
    """Gradients at both ends."""
    backward: Bytes
    """Peak of activations, deferred tensors and workspace during backward, minus the gradients of
    parameters that do not exist yet at that moment."""


@dataclass(frozen=True)
class StageMemory(Generic[Bytes]):
    """Bytes of a stage while it trains, by purpose."""

    weights: Bytes
    versions: Bytes
    gradients: Bytes
    """Gradients, deferred tensors and temporaries: what the peak adds to everything else."""
    optimizer: Bytes
    activations: Bytes
    transfer: Bytes
    averaging: Bytes
    """Copies for rounds with other clusters."""

    @property
    def total(self) -> Bytes:
        """Sum of all purposes."""
        return (
            self.weights
            + self.versions
            + self.gradients
            + self.optimizer
            + self.activations
            + self.transfer
            + self.averaging
        )


def size(number: float) -> str:
    """Format a number of bytes with two or three significant digits."""
    if number < 1e6:
        return f"{number / 1e3:.0f} kB"
    return f"{number / 1e6:.0f} MB" if number < 1e9 else f"{number / 1e9:.1f} GB"


def stage_memory(load: StageLoad[Bytes], in_flight: int, training: MemorySettings) -> StageMemory[Bytes]:
    """Return the memory of a stage, or of a grid of stages.

    ``in_flight`` is the number of stages from this one to the Leaf.
    """
    delay = training.max_delay if in_flight > 1 else 0
    share, part = training.share, training.part
    kept = np.maximum(load.activations + load.incoming, load.deferred)
    backward = (share - part) * kept + part * np.maximum(load.backward + load.incoming, load.deferred)
    if training.accumulates:
        backward = np.maximum(backward, share * kept) + load.largest
    peak = load.trainable + np.maximum(backward, training.update_copies * load.largest)
    activations = share * (load.activations + load.incoming)
    return StageMemory(
        weights=load.state,
        versions=load.owned * delay,
        gradients=peak - activations,
        optimizer=load.owned * training.optimizer_factor,
        activations=activations * (1 + delay),
        transfer=(share * load.leaving + min(share, 2 * part) * load.returning) * (1 + delay),
        averaging=load.owned * training.averaging,
    )
