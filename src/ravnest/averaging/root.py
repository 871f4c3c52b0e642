"""What a Root does for averaging: it counts, asks, gathers, and coordinates if it is its turn.

Runs in the thread of the node's service. Whoever is the Root of the lowest cluster that is there
coordinates; all others follow it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

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
from ravnest.averaging.peers import Peers
from ravnest.averaging.trigger import RoundTrigger
from ravnest.store.node_spec import NodeSpec
from ravnest.transport.link import try_send
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundRequest, Start

logger = logging.getLogger(__name__)

MOST_EARLY = 64
"""Words that are kept for the case that this Root takes over."""


@dataclass(frozen=True)
class AveragingConfig:
    """How a user wants clusters to average, and who hears of it."""

    mode: Mode
    reduce_factor: int | None
    """Updates between rounds; None is once an epoch."""
    released: Callable[[], None]
    """Who has stopped for a round goes on."""
    reported: Callable[[RoundOutcome], None]
    """At the coordinator: a round is over."""


class AveragingRoot:
    """A Root among Roots."""

    def __init__(
        self,
        place: NodeSpec,
        rounds: AveragingConfig,
        peers: Peers,
        *,
        told: Callable[[Prepare | Start | Decision], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """``told`` passes a word on to the nodes of the cluster; ``post`` has a call made later."""
        self._own = place.cluster
        self._node = place.node
        self._rounds = rounds
        self._peers = peers
        self._told = told
        self._post = post
        self._live = {self._own}
        self._pace = RoundTrigger(self._own, rounds.reduce_factor)
        self._gathering = Member(self._own, place.pipeline, self._own)
        self._coordinator: Coordinator | None = Coordinator(self._live, self._own, mode=rounds.mode)
        self._early: list[Event] = []
        self.wake = math.inf
        """When to call ``tick``."""

    # Training here

    def updated(self, samples: int, now: float) -> None:
        """The cluster has made an update."""
        self._pace.updated(samples, now)
        self._ask_if_due()

    def epoch_ended(self, now: float) -> None:
        """The cluster has made all updates of an epoch."""
        self._pace.epoch_ended(now)
        self._ask_if_due()

    def ask(self, *, final: bool) -> None:
        """The cluster has stopped, and waits for a round."""
        self._pace.paused()
        self._to_leader(self._pace.ask(final=final))

    def _ask_if_due(self) -> None:
        if self._rounds.mode == "background" and self._pace.is_due:
            self._to_leader(self._pace.ask())

    # Other clusters

    def joined(self, cluster: int) -> None:
        """The Root of a cluster is there, for the first time or again."""
        again = cluster in self._live
        self._live.add(cluster)
        if self._coordinator is not None:
            self._coordinate(ClusterJoined(cluster))
        self._follow_lowest(f"cluster {cluster} has joined", anew=again)

    def lost(self, cluster: int, reason: str) -> None:
        """The Root of a cluster is gone; without a reason it has left, as its script is over."""
        if cluster not in self._live:
            return
        self._live.discard(cluster)
        if reason:
            logger.warning("cluster %d is gone (%s); cluster %d trains on", cluster, reason, self._own)
        reason = reason or "it has left"
        if self._coordinator is not None:
            self._coordinate(ClusterLost(cluster, reason))
        self._follow_lowest(f"cluster {cluster} is gone")

    def heard(
        self, cluster: int, head: RoundRequest | Prepared | Reduced | Prepare | Start | Decision
    ) -> None:
        """The word of another Root."""
        match head:
            case Prepare() | Start() | Decision():
                self._carry_out(self._gathering.hear(cluster, head))
            case _ if head.cluster != cluster:
                logger.warning("cluster %d speaks for cluster %d", cluster, head.cluster)
            case _:
                self._coordinate(_event(head))

    def collect(self, head: Prepared | Reduced) -> None:
        """The word of a node of this cluster."""
        if isinstance(head, Prepared) and head.node == self._node:
            head = msgspec.structs.replace(head, samples=self._pace.hold())
        self._carry_out(self._gathering.collect(head))

    def tick(self) -> None:
        """``wake`` has come."""
        self.wake = math.inf
        if self._coordinator is not None:
            self._coordinate(Tick())

    # Inside

    def _follow_lowest(self, reason: str, *, anew: bool = False) -> None:
        leader = min(self._live)
        if leader == self._gathering.coordinator and not anew:
            return
        self._carry_out(self._gathering.follow(leader, reason))
        if leader != self._own:
            self._coordinator, self.wake = None, math.inf
        elif self._coordinator is None:
            self._coordinator = Coordinator(
                self._live, self._own, mode=self._rounds.mode, first_round=self._gathering.next_round
            )
            early, self._early = self._early, []
            for event in early:
                self._coordinate(event)
        if self._pace.pending is not None:
            self._to_leader(self._pace.pending)

    def _to_leader(self, head: RoundRequest | Prepared | Reduced) -> None:
        leader = self._gathering.coordinator
        if leader == self._own:
            self._post(lambda: self._coordinate(_event(head)))
        else:
            self._send(leader, head)

    def _coordinate(self, event: Event) -> None:
        if self._coordinator is None:
            self._early = [*self._early[-MOST_EARLY:], event]
            return
        for action in self._coordinator.handle(event, time.monotonic()):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case SendToCluster(cluster, head) if cluster == self._own:
                self._post(lambda: self._carry_out(self._gathering.hear(self._own, head)))
            case SendToCluster(cluster, head):
                self._send(cluster, head)
            case Wake(at):
                self.wake = at
            case RoundEnded(outcome):
                self._rounds.reported(outcome)

    def _send(
        self, cluster: int, head: RoundRequest | Prepared | Reduced | Prepare | Start | Decision
    ) -> None:
        link = self._peers.root(cluster)
        if link is None:
            logger.debug("cluster %d is not there to hear of %s", cluster, type(head).__name__)
            return
        try_send(link, head)

    def _carry_out(self, actions: list[GatherAction]) -> None:
        for action in actions:
            match action:
                case RelayToNodes(head):
                    self._told(head)
                case ReplyToCoordinator(head):
                    self._to_leader(head)
                case RoundOver(settle, assign):
                    self._over(settle, assign=assign)

    def _over(self, settle: Decision, *, assign: bool) -> None:
        self._pace.settled(commit=settle.commit, assign=assign)
        logger.info("cluster %d: %s", self._own, settle.reason)
        if assign:
            self._rounds.released()


def _event(head: RoundRequest | Prepared | Reduced) -> Event:
    match head:
        case RoundRequest():
            return RequestArrived(head)
        case Prepared():
            return PreparedArrived(head)
        case Reduced():
            return ReducedArrived(head)
