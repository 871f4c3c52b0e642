"""Roots, their nodes and whoever coordinates, in virtual time: all of averaging but the tensors.

A cluster trains, asks for rounds, answers, and waits at the end for the final round. Links keep
their order. A cluster that is killed falls silent, and the others learn of it a while later, each
at another time; it may come back with nothing but its number.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

from ravnest.averaging.coordinator import Coordinator, Mode
from ravnest.averaging.events import (
    Action,
    ClusterJoined,
    ClusterLost,
    Event,
    PreparedArrived,
    ReducedArrived,
    RequestArrived,
    RoundEnded,
    SendToCluster,
    Tick,
    Wake,
)
from ravnest.averaging.member import GatherAction, Member, RelayToNodes, ReplyToCoordinator, RoundOver
from ravnest.averaging.outcome import RoundOutcome
from ravnest.averaging.trigger import RoundTrigger
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundId, RoundRequest, Start

NODES = 2
"""In each cluster; node 10 * cluster is its Root."""


class World:
    """The clock, the links, and the clusters."""

    def __init__(self, clusters: int, mode: Mode, *, updates: int, seed: int) -> None:
        self.now = 0.0
        self.random = Random(seed)
        self.mode: Mode = mode
        self.outcomes: list[RoundOutcome] = []
        self.applied: dict[RoundId, set[int]] = {}
        self._order = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._arrivals: dict[tuple[int, int], float] = {}
        self.roots = {c: Root(self, c, range(clusters), updates) for c in range(clusters)}
        for root in self.roots.values():
            root.begin()

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._order), do))

    def send(self, sender: int, receiver: int, do: Callable[[], None]) -> None:
        """Over a link: some time later, and behind what was sent before."""
        at = max(self.now + self.random.uniform(0.001, 0.2), self._arrivals.get((sender, receiver), 0))
        self._arrivals[sender, receiver] = at
        self.after(at - self.now, do)

    def kill(self, cluster: int) -> None:
        self.roots[cluster].alive = False
        for other in self.roots.values():
            gone = self.random.uniform(0.0, 2.0)
            self.after(gone, lambda root=other: root.learns_of_loss(cluster))  # type: ignore[misc]

    def run(self, until: float) -> None:
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, do = heapq.heappop(self._agenda)
            do()


@dataclass
class Root:
    """The Root of a cluster, and its nodes in a nutshell."""

    world: World
    cluster: int
    clusters: range
    left: int
    """Updates until the end of training."""
    alive: bool = True
    waits: bool = False
    done: bool = False
    coordinator: Coordinator | None = None
    believed: set[int] = field(default_factory=set)
    early: list[Event] = field(default_factory=list)
    """From Roots that have learnt before this one that it is to take over."""

    def begin(self) -> None:
        self.believed = set(self.clusters)
        self.nodes = [10 * self.cluster + stage for stage in range(NODES)]
        self.gathering = Member(self.cluster, self.nodes, coordinator=0)
        self.pace = RoundTrigger(self.cluster, 3)
        self.speed = self.world.random.uniform(0.1, 1.0)
        if self.cluster == 0:
            self.coordinator = Coordinator(self.clusters, 0, mode=self.world.mode)
        self.world.after(self.speed, self.train)

    # Training

    def train(self) -> None:
        if not self.alive or self.waits or self.done:
            return
        self.left -= 1
        self.pace.updated(8, self.world.now)
        if self.left <= 0:
            self.ask(final=True)
        elif self.pace.is_due:
            self.ask(final=False)
        if not self.waits:
            self.world.after(self.speed, self.train)

    def ask(self, *, final: bool) -> None:
        self.waits = final or self.world.mode == "blocking"
        self.send_due(self.pace.ask(final=final))
        if self.waits:
            self.pace.paused()

    def send_due(self, due: RoundRequest) -> None:
        self.to_coordinator(RequestArrived(due))

    # Rounds

    def to_coordinator(self, event: Event) -> None:
        leader = self.world.roots[self.gathering.coordinator]
        self.world.send(self.cluster, leader.cluster, lambda: leader.coordinate(event))

    def coordinate(self, event: Event) -> None:
        if self.coordinator is None:
            self.early.append(event)
        elif self.alive:
            for action in self.coordinator.handle(event, self.world.now):
                self.act(action)

    def act(self, action: Action) -> None:
        match action:
            case SendToCluster(cluster, head):
                other = self.world.roots[cluster]
                self.world.send(self.cluster, cluster, lambda: other.hear(self.cluster, head))
            case Wake(at):
                self.world.after(at - self.world.now, lambda: self.coordinate(Tick()))
            case RoundEnded(outcome):
                self.world.outcomes.append(outcome)

    def hear(self, sender: int, head: Prepare | Start | Decision) -> None:
        if self.alive:
            self.carry_out(self.gathering.hear(sender, head))

    def carry_out(self, actions: list[GatherAction]) -> None:
        for action in actions:
            match action:
                case RelayToNodes(head):
                    for node in self.nodes:
                        self.node_gets(node, head)
                case ReplyToCoordinator(head):
                    wrapped = (
                        PreparedArrived(head) if isinstance(head, Prepared) else ReducedArrived(head)
                    )
                    self.to_coordinator(wrapped)
                case RoundOver(settle, assign):
                    self.over(settle, assign=assign)

    def node_gets(self, node: int, head: Prepare | Start | Decision) -> None:
        match head:
            case Prepare(of):
                samples = self.pace.hold() if node == self.nodes[0] else 0
                self.node_says(Prepared(of, self.cluster, node, samples))
            case Start(of, weights):
                # The average follows from who takes part: all have the same, or something is wrong.
                digest = str(sorted(weights.items()))
                self.node_says(Reduced(of, self.cluster, node, {node % 10: digest}, 10))
            case Decision():
                pass

    def node_says(self, head: Prepared | Reduced) -> None:
        delay = self.world.random.uniform(0.0, 0.3)
        self.world.after(delay, lambda: self.alive and self.carry_out(self.gathering.collect(head)))  # type: ignore[func-returns-value]

    def over(self, settle: Decision, *, assign: bool) -> None:
        final = self.pace.pending is not None and self.pace.pending.final
        self.pace.settled(commit=settle.commit, assign=assign)
        if settle.commit:
            self.world.applied.setdefault(settle.round, set()).add(self.cluster)
        if assign and self.waits:
            self.waits = False
            if final:
                self.done = True
            else:
                self.world.after(self.speed, self.train)

    # Who lives

    def learns_of_loss(self, cluster: int) -> None:
        if not self.alive or cluster not in self.believed or cluster == self.cluster:
            return
        self.believed.discard(cluster)
        if self.coordinator is not None:
            self.coordinate(ClusterLost(cluster, "no heartbeat"))
        if cluster == self.gathering.coordinator:
            self.follow(min(self.believed))

    def joins(self, event: ClusterJoined) -> None:
        """Who is known to be dead has no link to join by."""
        if event.cluster in self.believed:
            self.coordinate(event)

    def follow(self, leader: int) -> None:
        self.carry_out(self.gathering.follow(leader, "the coordinator was lost"))
        if leader == self.cluster:
            first = self.gathering.next_round
            self.coordinator = Coordinator(
                self.believed, leader, mode=self.world.mode, first_round=first
            )
            for event in self.early:
                self.joins(event) if isinstance(event, ClusterJoined) else self.coordinate(event)
        else:
            other = self.world.roots[leader]
            self.world.send(self.cluster, leader, lambda: other.joins(ClusterJoined(self.cluster)))
        if self.pace.pending is not None:
            self.send_due(self.pace.pending)
