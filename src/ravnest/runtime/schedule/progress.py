"""Properties of a stage, and its progress in phases and updates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageTraits:
    """Properties of a stage and its settings that the schedule depends on."""

    defers: bool = False
    """Weight gradients are computed apart from those of the inputs."""
    may_defer_costly: bool = False
    """Layers of the stage can defer weight gradients in a form that takes additional time."""
    expects_shared: bool = False
    """Later stages use weights that this stage holds, and send their gradients."""
    sends_shared: bool = False
    """This stage uses weights that an earlier stage owns."""
    clip: bool = False
    """An update waits for the norm of the gradients of all stages."""
    activation_limit: int | None = None
    """Micro-batches for which the stage may keep activations at once; ``None``: no limit."""
    delayed_limit: int = 2
    """This limit, and the Root's window, once gradients may be late contrary to the plan."""


NO_TRAITS = StageTraits()


@dataclass(slots=True)
class PhaseProgress:
    """Progress of this stage in a phase."""

    number: int
    trains: bool
    arrived: int = 0
    forwarded: int = 0
    finished: int = 0
    """Finished micro-batches.

    In training: those whose gradients are part of an update that is done. Otherwise: forwards done, at
    the Root results received.
    """
    count: int | None = None
    """Micro-batches in the phase; None until the phase has ended."""
    begin_sent: bool = False
    end_sent: bool = False


@dataclass(slots=True)
class UpdateProgress:
    """Micro-batches that have arrived for an update, and its progress at this stage."""

    phase: PhaseProgress
    microbatches: int = 0
    batches: int = 0
    """Batches of the user that are complete."""
    ended: bool = False
    """True if no further micro-batch belongs to it."""
    gradients: int = 0
    """Micro-batches whose gradients are all computed here."""
    shared: bool = False
    """True if the shared gradients of later stages have arrived."""
    norms: bool = False
    """True if the norms of later stages have arrived."""
    sent: bool = False
    """True if shared gradients and norms were sent to the previous node."""
    clip: bool = False
    """True if the norm of all gradients is known."""

    @property
    def computed(self) -> bool:
        """True if all gradients of this stage are computed."""
        return self.ended and self.gradients == self.microbatches
