"""Members of several clusters in virtual time: all of averaging except the tensors.

A cluster trains, requests rounds, replies, and waits at the end for the final round and its end. Links
keep their order. A cluster that is killed falls silent; each of the others learns of it a while later.
A cluster that is restarted goes back to its last checkpoint and connects to the others again, which may
not have learned of its death by then; what its last process sent does not arrive any more.

Parameters are words: each update makes a new one, and an average is the same word in all members.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
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

RETURN = 500.0
"""Time for which the final round waits for a cluster that may return."""
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
        self.copies: dict[tuple[RoundId, int], str] = {}
        """Parameters that enter a round, by cluster."""
        self._names = count()
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

    def new_parameters(self, cluster: int) -> str:
        return f"{next(self._names)} of cluster {cluster}"

    def kill(self, cluster: int, *, returns: bool = False) -> None:
        """End a cluster; ``returns``: the others wait for it in the final round."""
        killed = self.roots[cluster]
        killed.alive = False
        for root in self.roots.values():
            self.after(self.random.uniform(0.0, 2.0), root.loss_of(killed, returns=returns))

    def fail(self, cluster: int) -> None:
        """End a cluster for good, which it tells the others; also if it was killed before."""
        failed = self.roots[cluster]
        failed.alive, failed.gone = False, True
        for root in self.roots.values():
            if root is not failed:
                self.send(cluster, root.cluster, root.farewell_of(failed))

    def kill_and_restart(self, cluster: int) -> None:
        """Restart a cluster some time after its death."""
        if self.roots[cluster].alive:
            self.kill(cluster, returns=True)
            self.after(self.random.uniform(0.0, 10.0), partial(self.restart, cluster))

    def restart(self, cluster: int, back: int = 5) -> None:
        """Continue with a new process from ``back`` updates before the last one.

        If the final average is in a checkpoint, continue from that; if it was released, end at once.
        """
        before = self.roots[cluster]
        if before.gone:
            return
        before.alive = False
        left = 0 if before.kept else min(max(before.left, 0) + back, self.updates)
        now = self.roots[cluster] = Root(self, cluster, left, before.kept)
        now.released = before.done or before.released
        now.member.expect(set(self.roots) - {cluster}, self.now + RETURN)
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

    def __init__(self, world: World, cluster: int, updates: int, kept: str = "") -> None:
        self.world = world
        self.cluster = cluster
        self.left = updates
        """Updates until the end of training."""
        self.alive = True
        self.paused = False
        self.done = False
        self.released = False
        """The process before was released from the end of training."""
        self.failed = False
        """The cluster does not return."""
        self.gone = False
        """The process has ended its run."""
        self.kept = kept
        """Parameters in the checkpoint of the final average; empty if there is none."""
        self.parameters = kept or world.new_parameters(cluster)
        self.connected: dict[int, Root] = {}
        """The process at the other end of each link."""
        self.past: set[Root] = set()
        """Processes whose links are lost, or whose place another one has taken."""
        self.applied: list[RoundId] = []
        self.averages: dict[RoundId, str] = {}
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
        if self.released:
            self.end()
            return
        if self.kept:
            self.paused = True
            self.give(TrainingPaused(final=True, kept=True, call=1))
            return
        self.left -= 1
        self.parameters = self.world.new_parameters(self.cluster)
        self.give(UpdateMade(8, self.world.now))
        final = self.left <= 0
        due = self.world.mode == "blocking" and self.member.trigger.is_due
        if final or due:
            self.paused = True
            self.give(TrainingPaused(final, call=int(final)))
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
                self.world.copies[of, self.cluster] = self.parameters
                self.node_replies(Prepared(of, self.cluster, node, 0))
            case Start(of, weights):
                # The average follows from the copies: all have the same, or something is wrong.
                digest = self.average(of, weights)
                self.averages[of] = digest
                self.node_replies(Reduced(of, self.cluster, node, {node % 10: digest}, 10))
            case Decision():
                pass

    def average(self, of: RoundId, weights: Mapping[int, float]) -> str:
        copies = {c: self.world.copies[of, c] for c, weight in weights.items() if weight}
        return next(iter(copies.values())) if len(copies) == 1 else f"{of.number}: {sorted(copies)}"

    def node_replies(self, head: Reply) -> None:
        delay = self.world.random.uniform(0.0, 0.3)
        self.world.after(delay, lambda: self.give(NodeReplied(head)))

    def over(self, decision: Decision, *, resume: bool) -> None:
        if decision.commit:
            if resume:  # else the difference is added: any new word is as good
                self.parameters = self.averages[decision.round]
            self.applied.append(decision.round)
            self.world.applied.setdefault(decision.round, set()).add(self.cluster)
        if not resume or not self.paused:
            return
        if self.left <= 0 and decision.commit:
            self.world.after(self.world.random.uniform(0.0, 1.0), self.keep)
            return
        self.paused = False
        if self.left <= 0:
            self.end()
        else:
            self.world.after(self.speed, self.train)

    def end(self) -> None:
        self.done, self.kept = True, self.parameters
        if self.world.leaves:
            self.world.after(self.world.random.uniform(0.0, 20.0), self.leave)

    def keep(self) -> None:
        """Write a checkpoint of the final average, and wait for the other clusters."""
        if self.alive:
            self.kept = self.parameters
            self.give(TrainingPaused(final=True, kept=True, call=1))

    # Losses

    def leave(self) -> None:
        if self.alive:
            self.world.fail(self.cluster)

    def loss_of(self, killed: Root, *, returns: bool = False) -> Callable[[], None]:
        """Return the call with which this Root learns of a loss."""

        def learn() -> None:
            if self.connected.get(killed.cluster) is killed:
                del self.connected[killed.cluster]
                self.past.add(killed)
                until = self.world.now + RETURN if returns else -math.inf
                self.give(ClusterLost(killed.cluster, "no heartbeat", until))

        return learn

    def farewell_of(self, gone: Root) -> Callable[[], None]:
        """Return the call with which this Root learns that another one has ended for good."""

        def learn() -> None:
            before = self.connected.get(gone.cluster)
            if before is None or before is gone:
                self.connected.pop(gone.cluster, None)
                self.past.add(gone)
                self.give(ClusterLost(gone.cluster, "it has left"))

        return learn

    def connect(self, other: Root) -> None:
        """Open a link to another Root: each of the two learns of it a while later."""
        for here, there in ((self, other), (other, self)):
            before = here.connected.get(there.cluster)
            if before is not None and before is not there:  # the loss may be seen before or after
                learns = here.loss_of(before, returns=True)
                self.world.after(self.world.random.uniform(0.0, 2.0), learns)
            self.world.send(there.cluster, here.cluster, partial(here.join, there))

    def join(self, other: Root) -> None:
        before = self.connected.get(other.cluster)
        if before is not other and other not in self.past:
            if before is not None:
                self.past.add(before)
            self.connected[other.cluster] = other
            self.give(ClusterJoined(other.cluster))
