"""Costs of a model as plain numbers, the planner's only input about the model.

A **unit** is the run of operations between two neighbouring legal cuts, the smallest piece that a
stage can hold. Stage ``[start, stop)`` holds the units ``start`` to ``stop - 1``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UnitCost:
    """Cost of one unit for one batch."""

    work: float
    """Floating-point operations of forward and backward; memory traffic is converted to operations."""
    activation_bytes: int
    """Tensors that autograd saves for backward."""
    workspace_bytes: int
    """Peak of its backward pass, beyond what autograd saves up to this unit: gradients of its
    parameters and activations, temporaries."""
    crossing_bytes: int
    """Bytes that cross the cut behind this unit in forward; 0 behind the last unit."""
    gradient_bytes: int
    """Bytes that cross the same cut in backward."""
    held_bytes: int = 0
    """Part of ``crossing_bytes`` that the stage behind the cut keeps besides its own activations."""
    sent_bytes: int = 0
    """Part of ``crossing_bytes`` that the stage in front of the cut keeps besides its activations."""
    passing_bytes: int = 0
    """``workspace_bytes`` without the gradients of parameters."""
    deferred_bytes: int = 0
    """Tensors that deferred weight gradients keep: the inputs and the gradients of the outputs of the
    operations that have such weights."""
    fixed_bytes: int = 0
    """Temporaries of its backward pass that do not depend on the batch size, new gradients of parameters
    included, if they are more than the largest parameter."""


@dataclass(frozen=True)
class TensorProfile:
    """A parameter or buffer, and the units that use it."""

    name: str
    bytes: int
    trainable: bool
    averaged: bool
    """True for tensors that clusters average: floating-point parameters and persistent buffers."""
    units: tuple[int, ...]
    """Units that use it, ascending. A stage with any of them holds it; the first such stage owns it."""


@dataclass(frozen=True)
class ChunkableHead:
    """Last linear layer of a model, which can run in chunks of positions together with the loss.

    The costs of its unit are those that remain then, without the logits.
    """

    unit: int
    positions: int
    logits_bytes: int
    gradient_bytes: int
    """Gradient of the layer's input, which the Leaf keeps from forward to backward."""
    parameter_bytes: int
    """Gradients of the layer's weights, which exist from the first chunk on."""
    activation_bytes: int
    workspace_bytes: int
    passing_bytes: int
    deferred_bytes: int


@dataclass(frozen=True)
class RowCut:
    """A tensor of the model that is cut into blocks of its rows."""

    name: str
    bytes: int
    blocks: int


@dataclass(frozen=True)
class ModelProfile:
    """Cost of a whole model at one batch size."""

    units: tuple[UnitCost, ...]
    state: tuple[TensorProfile, ...]
    batch_size: int
    input_bytes: int
    """Bytes of the model's inputs that the Root keeps besides its own activations."""
    example_bytes: int = 0
    """Bytes of all inputs of the model."""
    loss_bytes: int = 0
    """Peak of the loss, besides the activations of the model: outputs, their gradients, and tensors of
    the same size that the loss keeps."""
    chunkable: ChunkableHead | None = None
    """Last layer, if it can run in chunks of positions together with the loss."""
    optimizer_bytes_per_parameter_byte: float = 2.0
    """Optimizer state per byte of parameter: 2 for AdamW, 0 for plain SGD; 1 more for a moving average
    of the weights."""
    update_copies: float = 0.0
    """Temporaries of the update, as a multiple of the largest parameter."""
    smallest_rows: int | None = None
    """Samples that a micro-batch must have; None if a batch cannot be split."""
    unsplit_reason: str = "it is not known whether the model treats samples independently"
    """Why a batch cannot be split; empty if it can."""
    late_reason: str = ""
    """Why gradients must not be late, so that the schedule is ``sync``; empty if they may."""
    row_cuts: tuple[RowCut, ...] = ()
    """Tensors that are cut along their rows."""
    whole_reason: str = ""
    """Why no tensor may be cut along its rows; empty if it may."""
