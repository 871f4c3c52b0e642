"""Events and actions of the schedule, as plain values.

``ScheduleMachine`` (``machine.py``) maps events to actions. It knows micro-batches only by their ids;
the stage (``stage/pipeline_stage.py``) holds their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.types import MicrobatchId

# Events


@dataclass(frozen=True, slots=True)
class PhaseBegun:
    """A phase starts: called by the user at the Root, announced by the previous node elsewhere."""

    phase: int
    trains: bool
    first: int = 0
    """Index of the first micro-batch that arrives; those before it are part of a checkpoint."""


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """All micro-batches of the phase have arrived; there were ``count``."""

    phase: int
    count: int


@dataclass(frozen=True, slots=True)
class ForwardArrived:
    """A micro-batch has arrived: from the user at the Root, from the previous node elsewhere."""

    microbatch: MicrobatchId
    ends_batch: bool = True
    """True for the last micro-batch of one of the user's batches."""
    ends_update: bool = True
    """True for the last micro-batch of an update; the end of a phase ends an update too."""


@dataclass(frozen=True, slots=True)
class BackwardArrived:
    """Gradients of a micro-batch have arrived from the next node."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class ResultArrived:
    """The Leaf's result for a micro-batch of a phase without gradients has arrived."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class SharedArrived:
    """All gradients that later stages have of weights held here have arrived for an update."""

    update: int


@dataclass(frozen=True, slots=True)
class NormsArrived:
    """The gradient norms of all later stages have arrived for an update."""

    update: int


@dataclass(frozen=True, slots=True)
class ClipNormArrived:
    """The norm of all gradients of an update is known."""

    update: int


@dataclass(frozen=True, slots=True)
class WindowSet:
    """The Root may keep ``size`` micro-batches in flight from now on."""

    size: int


@dataclass(frozen=True, slots=True)
class Done:
    """The computation requested last has finished."""


@dataclass(frozen=True, slots=True)
class WeightsInterrupted:
    """The weight gradients requested last were left in part, because something has arrived."""


Event = (
    PhaseBegun
    | PhaseEnded
    | ForwardArrived
    | BackwardArrived
    | ResultArrived
    | SharedArrived
    | NormsArrived
    | ClipNormArrived
    | WindowSet
    | Done
    | WeightsInterrupted
)

# Actions. The Run* actions occupy the compute thread until Done or WeightsInterrupted; the others take
# no time. The worker carries them out in the order given.


@dataclass(frozen=True, slots=True)
class RunForward:
    """Compute the stage's outputs with this version of the weights."""

    microbatch: MicrobatchId
    version: int
    trains: bool
    update: int
    """Update that the micro-batch is part of; without training, the next one."""
    defers_costly: bool = False
    """Weight gradients whose deferral takes additional time are deferred too."""


@dataclass(frozen=True, slots=True)
class RunBackward:
    """Compute gradients with the version that the forward used, and accumulate them.

    If the stage defers weight gradients, only those that the previous node waits for are due now;
    ``RunWeights`` computes the others.
    """

    microbatch: MicrobatchId
    version: int


@dataclass(frozen=True, slots=True)
class RunWeights:
    """Compute the deferred weight gradients of a micro-batch, or those that are left of them."""

    microbatch: MicrobatchId
    version: int


@dataclass(frozen=True, slots=True)
class RunStep:
    """Apply the mean gradient of the user's ``batches``; creates version ``update + 1``."""

    update: int
    batches: int


@dataclass(frozen=True, slots=True)
class RunPhaseEnd:
    """Finish the phase at this stage: step the scheduler, close iterators."""

    phase: int
    trains: bool


@dataclass(frozen=True, slots=True)
class SendForward:
    """Send outputs to the next node."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class SendBackward:
    """Send gradients of the inputs to the previous node."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class SendResult:
    """Send the Leaf's result to the previous node."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class SendPhaseBegin:
    """Announce the start of a phase to the next node, in order with the forwards."""

    phase: int
    trains: bool


@dataclass(frozen=True, slots=True)
class SendPhaseEnd:
    """Announce the end of a phase to the next node, after its last forward."""

    phase: int
    count: int


@dataclass(frozen=True, slots=True)
class CompleteGradients:
    """Add the shared gradients of later stages to the computed ones; the update then has them all."""

    update: int


@dataclass(frozen=True, slots=True)
class SendShared:
    """Send the gradients of weights that an earlier stage owns to the previous node, for an update."""

    update: int


@dataclass(frozen=True, slots=True)
class SendNorms:
    """Send the gradient norms of this and all later stages to the previous node, for an update."""

    update: int


@dataclass(frozen=True, slots=True)
class CombineNorms:
    """Compute the norm of the whole model's mean gradient over ``batches`` batches (Root only).

    ClipNormArrived is the answer.
    """

    update: int
    batches: int


@dataclass(frozen=True, slots=True)
class SendClipNorm:
    """Send the norm of all gradients of an update to the next node."""

    update: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Accept micro-batches from the user until ``total`` were submitted since the start (Root only)."""

    total: int


@dataclass(frozen=True, slots=True)
class FreeVersion:
    """Free a version of the weights; no micro-batch in flight uses it."""

    version: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A micro-batch has returned to the Root."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class Fail:
    """End the run with this reason: the event violates the protocol."""

    reason: str


Action = (
    RunForward
    | RunBackward
    | RunWeights
    | RunStep
    | RunPhaseEnd
    | SendForward
    | SendBackward
    | SendResult
    | SendPhaseBegin
    | SendPhaseEnd
    | CompleteGradients
    | SendShared
    | SendNorms
    | CombineNorms
    | SendClipNorm
    | Admit
    | FreeVersion
    | Finished
    | Fail
)

Run = RunForward | RunBackward | RunWeights | RunStep | RunPhaseEnd
