"""What happens to the schedule of a node, and what it wants done: plain values.

The machine (``machine.py``) turns events into actions. It knows micro-batches by number only; the
worker (``worker.py``) holds their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, order=True, slots=True)
class Batch:
    """A micro-batch: its phase and its place in the phase."""

    phase: int
    index: int


# Events


@dataclass(frozen=True, slots=True)
class PhaseBegun:
    """A phase starts: the Root's own call, or the word of the node before."""

    phase: int
    trains: bool


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """No further micro-batch belongs to the phase; it had ``count``."""

    phase: int
    count: int


@dataclass(frozen=True, slots=True)
class ForwardArrived:
    """A micro-batch is here: from the user at the Root, else from the node before."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class BackwardArrived:
    """Gradients of a micro-batch are here from the node behind."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class OutcomeArrived:
    """The Leaf has dealt with a micro-batch of a phase without gradients."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class ClipArrived:
    """The norm of all gradients of an update is known."""

    update: int


@dataclass(frozen=True, slots=True)
class WindowSet:
    """The Root may keep this many micro-batches under way."""

    size: int


@dataclass(frozen=True, slots=True)
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

# Actions: Run* occupy the compute thread until Done; the others take no time. They are to be
# carried out in the order given.


@dataclass(frozen=True, slots=True)
class RunForward:
    """Compute the stage's outputs with this version of the weights."""

    batch: Batch
    version: int
    trains: bool


@dataclass(frozen=True, slots=True)
class RunBackward:
    """Compute gradients, against the version that the forward used, and add them up."""

    batch: Batch
    version: int
    last_of_update: bool
    """As far as this stage knows, no further micro-batch belongs to the update.

    Always True for the one that is the last; also True for one that looked like the last because
    the next had not arrived. What rides on it (norms, gradients of shared weights) must therefore
    be right when sent once too often: norms are those of the sum so far, and shared gradients
    those gathered since they were last sent.
    """


@dataclass(frozen=True, slots=True)
class RunStep:
    """Apply the mean of ``count`` gradients; makes version ``update + 1``."""

    update: int
    count: int


@dataclass(frozen=True, slots=True)
class RunPhaseEnd:
    """The phase is over at this stage: step the scheduler, close iterators."""

    phase: int
    trains: bool


@dataclass(frozen=True, slots=True)
class SendForward:
    """Outputs to the next node."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class SendBackward:
    """Gradients of the inputs to the node before."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class SendOutcome:
    """The Leaf's outcome to the node before."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class SendBegin:
    """The start of a phase to the next node; in order with the forwards."""

    phase: int
    trains: bool


@dataclass(frozen=True, slots=True)
class SendEnd:
    """The end of a phase to the next node, after the last forward of it."""

    phase: int
    count: int


@dataclass(frozen=True, slots=True)
class GatherNorms:
    """Root: all gradients of an update are here. Find the norm of their mean over ``count``, from
    the norms that came with the last backward and the Root's own, and answer with ClipArrived.
    """

    update: int
    count: int


@dataclass(frozen=True, slots=True)
class SendClip:
    """The norm of all gradients of an update to the next node."""

    update: int


@dataclass(frozen=True, slots=True)
class Admit:
    """The Root takes micro-batches up to this many in all, of all phases since the start."""

    total: int


@dataclass(frozen=True, slots=True)
class FreeVersion:
    """Nothing under way uses this version of the weights any more."""

    version: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The Root has seen a micro-batch come back."""

    batch: Batch


@dataclass(frozen=True, slots=True)
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
    | SendBegin
    | SendEnd
    | GatherNorms
    | SendClip
    | Admit
    | FreeVersion
    | Finished
    | Fail
)

Run = RunForward | RunBackward | RunStep | RunPhaseEnd
