"""How much memory a stage needs while it trains: the formula, in one place.

Stage k of K has ``n = K - k`` micro-batches in flight: the Root K, the Leaf one. It keeps

- its weights: every tensor that its units use, once;
- older versions of what it trains, ``ceil(n / update_frequency)`` of them, because each micro-batch
  runs backward on the weights it ran forward on. None where n is 1: such a stage finishes each
  micro-batch before it updates, so nothing older is in use;
- a gradient and the optimizer's state for what it trains;
- for each micro-batch in flight, what autograd keeps and the inputs that came in;
- buffers for one micro-batch on its way: activations out, gradients in and out;
- the largest transient allocation of one of its units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Bytes = TypeVar("Bytes", float, FloatArray)
"""Bytes of one stage, or of a whole grid of stages."""


@dataclass(frozen=True)
class Training:
    """What the memory depends on besides the model and the cut."""

    update_frequency: int
    """Micro-batches an update."""
    optimizer_factor: float
    """Bytes of optimizer state for each byte of a trainable parameter."""


@dataclass(frozen=True)
class StageLoad(Generic[Bytes]):
    """What a run of units brings with it, in bytes, for one micro-batch."""

    state: Bytes
    trainable: Bytes
    activations: Bytes
    incoming: Bytes
    """Activations that enter at its start; the model's inputs for the Root."""
    transfer: Bytes
    """Activations that leave at its end, the gradients of both its ends."""
    workspace: Bytes


@dataclass(frozen=True)
class StageMemory(Generic[Bytes]):
    """Bytes of a stage while it trains, by purpose."""

    weights: Bytes
    versions: Bytes
    gradients: Bytes
    optimizer: Bytes
    activations: Bytes
    transfer: Bytes
    workspace: Bytes

    @property
    def total(self) -> Bytes:
        """All of it together."""
        return (
            self.weights
            + self.versions
            + self.gradients
            + self.optimizer
            + self.activations
            + self.transfer
            + self.workspace
        )


def size(number: float) -> str:
    """Bytes in words, as precise as an estimate deserves."""
    if number < 1e6:
        return f"{number / 1e3:.0f} kB"
    return f"{number / 1e6:.0f} MB" if number < 1e9 else f"{number / 1e9:.1f} GB"


def older_versions(in_flight: int, update_frequency: int) -> int:
    """How many versions of the weights a stage keeps besides the newest."""
    return 0 if in_flight == 1 else -(-in_flight // update_frequency)


def stage_memory(load: StageLoad[Bytes], in_flight: int, training: Training) -> StageMemory[Bytes]:
    """Memory of a stage (or of a grid of stages) that has ``in_flight`` micro-batches in flight."""
    return StageMemory(
        weights=load.state,
        versions=load.trainable * older_versions(in_flight, training.update_frequency),
        gradients=load.trainable,
        optimizer=load.trainable * training.optimizer_factor,
        activations=(load.activations + load.incoming) * in_flight,
        transfer=load.transfer,
        workspace=load.workspace,
    )
