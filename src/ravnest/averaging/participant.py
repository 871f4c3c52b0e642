"""A node's part in rounds: a pure state machine that turns commands of its Root into actions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ravnest.averaging.allreduce import AllReduceResult
from ravnest.averaging.checks import wrong_average
from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.events import Command, Reply
from ravnest.averaging.ports import RoundAverage, Vectors
from ravnest.averaging.round import Round
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundId, Start

# Events


@dataclass(frozen=True, slots=True)
class CommandArrived:
    """A command of the Root."""

    head: Command


@dataclass(frozen=True, slots=True)
class WeightsCopied:
    """The copy for a round is made."""

    round: RoundId
    copy: Vectors
    problem: str
    """Why the copy must not enter the average; empty if it may."""
    codec: str
    """The codec that this node asks for."""
    base: RoundId | None
    """The last average that was applied here, if it can serve as the base of compression."""
    scales: Mapping[int, float] = field(default_factory=dict)
    """Scale of the copy, by ring."""


@dataclass(frozen=True, slots=True)
class ReduceEnded:
    """The all-reduce over the node's rings has ended."""

    result: AllReduceResult
    missing: int | None = None
    """The cluster whose node could not be reached, if that is the problem."""
    scales: Mapping[int, float] = field(default_factory=dict)
    """Scale of the average, by ring."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """No chunk has arrived for ``Deadlines.ring_stall``."""


ParticipantEvent = CommandArrived | WeightsCopied | ReduceEnded | Stalled

# Actions, to be carried out in the given order


@dataclass(frozen=True, slots=True)
class CopyWeights:
    """Copy the parameters and pass in WeightsCopied."""

    round: RoundId
    idle: bool
    """Copy when no micro-batch is in flight."""


@dataclass(frozen=True, slots=True)
class StartReduce:
    """Start the all-reduce over all rings of the node."""

    head: Start
    copy: Vectors
    moves: bool
    """Weights change by the difference (average - copy)."""


@dataclass(frozen=True, slots=True)
class CancelReduce:
    """End the all-reduce of this round and of earlier ones."""

    round: RoundId
    reason: str


@dataclass(frozen=True, slots=True)
class StoreAverage:
    """Store the average until the Decision."""

    average: RoundAverage


@dataclass(frozen=True, slots=True)
class SettleCompression:
    """Tell the compression whether the average of a round was applied here."""

    round: RoundId
    applied: bool


@dataclass(frozen=True, slots=True)
class SendReply:
    """Send a reply to the Root."""

    head: Reply


ParticipantAction = (
    CopyWeights | StartReduce | CancelReduce | StoreAverage | SettleCompression | SendReply
)


class Participant:
    """One node in rounds: copies, reduces, stores the average and applies it on a Decision."""

    def __init__(self, cluster: int, node: int, deadlines: Deadlines | None = None) -> None:
        self._cluster = cluster
        self._node = node
        self._stall = (deadlines or Deadlines()).ring_stall
        self._round: Round | None = None
        self._copy: Vectors | None = None
        """The copy for the current round, until Start."""
        self._usual: Mapping[int, float] = {}
        """Scale of most clusters' copies in the current round, by ring."""

    def handle(self, event: ParticipantEvent, now: float) -> list[ParticipantAction]:
        """Take an event and return the actions that follow, in order."""
        match event:
            case CommandArrived(head):
                return self._command(head, now)
            case WeightsCopied():
                return self._copied(event)
            case ReduceEnded(result, missing, scales):
                return self._reduced(result, missing, scales)
            case Stalled():
                return self._stalled()

    def stalls_at(self, last_chunk: float) -> float:
        """Return when the all-reduce counts as stalled, given the time of the last chunk."""
        current = self._round
        if current is None or current.state != "reducing":
            return math.inf
        return max(current.since, last_chunk) + self._stall

    def _command(self, head: Command, now: float) -> list[ParticipantAction]:
        match head:
            case Prepare():
                return self._prepare(head, now)
            case Start():
                return self._start(head, now)
            case Decision():
                return self._decide(head)

    def _prepare(self, head: Prepare, now: float) -> list[ParticipantAction]:
        self._round = Round(head.round, head.assign, (self._node,), now)
        self._copy = None
        before = RoundId(head.round.number, head.round.attempt - 1)
        return [CancelReduce(before, "the attempt is over"), CopyWeights(head.round, idle=head.assign)]

    def _copied(self, event: WeightsCopied) -> list[ParticipantAction]:
        current = self._round
        if current is None or current.id != event.round or current.state != "preparing":
            return []
        reply = Prepared(
            round=event.round,
            cluster=self._cluster,
            node=self._node,
            samples=0,
            problem=event.problem,
            codec=event.codec,
            base=event.base,
            scales=dict(event.scales),
        )
        self._round = current.with_prepared(self._node, reply).to("prepared")
        self._copy = event.copy
        return [SendReply(reply)]

    def _start(self, head: Start, now: float) -> list[ParticipantAction]:
        current, copy = self._round, self._copy
        if current is None or current.id != head.round or copy is None:
            return []
        self._round, self._copy = current.start(head.weights, now), None
        self._usual = head.scales
        return [StartReduce(head, copy, moves=not (current.assign or self._faulty(current)))]

    def _reduced(
        self, result: AllReduceResult, missing: int | None, scales: Mapping[int, float]
    ) -> list[ParticipantAction]:
        current = self._round
        if current is None or current.id != result.round or current.state != "reducing":
            return []
        wrong = "" if result.problem else wrong_average(scales, self._own_scales(current), self._usual)
        result = replace(result, problem=wrong) if wrong else result
        reply = Reduced(
            round=result.round,
            cluster=self._cluster,
            node=self._node,
            digests=dict(result.digests),
            sent_bytes=result.sent_bytes,
            problem=result.problem,
            missing=missing,
            wrong=bool(wrong),
        )
        current = current.with_reduced(self._node, reply)
        if result.problem:
            self._round = current.to("failed")
            return [SendReply(reply)]
        self._round = current.to("reduced")
        faulty = self._faulty(current)
        average = RoundAverage(result.round, result.averages, current.assign, faulty)
        return [StoreAverage(average), SendReply(reply)]

    def _decide(self, head: Decision) -> list[ParticipantAction]:
        current, self._round, self._copy = self._round, None, None
        has_average = current is not None and current.id == head.round and current.state == "reduced"
        return [
            CancelReduce(head.round, head.reason or "the round is over"),
            SettleCompression(head.round, applied=has_average and head.commit),
        ]

    def _stalled(self) -> list[ParticipantAction]:
        current = self._round
        if current is None or current.state != "reducing":
            return []
        # The reply does not wait for the all-reduce: it may not have begun, while a member is dialled.
        problem = f"no chunk arrived for {self._stall:.0f} s"
        failed = AllReduceResult(current.id, {}, {}, 0, problem)
        return [CancelReduce(current.id, problem), *self._reduced(failed, None, {})]

    def _own_scales(self, current: Round) -> Mapping[int, float]:
        return current.prepared[self._node].scales

    def _faulty(self, current: Round) -> bool:
        return bool(current.prepared[self._node].problem)
