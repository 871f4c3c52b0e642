"""Memory that a stage needs while it trains.

A batch that can be split into micro-batches is trained without delay: at most one batch is in progress.
A ``share`` of a batch is in flight at most (1 unless memory is short), and a stage works on a ``part``
of it, one micro-batch, at a time. A batch that cannot be split is trained with a delay of one update:
all stages but the Leaf have two batches in flight, and share and part are 1.

A stage keeps the activations of all that is in flight, or of less: of the others it keeps only the
inputs, and recomputes their activations in the backward pass, which takes ``RECOMPUTATION`` of its time.
The Leaf runs backward right after forward and has nothing to recompute; if it may keep less, it computes
deferred weight gradients earlier. A stage with a single micro-batch in flight has nothing to recompute
either; if memory is short, it does not defer weight gradients.

A stage needs, all the time,

- its weights: every tensor that its units use, once;
- with a delay, one older version of its trained parameters and the activations of another batch (not
  the Leaf, which finishes each batch before it starts the next), unless they are recomputed;
- the inputs of what is recomputed;
- the optimizer state of its trained parameters, and their moving average if one is kept, except those
  that an earlier stage has too: that stage updates them;
- its outputs of each micro-batch in flight, and the gradients at both ends of two micro-batches, one
  that is computed and one that has arrived or is being sent;
- with several clusters, the copies for averaging (``averaging_copies``);
- what its links keep until the peer has acknowledged it, so that it can be sent again on another
  connection: of each link at most ``ACK_BYTES``, after which the peer acknowledges at once, and at most
  what is sent on it for the batches in flight or in a round.

The largest of these moments comes on top:

- Backward. The micro-batches in flight have the tensors that autograd saves and the inputs of the
  stage, or, once the gradients of their inputs are computed, what the deferred weight gradients need
  (the Root does not defer, nor does a stage whose memory is short). One of them runs backward, from
  the last unit to the first: at unit u it has the activations up to u, what is deferred behind u, and
  the workspace of u. The stage also has the gradients of all its parameters, to which micro-batches
  add theirs, the gradient that is being added, at most the largest (or all those of a recurrent layer,
  with copies of its weights), and gradients that later stages send for weights they share with it;
  those for earlier stages, and new weights for later ones, pass through it one by one. If a batch is an
  update, gradients appear one after the other instead.
- The update: gradients of all parameters and temporaries for the largest that the stage updates. No
  activations of the update are left then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ravnest.transport.acknowledgements import ACK_BYTES

RECOMPUTATION = 1 / 3
"""Time of a forward pass as a share of forward and backward: what recomputing all activations adds."""

PACKED_LEAST = 4096
"""Values of a tensor from which on optimizer state in 8 bits is packed."""
PACKED_BLOCK = 256
"""Values for which packed optimizer state has a scale."""

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
    """Share of a batch that is in flight at once."""
    part: float = 1.0
    """Share of a batch in one micro-batch, at most."""
    accumulates: bool = False
    """Several micro-batches add to the same gradients."""
    recompute: bool = True
    """Stages may recompute activations."""

    def in_flight(self, behind: int) -> float:
        """Return the batches in flight at a stage; ``behind`` counts the stages from it to the Leaf."""
        return self.share * (1 + (self.max_delay if behind > 1 else 0))


def averaging_copies(
    *,
    compressed: bool = False,
    with_optimizer: bool = False,
    optimizer_factor: float = 0.0,
    ema: bool = False,
) -> float:
    """Return the bytes that averaging keeps per byte of trainable parameters.

    These are the copy of the current round, and the previous average while it waits for an update.
    Compression also keeps the last average and the accumulated rounding errors. ``ema``: a moving
    average of the weights is averaged too; ``optimizer_factor`` counts it as optimizer state.
    """
    copies = 4 if compressed else 2
    return copies * (1 + (optimizer_factor if with_optimizer else float(ema)))


@dataclass(frozen=True)
class StageLoad(Generic[Bytes]):
    """Bytes that a run of units needs for one batch."""

    state: Bytes
    trainable: Bytes
    owned: Bytes
    """Trainable tensors that no earlier stage uses. Only they have optimizer state, older versions and
    copies for averaging; the others are replicas of tied weights."""
    largest: Bytes
    """Largest trainable tensor, or the temporaries of a unit that do not depend on the batch size."""
    largest_owned: Bytes
    """Largest trainable tensor whose first use is in the stage."""
    activations: Bytes
    deferred: Bytes
    """Tensors that deferred weight gradients keep; 0 at the Root, which does not defer."""
    incoming: Bytes
    """Inputs that the stage keeps besides its activations."""
    inputs: Bytes
    """All inputs."""
    leaving: Bytes
    """Activations that leave at the end and that autograd does not keep."""
    outputs: Bytes
    """All activations that leave."""
    returning: Bytes
    """Gradients at both ends."""
    sent_back: Bytes
    """Gradients that the stage sends to the one before it."""
    shared: Bytes
    """Gradients that later stages send for weights of this stage, once per update, and two of the
    weights that pass through it."""
    backward: Bytes
    """Peak of activations, deferred tensors and workspace during backward, minus the gradients of
    parameters that do not exist yet at that moment."""
    undeferred: Bytes
    """The same if no weight gradients are deferred."""


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
    unacknowledged: Bytes
    """Messages that links keep until the peer has acknowledged them."""

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
            + self.unacknowledged
        )


def size(number: float) -> str:
    """Format a number of bytes with two or three significant digits."""
    if number < 1e6:
        return f"{number / 1e3:.0f} kB"
    return f"{number / 1e6:.0f} MB" if number < 1e9 else f"{number / 1e9:.1f} GB"


@dataclass(frozen=True)
class MemoryRange(Generic[Bytes]):
    """Bytes of a stage that recomputes all activations, or defers nothing, and of one that keeps all."""

    least: Bytes
    most: Bytes


def stage_memory(
    load: StageLoad[Bytes],
    behind: int,
    training: MemorySettings,
    kept: float | None = None,
    *,
    defers: bool = True,
) -> StageMemory[Bytes]:
    """Return the memory of a stage, or of a grid of stages.

    ``behind`` is the number of stages from this one to the Leaf. ``kept`` is the number of batches, at
    least ``part`` of one, whose activations are kept at once; without it, all in flight. ``defers``:
    weight gradients may be deferred.
    """
    delay = training.max_delay if behind > 1 else 0
    share, part, total = training.share, training.part, training.in_flight(behind)
    kept = total if kept is None else min(kept, total)
    now = min(kept, share)
    deferred = load.deferred if defers else 0.0 * load.deferred
    running = load.backward if defers else load.undeferred
    each = np.maximum(load.activations + load.incoming, deferred)
    backward = (now - part) * each + part * np.maximum(running + load.incoming, deferred)
    if training.accumulates:
        backward = np.maximum(backward, now * each) + load.largest
    backward = backward + load.shared
    peak = load.trainable + np.maximum(backward, training.update_copies * load.largest_owned)
    recomputed = total - kept
    return StageMemory(
        weights=load.state,
        versions=load.owned * delay,
        gradients=peak - now * (load.activations + load.incoming),
        optimizer=load.owned * training.optimizer_factor,
        activations=kept * (load.activations + load.incoming) + recomputed * load.inputs,
        transfer=kept * load.leaving
        + (part * recomputed / (total - part) if recomputed else 0) * load.outputs
        + min(share, 2 * part) * (1 + delay) * load.returning,
        averaging=load.owned * training.averaging,
        unacknowledged=_kept_by_link(total * load.outputs)
        + _kept_by_link(total * load.sent_back)
        + _kept_by_link(load.owned * (training.averaging > 0)),
    )


def _kept_by_link(sent: Bytes) -> Bytes:
    """Return the bytes that a link keeps although they have arrived, if it sends ``sent``."""
    kept: Bytes = np.minimum(sent, ACK_BYTES)
    return kept


def memory_range(load: StageLoad[Bytes], behind: int, training: MemorySettings) -> MemoryRange[Bytes]:
    """Return the bytes with as little and with as much kept as possible; see ``stage_memory``."""
    most = stage_memory(load, behind, training).total
    if training.part >= training.in_flight(behind):
        least = stage_memory(load, behind, training, defers=False).total
        return MemoryRange(np.minimum(least, most), most)
    if not training.recompute:
        return MemoryRange(most, most)
    least = stage_memory(load, behind, training, training.part).total
    # What is recomputed needs its inputs: with small activations, that is more than to keep them.
    return MemoryRange(np.minimum(least, most), most)


def kept_batches(needs: MemoryRange[float], ram: float, behind: int, training: MemorySettings) -> float:
    """Return the batches whose activations a stage can keep within ``ram``; the stage fits.

    Memory is a convex function of this number, so that the line between the ends of the range is a safe
    estimate of it.
    """
    total = training.in_flight(behind)
    if needs.most <= ram:
        return total
    share = (ram - needs.least) / (needs.most - needs.least)
    return training.part + share * (total - training.part)


def slowdown(
    needs: MemoryRange[FloatArray], ram: float, behind: int, training: MemorySettings
) -> FloatArray:
    """Return the factor by which recomputation slows stages down; infinite for those that do not fit."""
    if needs.least is needs.most or behind == 1:
        return np.where(needs.least <= ram, 1.0, np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.clip((needs.most - ram) / (needs.most - needs.least), 0.0, 1.0)
    if training.max_delay or training.part >= training.in_flight(behind):
        # Of two whole batches in flight, each is recomputed, or none; weight gradients of a single one
        # are deferred, or none. The latter make the stage before wait by as much.
        share = np.ceil(share)
    factor = np.where(needs.most <= ram, 1.0, 1 + RECOMPUTATION * share)
    return np.where(needs.least <= ram, factor, np.inf)
