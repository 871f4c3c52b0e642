"""Commands from the coordinator to the nodes of a cluster, and their combined reply back. Pure.

**Which messages count.** Round ids are ordered, and a Root follows one coordinator at a time: the Root
of the lowest cluster that it believes to be alive.

- Commands of any other cluster do not count, so two coordinators cannot split the members of a round.
  The last Prepare of each is kept until this Root follows that cluster: clusters learn of the loss of a
  coordinator one after the other.
- A Prepare with an id above all earlier ones opens a round and voids the round that is open here.
  Retries work the same way: no Decision is sent between attempts, and training that has paused for
  the round stays paused.
- An older or repeated Prepare is ignored. If it is the first one of this coordinator, then the
  coordinator has taken over and does not know a round that others opened: the Root replies with a
  Prepared for the first id that it has not seen, and the coordinator continues after that id.
- Start and Decision count for the open round only. A Start that ``refusal`` gives a reason against does
  not reach the nodes; the coordinator gets the reason, and nobody is left out for it. A Decision with an
  id above all rounds known here, or any one of a coordinator that has not opened a round here yet, means
  that the round did not take place: training that has paused for it continues if its ``assign`` is set.
- When the coordinator changes, or reconnects, the open round is void here, and the Root sends its
  pending RoundRequest again (``member.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ravnest.averaging.events import Command, Reply
from ravnest.averaging.round import Round
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundId, Start


@dataclass(frozen=True, slots=True)
class RelayToNodes:
    """Pass a command to all nodes of the cluster, including the Root."""

    head: Command


@dataclass(frozen=True, slots=True)
class ReplyToCoordinator:
    """Send the reply of the cluster to the coordinator."""

    head: Reply


@dataclass(frozen=True, slots=True)
class RoundOver:
    """A round has ended for this cluster."""

    decision: Decision
    resume: bool
    """Training that has paused for a round continues."""


RelayAction = RelayToNodes | ReplyToCoordinator | RoundOver
Refusal = Callable[[Start, Prepared, bool], str]
"""Returns why a Start is refused, given the cluster's own reply and ``assign``; empty if it counts."""


class CommandRelay:
    """Relays commands to the nodes of a cluster and combines their replies into one."""

    def __init__(
        self,
        cluster: int,
        nodes: Iterable[int],
        coordinator: int,
        refusal: Refusal = lambda _head, _own, _assign: "",
    ) -> None:
        """``nodes`` starts with the Root."""
        self._refusal = refusal
        self.cluster = cluster
        self.coordinator = coordinator
        """The cluster whose commands count."""
        self._nodes = tuple(nodes)
        self._newest = RoundId(-1)
        self._newest_is_current = False
        """The newest round was opened by the coordinator that is followed now."""
        self._round: Round | None = None
        self._early: dict[int, Prepare] = {}
        """The open round of each other cluster that coordinates, as far as it knows."""

    @property
    def next_round(self) -> int:
        """The first round number that a coordinator started here may use."""
        return self._newest.number + 1

    @property
    def awaited(self) -> tuple[int, ...]:
        """Nodes whose replies are missing for the next reply of the cluster."""
        return () if self._round is None else self._round.awaited

    def follow(self, coordinator: int, reason: str) -> list[RelayAction]:
        """Follow another coordinator, or one that has reconnected; ``reason`` voids the open round."""
        self.coordinator = coordinator
        self._newest_is_current = False
        early = self._early.pop(coordinator, None)
        return [*self._void(reason), *([] if early is None else self._prepare(early))]

    def forget(self, cluster: int) -> None:
        """Drop what a cluster has sent that is gone, or has connected again."""
        self._early.pop(cluster, None)

    def command(self, sender: int, head: Command) -> list[RelayAction]:
        """Take a command that the Root of cluster ``sender`` sent as coordinator."""
        if sender != self.coordinator:
            self._keep_early(sender, head)
            return []
        match head:
            case Prepare():
                return self._prepare(head)
            case Start():
                return self._start(head)
            case Decision():
                return self._decide(head)

    def reply(self, head: Reply) -> list[RelayAction]:
        """Take the reply of a node; the last one completes the reply of the cluster."""
        current = self._round
        if current is None or head.round != current.id or head.node not in current.awaited:
            return []
        if isinstance(head, Prepared) and current.state == "preparing":
            self._round = current = current.with_prepared(head.node, head)
            return [] if current.awaited else self._reply_prepared(current)
        if isinstance(head, Reduced) and current.state == "reducing":
            self._round = current = current.with_reduced(head.node, head)
            # A failure is reported at once: other nodes may be waiting for the peer that is gone.
            return [] if current.awaited and not head.problem else self._reply_reduced(current)
        return []

    def _keep_early(self, sender: int, head: Command) -> None:
        """Keep a round that another cluster opens: it may have learned of a loss before this one."""
        if isinstance(head, Prepare):
            self._early[sender] = head
        else:
            self._early.pop(sender, None)

    # Commands

    def _prepare(self, head: Prepare) -> list[RelayAction]:
        if head.round <= self._newest:
            if self._newest_is_current:
                return []
            unseen = RoundId(self._newest.number, self._newest.attempt + 1)
            problem = f"round {self._newest.number} was opened by another coordinator"
            return [ReplyToCoordinator(Prepared(unseen, self.cluster, self._nodes[0], 0, problem))]
        retry = head.round.number == self._newest.number
        actions = self._void("it is tried again" if retry else f"round {head.round.number} has begun")
        self._newest, self._newest_is_current = head.round, True
        self._round = Round(head.round, head.assign, self._nodes)
        return [*actions, RelayToNodes(head)]

    def _start(self, head: Start) -> list[RelayAction]:
        current = self._round
        if current is None or head.round != current.id or current.state != "prepared":
            return []
        if self.cluster not in head.weights:
            return []
        refused = self._refusal(head, self._combined(current), current.assign)
        if refused:
            self._round = current.to("failed")
            reply = Reduced(head.round, self.cluster, self._nodes[0], {}, 0, refused, wrong=True)
            return [ReplyToCoordinator(reply)]
        self._round = current.start(head.weights, current.since)
        return [RelayToNodes(head)]

    def _decide(self, head: Decision) -> list[RelayAction]:
        current = self._round
        if current is not None and head.round == current.id:
            if head.commit and current.state != "reduced":
                head = Decision(head.round, commit=False, reason="this cluster has no average to apply")
            self._round = None
            return [RelayToNodes(head), RoundOver(head, current.assign)]
        if head.round <= self._newest:
            if self._newest_is_current:
                return []
            actions = []  # a coordinator that does not know the newest round; none is open here
        else:
            actions = self._void(head.reason)
            self._newest, self._newest_is_current = head.round, True
        void = Decision(head.round, commit=False, reason=head.reason, assign=head.assign)
        return [*actions, RoundOver(void, head.assign)]

    def _void(self, reason: str) -> list[RelayAction]:
        current, self._round = self._round, None
        if current is None:
            return []
        return [RelayToNodes(Decision(current.id, commit=False, reason=reason))]

    # Replies of the cluster

    def _reply_prepared(self, current: Round) -> list[RelayAction]:
        self._round = current.to("prepared")
        return [ReplyToCoordinator(self._combined(current))]

    def _combined(self, current: Round) -> Prepared:
        """Return the reply of the cluster to Prepare, from those of all its nodes."""
        root, replies = self._nodes[0], current.prepared
        wishes = {(reply.codec, reply.base) for reply in replies.values()}
        codec, base = next(iter(wishes)) if len(wishes) == 1 else ("raw", None)
        samples, problem = replies[root].samples, _problems(replies.values())
        scales: dict[int, float] = {}
        for reply in replies.values():
            scales |= reply.scales
        return Prepared(
            current.id, self.cluster, root, samples, problem, codec, base, scales, replies[root].behind
        )

    def _reply_reduced(self, current: Round) -> list[RelayAction]:
        digests: dict[int, str] = {}
        twice: set[int] = set()
        for head in current.reduced.values():
            twice |= digests.keys() & head.digests.keys()
            digests |= head.digests
        problem = _problems(current.reduced.values())
        if twice and not problem:
            problem = f"two nodes of cluster {self.cluster} are in ring {min(twice)}"
        self._round = current.to("failed" if problem else "reduced")
        missing = [head.missing for head in current.reduced.values() if head.missing is not None]
        return [
            ReplyToCoordinator(
                Reduced(
                    round=current.id,
                    cluster=self.cluster,
                    node=self._nodes[0],
                    digests=digests,
                    sent_bytes=sum(head.sent_bytes for head in current.reduced.values()),
                    problem=problem,
                    missing=missing[0] if missing else None,
                    wrong=any(head.wrong for head in current.reduced.values()),
                )
            )
        ]


def _problems(heads: Iterable[Reply]) -> str:
    return "; ".join(f"node_{head.node}: {head.problem}" for head in heads if head.problem)
