"""What happens to the schedule of a node, and what it wants done: plain values.

The machine (``machine.py``) turns events into actions. It knows micro-batches by number only; the
worker (``worker.py``) holds their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, order=True)
class Batch:
    """A micro-batch: its phase and its place in the phase."""

    phase: int
    index: int


# Events


@dataclass(frozen=True)
class PhaseBegun:
    """A phase starts: the Root's own call, or the word of the node before."""

    phase: int
    trains: bool


@dataclass(frozen=True)
class PhaseEnded:
    """No further micro-batch belongs to the phase; it had ``count``."""

    phase: int
    count: int


@dataclass(frozen=True)
class ForwardArrived:
    """A micro-batch is here: from the user at the Root, else from the node before."""

    batch: Batch


@dataclass(frozen=True)
class BackwardArrived:
    """Gradients of a micro-batch are here from the node behind."""

    batch: Batch


@dataclass(frozen=True)
class OutcomeArrived:
    """The Leaf has dealt with a micro-batch of a phase without gradients."""

    batch: Batch


@dataclass(frozen=True)
class ClipArrived:
    """The norm of all gradients of an update is known."""

    update: int


@dataclass(frozen=True)
class WindowSet:
    """The Root may keep this many micro-batches under way."""

    size: int


@dataclass(frozen=True)
class Done:
    """The computation that was asked for last is finished."""


Event = (
    PhaseBegun
    | PhaseEnded
    | ForwardArrived
    | BackwardArrived
    | OutcomeArrived
    | ClipArrived
    | WindowSet
    | Done
)

# Actions: Run* occupy the compute thread until Done; the others take no time.


@dataclass(frozen=True)
class RunForward:
    """Compute the stage's outputs with this version of the weights."""

    batch: Batch
    version: int
    trains: bool


@dataclass(frozen=True)
class RunBackward:
    """Compute gradients, against the version that the forward used, and add them up."""

    batch: Batch
    version: int
    last_of_update: bool
    """An update follows as soon as this is done (and the clip is known)."""


@dataclass(frozen=True)
class RunStep:
    """Apply the mean of ``count`` gradients; makes version ``update + 1``."""

    update: int
    count: int


@dataclass(frozen=True)
class RunPhaseEnd:
    """The phase is over at this stage: step the scheduler, close iterators."""

    phase: int
    trains: bool


@dataclass(frozen=True)
class SendForward:
    """Outputs to the next node."""

    batch: Batch


@dataclass(frozen=True)
class SendBackward:
    """Gradients of the inputs to the node before."""

    batch: Batch


@dataclass(frozen=True)
class SendOutcome:
    """The Leaf's outcome to the node before."""

    batch: Batch


@dataclass(frozen=True)
class Admit:
    """The Root takes micro-batches up to this many in all, counted since the start."""

    total: int


@dataclass(frozen=True)
class FreeVersion:
    """Nothing under way uses this version of the weights any more."""

    version: int


@dataclass(frozen=True)
class Finished:
    """The Root has seen a micro-batch come back."""

    batch: Batch


@dataclass(frozen=True)
class Fail:
    """The event breaks the protocol; the run must end with this reason."""

    reason: str


Action = (
    RunForward
    | RunBackward
    | RunStep
    | RunPhaseEnd
    | SendForward
    | SendBackward
    | SendOutcome
    | Admit
    | FreeVersion
    | Finished
    | Fail
)
