"""Messages between two nodes: typed heads and the tensors sent with them.

Heads are encoded as msgpack and decoded only into these types; see ``docs/protocol.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import torch

from ravnest.types import CheckpointId, MicrobatchId

PROTOCOL = 11
"""Version of the protocol; nodes with different versions refuse each other."""

PhaseKind = Literal["train", "validate", "predict"]
Call = Literal["train", "evaluate", "pred"]


class Head(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base class of all heads; the msgpack tag is the class name."""


class Hello(Head, frozen=True):
    """First message of a link in both directions: the node and its plan."""

    protocol: int
    plan: str
    node: int
    cluster: int
    stage: int
    run: str = ""
    """Id of the run, chosen by the Root; empty if not known yet."""
    settings: dict[str, str] = {}
    """Settings that must be the same on all nodes of a cluster."""
    codec: str = "raw"
    """Codec that this node prefers for activations, gradients and averages; used if the peer has the
    same, otherwise tensors are sent uncompressed."""
    addresses: tuple[str, ...] = ()
    """Addresses at which the peer can dial this node if the connection is lost."""
    session: str = ""
    """Id of the link, chosen by the side that opens it; the same for all its connections."""
    continues: bool = False
    """The link exists; this is another connection."""
    relayed: bool = False
    """The connection passes a relay."""
    generation: int = 0
    """Number of machines that held this node before (``NodeSpec.generation``)."""
    incarnation: str = ""
    """Random id of the sender's start, the same on all its links; another one after a restart."""
    nonce: str = ""
    """Random text of the side that dials, for a connection that a secret protects."""
    proof: str = ""
    """Proof of the side that answers that it knows the secret."""


class HelloChallenge(Head, frozen=True):
    """Answer to a Hello on a connection that a secret protects; the sender has to prove the secret."""

    nonce: str


class HelloProof(Head, frozen=True):
    """Proof of the side that dials that it knows the secret."""

    proof: str


class HelloRefused(Head, frozen=True):
    """Answer to a Hello that is not accepted; the link closes."""

    reason: str


class StageTiming(msgspec.Struct, frozen=True, array_like=True):
    """Cost of one micro-batch at one stage, in seconds."""

    forward: float
    backward: float
    """Until the gradients for the previous stage were computed."""
    weights: float
    """Weight gradients that were computed later; 0 if none were deferred."""
    step: float
    to_next: float
    """Delay of the link to the next stage, without queueing; 0 at the last stage."""
    to_next_busy: float
    """Time during which one micro-batch occupies that link."""
    to_previous: float
    """Delay of the link to the previous stage, without queueing; 0 at the first stage."""
    to_previous_busy: float


class Forward(Head, frozen=True):
    """Outputs of a stage for a micro-batch, for the next stage."""

    run: str
    microbatch: MicrobatchId
    batch_size: int
    """Samples in the user's batch that it is a part of."""
    part: int = 0
    """Position of the micro-batch in the batch."""
    parts: int = 1
    """Micro-batches in the batch; their sizes follow from the batch's (``part_sizes``)."""
    ends_update: bool = True
    """The micro-batch is the last of an update."""
    digests: dict[str, str] = {}
    """Digests of the batch as the Root loaded it (``targets``, ``inputs``), with its first part."""
    checkpoint: bool = False
    """A checkpoint is taken after the update that the micro-batch ends."""


class Backward(Head, frozen=True):
    """Gradients of a micro-batch, for the previous stage."""

    run: str
    microbatch: MicrobatchId
    timings: tuple[StageTiming, ...] = ()
    """Timings of the sender and the following stages, the Leaf's last."""
    loss: float | None = None
    """Loss of the micro-batch times its weight in the loss of the batch."""


class SharedGradients(Head, frozen=True):
    """Gradients of weights that several stages use, of one update, on the way to their owners.

    The weights' keys are the names of the tensors.
    """

    run: str
    update: int


class SharedWeights(Head, frozen=True):
    """New values of weights that several stages use, on the way to the stages behind their owners.

    The weights' keys are the names of the tensors.
    """

    run: str
    microbatch: MicrobatchId
    """First micro-batch that uses them; it arrives later."""


class GradientNorms(Head, frozen=True):
    """Gradient norms of a stage and all later ones, for a clip over the whole model."""

    run: str
    update: int
    norms: tuple[tuple[int, float], ...]
    """Position of each parameter in the model and the norm of its gradient, summed over the update."""


class LossSplit(Head, frozen=True):
    """The Leaf's answer to whether a batch can be split without a change of its loss."""

    allowed: bool
    reason: str
    """How the parts are weighted, or why the batch cannot be split."""
    smallest: int = 1
    """Samples that a part must have."""


class ClipNorm(Head, frozen=True):
    """Norm of all gradients of an update, computed by the Root."""

    update: int
    total: float


class PhaseBegin(Head, frozen=True):
    """Start of a phase."""

    run: str
    phase: int
    kind: PhaseKind
    epoch: int
    late: bool = False
    """From this phase on gradients may be one update late, whatever the plan's schedule."""
    first: int = 0
    """Index of the first micro-batch; those before it are part of a checkpoint."""
    batches: int = 0
    """Batches that those micro-batches are parts of."""
    samples: int = 0
    """Samples of those batches."""


class PhaseEnd(Head, frozen=True):
    """End of a phase after ``count`` micro-batches."""

    run: str
    phase: int
    count: int
    exhausted: bool
    """True if the Root's loader reached its end."""
    checkpoint: bool = False
    """A checkpoint is taken after the phase."""


class ForwardResult(Head, frozen=True):
    """Result of the Leaf for a micro-batch without gradients; a prediction is sent as tensors."""

    run: str
    microbatch: MicrobatchId
    value: float | None = None
    """Accuracy or loss of the micro-batch in a validation."""
    structure: str = ""
    """Structure of the model's output that the tensors of a prediction form, as JSON."""


class ValidationResult(Head, frozen=True):
    """Result of a validation: from the Leaf to the Root, and from the Root to all nodes."""

    run: str
    phase: int
    name: str
    """Label of the first metric."""
    value: float
    samples: int
    metrics: dict[str, float] = {}
    """Values of all chosen metrics by label; empty without any."""


class SaveStage(Head, frozen=True):
    """Request to write the trained stage and send it to the Root."""

    run: str
    best: bool = False
    """It is the best model so far, which only the Root writes."""


class StageSaved(Head, frozen=True):
    """Trained stage for the Root, with its manifest as JSON."""

    run: str
    node: int
    manifest: str
    best: bool = False
    """It is a stage of the best model so far."""


class TakeCheckpoint(Head, frozen=True):
    """End of training: request for a checkpoint when all phases so far are over."""

    run: str
    phases: int
    """Number of phases that are over then; the end of training counts as one."""


class CallEnd(Head, frozen=True):
    """End of a call of the user on all nodes."""

    run: str
    call: Call
    number: int
    """Position of the call among all calls of the script, from 1."""


class RunEnd(Head, frozen=True):
    """End of the run; calls that wait on other nodes return."""

    run: str


class RoundId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Identifier of an averaging round; ``attempt`` counts its repetitions, from 0."""

    number: int
    attempt: int = 0


class RoundRequest(Head, frozen=True):
    """Request of a cluster's Root for a round, or its statement that it is ready for one."""

    cluster: int
    updates: int
    """Total number of updates so far."""
    samples: int
    """Samples trained on since the last round in which the cluster took part."""
    interval: float
    """Seconds between the cluster's rounds at its current training rate; 0 if unknown."""
    final: bool
    """True if the cluster has finished training and waits."""
    kept: bool = False
    """With ``final``: the cluster has the average of the final round, in a checkpoint."""
    call: int = 0
    """Number of the script's call that the cluster trains in, from 1; 0 if unknown."""


class Prepare(Head, frozen=True):
    """Request to copy the newest parameters: from the coordinator to Roots, then along the pipeline."""

    round: RoundId
    assign: bool
    """True if training pauses and the average replaces the parameters (blocking and final rounds)."""


class Prepared(Head, frozen=True):
    """Statement that a node has its copy; the Root combines those of its cluster."""

    round: RoundId
    cluster: int
    node: int
    samples: int
    """Samples of the cluster since the last round in which it took part; set by the Root."""
    problem: str = ""
    """Reason why the copy must not be averaged; empty if there is none."""
    codec: str = "raw"
    """Codec that the sender prefers for averages."""
    base: RoundId | None = None
    """Last average that the sender applied and kept; compressed rounds send the change since then."""
    scales: dict[int, float] = {}
    """Root mean square of the copy, by ring."""
    behind: bool = False
    """The cluster went back to a checkpoint before the last average; set by the Root."""


class Start(Head, frozen=True):
    """Start of the exchange on all rings."""

    round: RoundId
    weights: dict[int, float]
    """Weight of each participating cluster; the sum is 1. A cluster with weight 0 only receives."""
    codec: str = "raw"
    base: RoundId | None = None
    """With a codec other than raw: the change since this round's average is exchanged."""
    scales: dict[int, float] = {}
    """Scale of most clusters' copies, by ring; the average must not be far larger."""


class RingChunk(Head, frozen=True):
    """Piece of a ring's tensors that is passed around the ring."""

    round: RoundId
    ring: int
    segment: int
    piece: int
    hop: int
    """Number of members passed: while below the ring size the piece is summed, then it is final."""


class Reduced(Head, frozen=True):
    """Statement that a node has finished the exchange; the Root combines those of its cluster."""

    round: RoundId
    cluster: int
    node: int
    digests: dict[int, str]
    """Digests of the average, by ring."""
    sent_bytes: int
    problem: str = ""
    """Reason why there is no average; empty if there is one."""
    missing: int | None = None
    """Cluster whose node did not answer, if that is the problem."""
    wrong: bool = False
    """There is an average, and it fails the check."""


class Decision(Head, frozen=True):
    """Decision of the coordinator on a round: apply the average or drop it."""

    round: RoundId
    commit: bool
    reason: str = ""
    assign: bool = False
    """Same as in Prepare, so that a paused cluster continues even if it never received Prepare."""


class RateProbe(Head, frozen=True):
    """Data without a meaning, sent to measure the link between two providers before a job starts."""

    wanted: int = 0
    """Bytes that the receiver sends back, as one transfer."""
    is_last: bool = False
    """The message is the last of a transfer."""


class Goodbye(Head, frozen=True):
    """Announcement that the sender closes normally."""

    node: int


class Abort(Head, frozen=True):
    """End of the run because of a failure; passed along the pipeline in both directions."""

    node: int
    reason: str
    recoverable: bool = False
    """A node was lost: the others go back to a checkpoint and wait for it."""


class HeldCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint of a stage that a node can read."""

    run: str
    checkpoint: CheckpointId
    holder: int
    """Stage of the node that has it: the stage's own node, or the one with its replica."""
    attempt: str = ""
    """Attempt of the run in which it was taken."""


class ResumeOffer(Head, frozen=True):
    """State that this and all later nodes can continue from; sent towards the Root at the start."""

    held: dict[int, tuple[HeldCheckpoint, ...]]
    """Checkpoints by the stage that they belong to."""
    wanted: str = ""
    """Run that a node of these wants to continue; empty: a new one."""
    any_run: bool = False
    """A node wants to continue the newest run, whichever it is."""
    lost: str = ""
    """Reason for which a node left that run."""
    made: int = 0
    """Updates that nodes of these had made in that run; the most of them."""


class ResumeFrom(Head, frozen=True):
    """Decision of the Root: where training continues; sent to all nodes at the start."""

    run: str
    checkpoint: CheckpointId
    sources: dict[int, int]
    """Stages whose own node lacks the checkpoint, and the stage of the node that sends it."""
    calls: int = 0
    """Calls of the script that have ended."""
    taken: str = ""
    """Attempt of the run in which the checkpoint was taken."""
    attempt: str = ""
    """Name of the attempt that begins, for the checkpoints that are taken in it."""
    alone: tuple[int, ...] = ()
    """Stages of whose checkpoint there is no replica; their nodes send one again."""


class StateLoaded(Head, frozen=True):
    """Statement that this and all later nodes have loaded their state; sent towards the Root."""


class StateBlock(Head, frozen=True):
    """Part of a file of a checkpoint; its bytes are the tensor ``bytes``.

    The manifest comes with the first block, as JSON.
    """

    stage: int
    checkpoint: CheckpointId
    offset: int
    manifest: str = ""
    base: CheckpointId | None = None
    """Replica that the receiver copies ``same`` bytes from, instead of receiving them."""
    same: int = 0
    is_last: bool = False
    restore: bool = False
    """True if the receiver continues from it; False for a replica."""


class ReplicaStored(Head, frozen=True):
    """Statement that a replica is complete, or the reason why it is not."""

    stage: int
    checkpoint: CheckpointId
    problem: str = ""


class CheckpointStored(Head, frozen=True):
    """Statement whether this and all later nodes have stored a checkpoint; sent towards the Root."""

    checkpoint: CheckpointId
    stored: bool
    seconds: float = 0.0
    """Longest time that it took a node from training."""


class CheckpointComplete(Head, frozen=True):
    """Statement of the Root that all nodes have stored a checkpoint: each keeps it until the next."""

    checkpoint: CheckpointId


class CheckpointWanted(Head, frozen=True):
    """Request to the Root for a checkpoint after the next update: a node is about to leave."""

    node: int


class ForwardChallenge(Head, frozen=True):
    """Request to state how an output was computed that has arrived; for a check by the server."""

    run: str
    microbatch: MicrobatchId
    check: str
    """Random name of the check."""


AnyHead = (
    Hello
    | HelloChallenge
    | HelloProof
    | HelloRefused
    | Forward
    | Backward
    | SharedGradients
    | SharedWeights
    | GradientNorms
    | ClipNorm
    | LossSplit
    | PhaseBegin
    | PhaseEnd
    | ForwardResult
    | ValidationResult
    | SaveStage
    | StageSaved
    | TakeCheckpoint
    | CallEnd
    | RunEnd
    | RoundRequest
    | Prepare
    | Prepared
    | Start
    | RingChunk
    | Reduced
    | Decision
    | RateProbe
    | Goodbye
    | Abort
    | ResumeOffer
    | ResumeFrom
    | StateLoaded
    | StateBlock
    | ReplicaStored
    | CheckpointStored
    | CheckpointComplete
    | CheckpointWanted
    | ForwardChallenge
)

LOSSY = (Forward, Backward, SharedGradients, RingChunk)
"""Heads of the messages whose tensors may be compressed; those of others are results."""

Value = torch.Tensor | int | float


@dataclass(frozen=True)
class Message:
    """Head and named values."""

    head: AnyHead
    values: Mapping[str, Value] = field(default_factory=dict)
    exact: frozenset[str] = frozenset()
    """Names of tensors that must not be compressed; known to the sender only."""
