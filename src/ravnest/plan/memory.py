"""How much memory a stage needs while it trains: the formula, in one place.

Stage k of K has ``n = K - k`` micro-batches in flight: the Root K, the Leaf one. It keeps

- its weights: every tensor that its units use, once;
- older versions of what it trains, ``ceil(n / update_frequency)`` of them, because each micro-batch
  runs backward on the weights it ran forward on. None where n is 1: such a stage finishes each
  micro-batch before it updates, so nothing older is in use;
- the optimizer's state for what it trains;
- for each micro-batch in flight, what autograd keeps and the inputs that came in;
- buffers for one micro-batch on its way: activations out, gradients in and out;
- where there are several clusters, what their averages take (``averaging_copies``);
- what the worst moment adds. Backward goes from the last unit to the first, frees activations and
  makes gradients: while it is at unit u there are the activations up to u, the gradients of the
  parameters behind u (those of all, where several micro-batches make an update and add to them), and
  the workspace of u. After it come the update's temporaries, beside all gradients, when no
  activation of that micro-batch is left.
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
class MemorySettings:
    """What the memory depends on besides the model and the cut."""

    update_frequency: int
    """Micro-batches an update."""
    optimizer_factor: float
    """Bytes of optimizer state for each byte of a trainable parameter."""
    update_copies: float = 0.0
    """Temporaries of the update, in sizes of the largest parameter."""
    averaging: float = 0.0
    """Bytes that averaging keeps for each byte of a trainable parameter."""


def averaging_copies(
    *, compressed: bool = False, with_optimizer: bool = False, optimizer_factor: float = 0.0
) -> float:
    """Bytes that averaging keeps for each byte of a trainable parameter.

    The copy that is in a round, and the average before it while that waits for an update. Compressed,
    the last average and the errors that are to be made up for come on top.
    """
    copies = 4 if compressed else 2
    return copies * (1 + optimizer_factor) if with_optimizer else copies


@dataclass(frozen=True)
class StageLoad(Generic[Bytes]):
    """What a run of units brings with it, in bytes, for one micro-batch."""

    state: Bytes
    trainable: Bytes
    largest: Bytes
    """Its largest trainable tensor."""
    activations: Bytes
    incoming: Bytes
    """What it keeps of what enters at its start, besides its activations."""
    transfer: Bytes
    """Activations that leave at its end, the gradients of both its ends."""
    backward: Bytes
    """The most that activations and workspace take during backward, less the gradients of
    parameters that are not made yet at that moment."""


@dataclass(frozen=True)
class StageMemory(Generic[Bytes]):
    """Bytes of a stage while it trains, by purpose."""

    weights: Bytes
    versions: Bytes
    gradients: Bytes
    """Gradients and temporaries: what the worst moment adds to all the rest."""
    optimizer: Bytes
    activations: Bytes
    transfer: Bytes
    averaging: Bytes
    """Copies that rounds with other clusters take."""

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
            + self.averaging
        )


def size(number: float) -> str:
    """Bytes in words, as precise as an estimate deserves."""
    if number < 1e6:
        return f"{number / 1e3:.0f} kB"
    return f"{number / 1e6:.0f} MB" if number < 1e9 else f"{number / 1e9:.1f} GB"


def older_versions(in_flight: int, update_frequency: int) -> int:
    """How many versions of the weights a stage keeps besides the newest."""
    return 0 if in_flight == 1 else -(-in_flight // update_frequency)


def stage_memory(load: StageLoad[Bytes], in_flight: int, training: MemorySettings) -> StageMemory[Bytes]:
    """Memory of a stage (or of a grid of stages) that has ``in_flight`` micro-batches in flight."""
    worst = load.trainable + np.maximum(load.backward, training.update_copies * load.largest)
    return StageMemory(
        weights=load.state,
        versions=load.trainable * older_versions(in_flight, training.update_frequency),
        gradients=worst - load.activations,
        optimizer=load.trainable * training.optimizer_factor,
        activations=(load.activations + load.incoming) * in_flight,
        transfer=load.transfer,
        averaging=load.trainable * training.averaging,
    )
