"""Memory that a stage needs while it trains.

Stage k of K has ``n = K - k`` micro-batches in flight: the Root has K, the Leaf one. A stage keeps

- its weights: every tensor that its units use, once;
- ``ceil(n / update_frequency)`` older versions of its trained parameters, because each micro-batch runs
  backward on the weights of its forward pass. None if n is 1: such a stage finishes each micro-batch
  before it updates, so no older version is in use;
- the optimizer state of its trained parameters;
- for each micro-batch in flight, the tensors that autograd saves and the inputs of the stage;
- buffers for one micro-batch in transfer: activations out, gradients in and out;
- with several clusters, the copies for averaging (``averaging_copies``);
- the peak of one backward pass and update. Backward goes from the last unit to the first, frees
  activations and creates gradients. At unit u, memory holds the activations up to u, the gradients of
  the parameters behind u (of all parameters, if several micro-batches accumulate into one update) and
  the workspace of u. The temporaries of the update come later, beside all gradients, when no activation
  of that micro-batch is left.
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

    update_frequency: int
    """Micro-batches per update."""
    optimizer_factor: float
    """Bytes of optimizer state per byte of trainable parameters."""
    update_copies: float = 0.0
    """Temporaries of the update, as a multiple of the largest parameter."""
    averaging: float = 0.0
    """Bytes that averaging keeps per byte of trainable parameters."""


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
    """Bytes that a run of units needs for one micro-batch."""

    state: Bytes
    trainable: Bytes
    largest: Bytes
    """Largest trainable tensor."""
    activations: Bytes
    incoming: Bytes
    """Inputs that the stage keeps besides its activations."""
    transfer: Bytes
    """Activations that leave at the end, and the gradients at both ends."""
    backward: Bytes
    """Peak of activations and workspace during backward, minus the gradients of parameters that do not
    exist yet at that moment."""


@dataclass(frozen=True)
class StageMemory(Generic[Bytes]):
    """Bytes of a stage while it trains, by purpose."""

    weights: Bytes
    versions: Bytes
    gradients: Bytes
    """Gradients and temporaries: what the peak adds to everything else."""
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


def older_versions(in_flight: int, update_frequency: int) -> int:
    """Return the number of weight versions that a stage keeps besides the newest."""
    return 0 if in_flight == 1 else -(-in_flight // update_frequency)


def stage_memory(load: StageLoad[Bytes], in_flight: int, training: MemorySettings) -> StageMemory[Bytes]:
    """Return the memory of a stage, or a grid of stages, with ``in_flight`` micro-batches in flight."""
    peak = load.trainable + np.maximum(load.backward, training.update_copies * load.largest)
    return StageMemory(
        weights=load.state,
        versions=load.trainable * older_versions(in_flight, training.update_frequency),
        gradients=peak - load.activations,
        optimizer=load.trainable * training.optimizer_factor,
        activations=(load.activations + load.incoming) * in_flight,
        transfer=load.transfer,
        averaging=load.trainable * training.averaging,
    )
