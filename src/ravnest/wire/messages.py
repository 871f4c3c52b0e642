"""The messages between two nodes: typed heads, and tensors that travel with them.

Heads are msgpack, decoded into these types and nothing else; see ``docs/protocol.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import torch

from ravnest.types import MicrobatchId

PROTOCOL = 1
"""Nodes of different protocols refuse each other."""

PhaseKind = Literal["train", "validate", "predict"]
Call = Literal["train", "evaluate", "pred"]


class Head(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all heads; the tag names the type."""


class Hello(Head, frozen=True):
    """The first message of a link, in both directions: who is speaking, and of which plan."""

    protocol: int
    plan: str
    node: int
    cluster: int
    stage: int
    run: str = ""
    """Drawn by the Root; empty where it is not known yet."""
    settings: dict[str, str] = {}
    """What the nodes of a cluster must agree on."""
    codec: str = "raw"
    """How this node would like activations, gradients and averages to travel; if its peer likes the
    same, they do, else as they are."""


class HelloRefused(Head, frozen=True):
    """The answer to a Hello that does not fit; the link closes."""

    reason: str


class StageTiming(msgspec.Struct, frozen=True, array_like=True):
    """What one micro-batch cost at one stage, in seconds."""

    forward: float
    backward: float
    step: float
    to_next: float
    """On the link to the stage behind, without waiting; 0 at the last."""
    to_next_busy: float
    """How long that link is taken by one micro-batch."""
    to_previous: float
    """On the link to the stage before, without waiting; 0 at the first."""
    to_previous_busy: float


class Forward(Head, frozen=True):
    """A micro-batch on its way to the Leaf; its values travel as tensors."""

    run: str
    microbatch: MicrobatchId
    size: int
    """Samples in it."""
    digests: dict[str, str] = {}
    """Of the batch as the Root loaded it: ``targets``, ``inputs``."""


class Backward(Head, frozen=True):
    """Gradients on their way to the Root."""

    run: str
    microbatch: MicrobatchId
    timings: tuple[StageTiming, ...] = ()
    """Of the stages behind, the Leaf's last."""
    loss: float | None = None
    norms: tuple[tuple[int, float], ...] = ()
    """For a clip over the whole model: the place of each parameter of this stage and those behind,
    and the norm of the gradients that its update has so far."""


class ClipNorm(Head, frozen=True):
    """The Root's verdict on an update: the norm of all gradients."""

    update: int
    total: float


class PhaseBegin(Head, frozen=True):
    """A phase starts; the Leaf makes its iterator now."""

    run: str
    phase: int
    kind: PhaseKind
    epoch: int


class PhaseEnd(Head, frozen=True):
    """A phase has had its last micro-batch; ``count`` of them."""

    run: str
    phase: int
    count: int
    exhausted: bool
    """The Root's loader went to its end."""


class ForwardResult(Head, frozen=True):
    """What the Leaf made of a micro-batch without gradient; a prediction travels as tensors."""

    run: str
    microbatch: MicrobatchId
    value: float | None = None
    """Accuracy or loss of the micro-batch, in a validation."""
    structure: str = ""
    """How the tensors of a prediction form the model's output, as JSON."""


class ValidationResult(Head, frozen=True):
    """The result of a validation: from the Leaf to the Root, and from the Root to everyone."""

    run: str
    phase: int
    name: str
    value: float
    samples: int


class SaveStage(Head, frozen=True):
    """Write the trained stage and send it to the Root."""

    run: str


class StageSaved(Head, frozen=True):
    """A trained stage on its way to the Root, with its manifest as JSON."""

    run: str
    node: int
    manifest: str


class CallEnd(Head, frozen=True):
    """A call of the user's returns on every node."""

    run: str
    call: Call


class RunEnd(Head, frozen=True):
    """The Root is done; whatever waits on other nodes returns."""

    run: str


class RoundId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names a round of averaging; ``attempt`` counts how often it was tried again."""

    number: int
    attempt: int = 0


class RoundRequest(Head, frozen=True):
    """A cluster's Root asks the coordinator for a round, or says that it is ready for one."""

    cluster: int
    updates: int
    """So far, in all."""
    samples: int
    """Trained on since the last round it took part in."""
    interval: float
    """Seconds between its rounds at the rate that it trains with; 0 where not known."""
    final: bool
    """It has trained for the last time, and waits."""


class Prepare(Head, frozen=True):
    """Hold a copy of the newest parameters ready: from the coordinator to Roots, from them on."""

    round: RoundId
    assign: bool
    """Nothing trains meanwhile, and the average is taken as it is (blocking and final rounds)."""


class Prepared(Head, frozen=True):
    """A node has its copy; at the Root it becomes the word of a cluster."""

    round: RoundId
    cluster: int
    node: int
    samples: int
    """Of the cluster since the last round it took part in; the Root fills it in."""
    problem: str = ""
    """Why the copy must not enter an average."""
    codec: str = "raw"
    """How its sender would like averages to travel."""
    base: RoundId | None = None
    """The last average that it applied, if it kept that: compressed is what has changed since."""


class Start(Head, frozen=True):
    """Average now: these clusters, with these weights, on all rings."""

    round: RoundId
    weights: dict[int, float]
    """By cluster; they add up to 1. A cluster with weight 0 only receives."""
    codec: str = "raw"
    base: RoundId | None = None
    """With another codec than raw: what is averaged is the change since this average."""


class RingChunk(Head, frozen=True):
    """A part of a ring's tensors on its way round; the values travel as ``values``."""

    round: RoundId
    ring: int
    segment: int
    piece: int
    hop: int
    """Members that it has passed: below their number it is being summed, from there on it is final."""


class Reduced(Head, frozen=True):
    """A node is done with its part of a round; at the Root it becomes the word of a cluster."""

    round: RoundId
    cluster: int
    node: int
    digests: dict[int, str]
    """Of the average, by ring."""
    sent_bytes: int
    problem: str = ""
    """Why there is no average."""
    missing: int | None = None
    """The cluster whose node did not answer, where that is the problem."""


class Decision(Head, frozen=True):
    """The coordinator's verdict on a round: apply the average, or forget it."""

    round: RoundId
    commit: bool
    reason: str = ""
    assign: bool = False
    """As proposed: who stands still for the round goes on, even if the Propose never came."""


class Goodbye(Head, frozen=True):
    """The sender closes; nothing is wrong."""

    node: int


class Abort(Head, frozen=True):
    """The run cannot go on; passed along the pipeline in both directions."""

    node: int
    reason: str


AnyHead = (
    Hello
    | HelloRefused
    | Forward
    | Backward
    | ClipNorm
    | PhaseBegin
    | PhaseEnd
    | ForwardResult
    | ValidationResult
    | SaveStage
    | StageSaved
    | CallEnd
    | RunEnd
    | RoundRequest
    | Prepare
    | Prepared
    | Start
    | RingChunk
    | Reduced
    | Decision
    | Goodbye
    | Abort
)

LOSSY = (Forward, Backward, RingChunk)
"""Heads of the messages whose tensors may be compressed; those of others are results."""

Value = torch.Tensor | int | float


@dataclass(frozen=True)
class Message:
    """A head and the named values that travel with it."""

    head: AnyHead
    values: Mapping[str, Value] = field(default_factory=dict)
    exact: frozenset[str] = frozenset()
    """Names of tensors that are never compressed; known to the sender only."""
