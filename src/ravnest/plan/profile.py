"""What a model costs, as plain numbers: all that the planner knows about it.

A **unit** is the run of operations between two neighbouring legal cuts, the smallest piece that a
stage can hold. Stage ``[start, stop)`` holds the units ``start`` to ``stop - 1``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """Cost of one unit for one micro-batch."""

    work: float
    """Floating-point operations of forward and backward; memory traffic in equivalents."""
    activation_bytes: int
    """What autograd keeps for backward."""
    workspace_bytes: int
    """What the worst moment of its backward has in memory besides what autograd keeps up to here:
    gradients of its own parameters and of activations, temporaries."""
    crossing_bytes: int
    """What crosses the cut behind this unit going forward; 0 behind the last unit."""
    gradient_bytes: int
    """What crosses that cut going backward."""
    held_bytes: int = 0
    """Of ``crossing_bytes``, what a stage behind the cut keeps besides its own activations."""


@dataclass(frozen=True)
class TensorProfile:
    """A parameter or buffer, and the units that use it."""

    name: str
    bytes: int
    trainable: bool
    averaged: bool
    """Takes part in averaging: floating-point parameters and persistent floating-point buffers."""
    units: tuple[int, ...]
    """Ascending. A stage that holds any of them holds the tensor; the owner is the first."""


@dataclass(frozen=True)
class ModelProfile:
    """Cost of a whole model at one batch size."""

    units: tuple[Unit, ...]
    state: tuple[TensorProfile, ...]
    batch_size: int
    input_bytes: int
    """Of the model's inputs, what the Root keeps besides its own activations."""
    output_bytes: int = 0
    """Of the model's outputs, what the Leaf keeps besides its own activations."""
    optimizer_bytes_per_parameter_byte: float = 2.0
    """AdamW keeps two values for each parameter; plain SGD none."""
    update_copies: float = 0.0
    """Temporaries of the update, in sizes of the largest parameter."""
