"""Members of several clusters in virtual time: all of averaging except the tensors.

A cluster trains, requests rounds, replies, and waits at the end for the final round. Links keep their
order. A cluster that is killed falls silent; each of the others learns of it a while later. A cluster
that is restarted has lost its state and connects to the others again, which may not have learned of its
death by then; what its last process sent does not arrive any more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random

from ravnest.averaging.coordinator import Mode
from ravnest.averaging.events import (
    ClusterJoined,
    ClusterLost,
    Command,
    Reply,
    RoundEnded,
    SendToCluster,
    Tick,
)
from ravnest.averaging.member import (
    Member,
    MemberAction,
    MemberEvent,
    MessageArrived,
    NodeReplied,
    TrainingPaused,
    UpdateMade,
)
from ravnest.averaging.outcome import RoundOutcome
from ravnest.averaging.relay import RelayToNodes, RoundOver
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundId, Start

NODES = 2
"""Nodes in each cluster; node 10 * cluster is its Root."""
REDUCE_FACTOR = 3


class World:
    """The clock, the links, and the clusters."""

    def __init__(
        self, clusters: int, mode: Mode, *, updates: int, seed: int, leaves: bool = False
    ) -> None:
        """``leaves``: processes end some time after their training."""
        self.now = 0.0
        self.random = Random(seed)
        self.mode: Mode = mode
        self.updates = updates
        self.leaves = leaves
        self.outcomes: list[RoundOutcome] = []
        self.applied: dict[RoundId, set[int]] = {}
        self._order = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._arrivals: dict[tuple[int, int], float] = {}
        self.roots = {cluster: Root(self, cluster, updates) for cluster in range(clusters)}
        for root in list(self.roots.values()):
            root.begin(set(range(clusters)))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._order), call))

    def send(self, sender: int, receiver: int, call: Callable[[], None]) -> None:
        """Deliver over a link: some time later, and after earlier messages."""
        at = max(self.now + self.random.uniform(0.001, 0.2), self._arrivals.get((sender, receiver), 0))
        self._arrivals[sender, receiver] = at
        self.after(at - self.now, call)

    def kill(self, cluster: int) -> None:
        killed = self.roots[cluster]
        killed.alive = False
        for root in self.roots.values():
            self.after(self.random.uniform(0.0, 2.0), root.loss_of(killed))

    def kill_and_restart(self, cluster: int) -> None:
        """Restart a cluster some time after its death."""
        if self.roots[cluster].alive:
            self.kill(cluster)
            self.after(self.random.uniform(0.0, 10.0), partial(self.restart, cluster))

    def restart(self, cluster: int, back: int = 5) -> None:
        """Continue with a new process from ``back`` updates before the last one."""
        before = self.roots[cluster]
        if before.done:
            return
        before.alive = False
        now = self.roots[cluster] = Root(self, cluster, min(before.left + back, self.updates))
        others = [root for root in self.roots.values() if root.alive and root is not now]
        for other in others:
            now.connect(other)
        self.after(now.speed, now.train)

    def run(self, until: float) -> None:
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, call = heapq.heappop(self._agenda)
            call()


class Root:
    """A cluster: the real member of its Root, and simulated nodes."""

    def __init__(self, world: World, cluster: int, updates: int) -> None:
        self.world = world
        self.cluster = cluster
        self.left = updates
        """Updates until the end of training."""
        self.alive = True
        self.paused = False
        self.done = False
        self.connected: dict[int, Root] = {}
        """The process at the other end of each link."""
        self.past: set[Root] = set()
        """Processes whose links are lost, or whose place another one has taken."""
        self.applied: list[RoundId] = []
        self.nodes = [10 * cluster + stage for stage in range(NODES)]
        self.member = Member(cluster, self.nodes, mode=world.mode, reduce_factor=REDUCE_FACTOR)
        self.speed = world.random.uniform(0.1, 1.0)

    def begin(self, clusters: set[int]) -> None:
        for other in clusters - {self.cluster}:
            self.connected[other] = self.world.roots[other]
            self.give(ClusterJoined(other))
        self.world.after(self.speed, self.train)

    def give(self, event: MemberEvent) -> None:
        if not self.alive:
            return
        for action in self.member.handle(event, self.world.now):
            self.carry_out(action)
        if self.member.wake < float("inf"):
            self.world.after(self.member.wake - self.world.now, self.tick)

    def tick(self) -> None:
        if self.member.wake <= self.world.now:
            self.give(Tick())

    # Training

    def train(self) -> None:
        if not self.alive or self.paused or self.done:
            return
        self.left -= 1
        self.give(UpdateMade(8, self.world.now))
        final = self.left <= 0
        due = self.world.mode == "blocking" and self.member.trigger.is_due
        if final or due:
            self.paused = True
            self.give(TrainingPaused(final))
        else:
            self.world.after(self.speed, self.train)

    # Rounds

    def carry_out(self, action: MemberAction) -> None:
        match action:
            case SendToCluster(cluster, head):
                other, event = self.connected.get(cluster), MessageArrived(self.cluster, head)
                if other is not None:
                    self.world.send(self.cluster, cluster, lambda: other.receive(self, event))
            case RelayToNodes(head):
                for node in self.nodes:
                    self.node_gets(node, head)
            case RoundOver(decision, resume):
                self.over(decision, resume=resume)
            case RoundEnded(outcome):
                self.world.outcomes.append(outcome)

    def receive(self, sender: Root, event: MessageArrived) -> None:
        """Messages of a lost link do not arrive; the first message of a new one opens it here."""
        if sender not in self.past:
            self.join(sender)
            self.give(event)

    def node_gets(self, node: int, head: Command) -> None:
        match head:
            case Prepare(of):
                self.node_replies(Prepared(of, self.cluster, node, 0))
            case Start(of, weights):
                # The average follows from the members: all have the same, or something is wrong.
                digest = str(sorted(weights.items()))
                self.node_replies(Reduced(of, self.cluster, node, {node % 10: digest}, 10))
            case Decision():
                pass

    def node_replies(self, head: Reply) -> None:
        delay = self.world.random.uniform(0.0, 0.3)
        self.world.after(delay, lambda: self.give(NodeReplied(head)))

    def over(self, decision: Decision, *, resume: bool) -> None:
        if decision.commit:
            self.applied.append(decision.round)
            self.world.applied.setdefault(decision.round, set()).add(self.cluster)
        if resume and self.paused:
            self.paused = False
            if self.left <= 0:
                self.done = True
                if self.world.leaves:
                    self.world.after(self.world.random.uniform(0.0, 20.0), self.leave)
            else:
                self.world.after(self.speed, self.train)

    # Losses

    def leave(self) -> None:
        if self.alive:
            self.world.kill(self.cluster)

    def loss_of(self, killed: Root) -> Callable[[], None]:
        """Return the call with which this Root learns of a loss."""

        def learn() -> None:
            if self.connected.get(killed.cluster) is killed:
                del self.connected[killed.cluster]
                self.past.add(killed)
                self.give(ClusterLost(killed.cluster, "no heartbeat"))

        return learn

    def connect(self, other: Root) -> None:
        """Open a link to another Root: each of the two learns of it a while later."""
        for here, there in ((self, other), (other, self)):
            before = here.connected.get(there.cluster)
            if before is not None and before is not there:  # the loss may be seen before or after
                self.world.after(self.world.random.uniform(0.0, 2.0), here.loss_of(before))
            self.world.send(there.cluster, here.cluster, partial(here.join, there))

    def join(self, other: Root) -> None:
        before = self.connected.get(other.cluster)
        if before is not other and other not in self.past:
            if before is not None:
                self.past.add(before)
            self.connected[other.cluster] = other
            self.give(ClusterJoined(other.cluster))
