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
    """The largest transient allocation of forward or backward."""
    crossing_bytes: int
    """What crosses the cut behind this unit going forward; 0 behind the last unit."""
    gradient_bytes: int
    """What crosses that cut going backward."""


@dataclass(frozen=True)
class StateTensor:
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
    state: tuple[StateTensor, ...]
    batch_size: int
    input_bytes: int
    optimizer_bytes_per_parameter_byte: float = 2.0
    """AdamW keeps two values for each parameter; plain SGD none."""
