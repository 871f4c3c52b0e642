"""A Root's part in rounds: the word of its nodes becomes the word of its cluster; and its own count.

**Which messages count.** Round ids are ordered, and a Root follows one coordinator at a time: the
Root of the lowest cluster that it believes alive. Then

- what comes from anyone else is ignored: two that both think they coordinate split nobody;
- a Propose that is newer than all before it opens a round, and voids one that is still open here.
  So it is when an attempt is tried again: no Settle comes between, and a Root that has stopped for
  the round stays stopped;
- an older or repeated one is ignored. But if it is the first of this coordinator, then that one has
  taken over and cannot know of a round that others were in: the Root answers with a Held of the
  first id that it has not seen, and the coordinator goes on behind it;
- Go and Settle count for the open round only. A Settle that is newer than all rounds proposed here
  says that there is none: whoever has stopped for it goes on, unless the others did not;
- with another coordinator, or a new link to the same one, the open round is void here, and the Root
  sends its ``Pace.pending`` again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundId, Start


@dataclass(frozen=True, slots=True)
class RelayToNodes:
    """A head to all nodes of the cluster, the Root among them."""

    head: Prepare | Start | Decision


@dataclass(frozen=True, slots=True)
class ReplyToCoordinator:
    """The cluster's word to the coordinator."""

    head: Prepared | Reduced


@dataclass(frozen=True, slots=True)
class RoundOver:
    """A round has ended here; who has stopped for one goes on if ``assign``."""

    settle: Decision
    assign: bool


GatherAction = RelayToNodes | ReplyToCoordinator | RoundOver


@dataclass(slots=True)
class _Open:
    """The round that the cluster is in."""

    id: RoundId
    assign: bool
    step: Literal["holding", "held", "averaging", "failed", "averaged"] = "holding"
    held: dict[int, Prepared] = field(default_factory=dict)
    reduced: dict[int, Reduced] = field(default_factory=dict)


class Member:
    """Passes the coordinator's word to the nodes of a cluster, and theirs, as one, to it."""

    def __init__(self, cluster: int, nodes: Iterable[int], coordinator: int) -> None:
        self.cluster = cluster
        self.coordinator = coordinator
        self._nodes = tuple(nodes)
        """The Root first."""
        self._newest = RoundId(-1)
        self._known_here = False
        """The coordinator that is followed has opened the newest round."""
        self._open: _Open | None = None

    @property
    def next_round(self) -> int:
        """Where a coordinator that takes over here goes on."""
        return self._newest.number + 1

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Nodes that the cluster's next answer waits for."""
        if self._open is None or self._open.step not in ("holding", "averaging"):
            return ()
        here = self._open.held if self._open.step == "holding" else self._open.reduced
        return tuple(node for node in self._nodes if node not in here)

    def follow(self, coordinator: int, reason: str) -> list[GatherAction]:
        """Listen to another coordinator, or to one that has a new link; ``reason`` says why."""
        self.coordinator = coordinator
        self._known_here = False
        return self._void(reason)

    def hear(self, sender: int, head: Prepare | Start | Decision) -> list[GatherAction]:
        """The word of the coordinator of cluster ``sender``."""
        if sender != self.coordinator:
            return []
        match head:
            case Prepare():
                return self._proposed(head)
            case Start():
                return self._go(head)
            case Decision():
                return self._settled(head)

    def collect(self, head: Prepared | Reduced) -> list[GatherAction]:
        """The word of a node of this cluster; the last one makes the cluster's."""
        current = self._open
        if current is None or head.round != current.id or head.node not in self.waits_for:
            return []
        if isinstance(head, Prepared) and current.step == "holding":
            current.held[head.node] = head
            return [] if self.waits_for else self._answer_held(current)
        if isinstance(head, Reduced) and current.step == "averaging":
            current.reduced[head.node] = head
            # A failure is said at once: the other nodes may wait for the very peer that is gone.
            return [] if self.waits_for and not head.problem else self._answer_reduced(current)
        return []

    # The coordinator's word

    def _proposed(self, head: Prepare) -> list[GatherAction]:
        if head.round <= self._newest:
            if self._known_here:
                return []
            unseen = RoundId(self._newest.number, self._newest.attempt + 1)
            problem = f"round {self._newest.number} was opened by another coordinator"
            return [ReplyToCoordinator(Prepared(unseen, self.cluster, self._nodes[0], 0, problem))]
        again = head.round.number == self._newest.number
        actions = self._void("it is tried again" if again else f"round {head.round.number} has begun")
        self._newest, self._known_here = head.round, True
        self._open = _Open(head.round, head.assign)
        return [*actions, RelayToNodes(head)]

    def _go(self, head: Start) -> list[GatherAction]:
        current = self._open
        if current is None or head.round != current.id or current.step != "held":
            return []
        if self.cluster not in head.weights:
            return []
        current.step = "averaging"
        return [RelayToNodes(head)]

    def _settled(self, head: Decision) -> list[GatherAction]:
        current = self._open
        if current is not None and head.round == current.id:
            if head.commit and current.step != "averaged":
                head = Decision(head.round, commit=False, reason="this cluster has no average to apply")
            self._open = None
            return [RelayToNodes(head), RoundOver(head, current.assign)]
        if head.round <= self._newest:
            return []
        actions = self._void(head.reason)
        self._newest, self._known_here = head.round, True
        void = Decision(head.round, commit=False, reason=head.reason, assign=head.assign)
        return [*actions, RoundOver(void, head.assign)]

    def _void(self, reason: str) -> list[GatherAction]:
        current, self._open = self._open, None
        return (
            [] if current is None else [RelayToNodes(Decision(current.id, commit=False, reason=reason))]
        )

    # The cluster's word

    def _answer_held(self, current: _Open) -> list[GatherAction]:
        current.step = "held"
        root = self._nodes[0]
        problem = _problems(current.held.values())
        samples = current.held[root].samples
        wishes = {(held.codec, held.base) for held in current.held.values()}
        codec, base = next(iter(wishes)) if len(wishes) == 1 else ("raw", None)
        return [
            ReplyToCoordinator(Prepared(current.id, self.cluster, root, samples, problem, codec, base))
        ]

    def _answer_reduced(self, current: _Open) -> list[GatherAction]:
        digests: dict[int, str] = {}
        twice: set[int] = set()
        for head in current.reduced.values():
            twice |= digests.keys() & head.digests.keys()
            digests |= head.digests
        problem = _problems(current.reduced.values())
        if twice and not problem:
            problem = f"two nodes of cluster {self.cluster} are in ring {min(twice)}"
        current.step = "failed" if problem else "averaged"
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
                )
            )
        ]


def _problems(heads: Iterable[Prepared | Reduced]) -> str:
    return "; ".join(f"node_{head.node}: {head.problem}" for head in heads if head.problem)
