"""A cluster in averaging, at its Root: requests rounds, relays commands, coordinates if it is lowest.

Pure: events in, actions out. The Root of the lowest live cluster coordinates and all others follow it.
Messages between a Root and a coordinator in the same process never leave this module.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ravnest.averaging.checks import start_refusal
from ravnest.averaging.coordinator import Coordinator, Mode
from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.events import (
    Action,
    ClusterJoined,
    ClusterLost,
    Command,
    Event,
    PreparedArrived,
    ReducedArrived,
    Reply,
    RequestArrived,
    RoundEnded,
    RoundMessage,
    SendToCluster,
    Tick,
    Wake,
)
from ravnest.averaging.relay import (
    CommandRelay,
    RelayAction,
    RelayToNodes,
    ReplyToCoordinator,
    RoundOver,
)
from ravnest.averaging.trigger import RoundTrigger
from ravnest.wire.messages import Prepared, Reduced, RoundRequest, Start

MAX_EARLY_EVENTS = 64
"""Events for the coordinator that a Root keeps before it learns that it has to take over."""

# Events


@dataclass(frozen=True, slots=True)
class UpdateMade:
    """The cluster has made an update."""

    samples: int
    at: float
    """Time of the update."""


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """The cluster has made all updates of an epoch."""

    at: float
    """Time of the last update."""


@dataclass(frozen=True, slots=True)
class TrainingPaused:
    """The cluster has paused until the next round is over."""

    final: bool
    """Training has ended: it waits for the final round."""
    kept: bool = False
    """With ``final``: it has the average of that round in a checkpoint, and waits for the others."""
    call: int = 0
    """With ``final``: number of the script's call that ends."""


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """A message of another Root."""

    cluster: int
    head: RoundMessage


@dataclass(frozen=True, slots=True)
class NodeReplied:
    """A reply of a node of this cluster."""

    head: Reply


MemberEvent = (
    UpdateMade
    | EpochEnded
    | TrainingPaused
    | MessageArrived
    | NodeReplied
    | ClusterJoined
    | ClusterLost
    | Tick
)

MemberAction = SendToCluster | RelayToNodes | RoundOver | RoundEnded
"""Actions, to be carried out in the given order. ``SendToCluster`` names other clusters only."""


class Member:
    """State machine of a cluster's Root."""

    def __init__(
        self,
        cluster: int,
        nodes: Iterable[int],
        *,
        mode: Mode,
        reduce_factor: int | None,
        deadlines: Deadlines | None = None,
        planned: Sequence[int] = (),
        robust: bool = False,
    ) -> None:
        """``nodes`` starts with the Root. Other clusters are unknown until they join.

        ``planned``: samples of each cluster in an epoch, as far as they are known. ``robust``: a robust
        mean is taken.
        """
        self._planned = planned
        self._robust = robust
        self._own = cluster
        self._nodes = tuple(nodes)
        self._mode: Mode = mode
        self._deadlines = deadlines
        self._live = {cluster}
        self._absent: dict[int, float] = {}
        """Clusters that are lost and may return, and until when the final round waits for them."""
        self._unseen: dict[int, float] = {}
        """The same for those that took part before this process began."""
        self._relay = CommandRelay(cluster, self._nodes, cluster, self._refusal)
        self._coordinator: Coordinator | None = self._new_coordinator()
        self._early: deque[Event] = deque(maxlen=MAX_EARLY_EVENTS)
        self._local: deque[RoundMessage] = deque()
        """Messages between this Root and its own coordinator."""
        self._actions: list[MemberAction] = []
        self.trigger = RoundTrigger(cluster, reduce_factor)
        self.wake = math.inf
        """Time at which a Tick is due."""

    @property
    def coordinator(self) -> int:
        """The cluster that coordinates, as far as this Root knows."""
        return self._relay.coordinator

    def expect(self, clusters: Iterable[int], until: float) -> None:
        """Continue a run that other clusters were part of: they may connect until some time."""
        self._unseen = {c: until for c in clusters if c not in self._live}

    def handle(self, event: MemberEvent, now: float) -> list[MemberAction]:
        """Take an event and return the actions that follow, in order."""
        self._take(event, now)
        while self._local:
            head = self._local.popleft()
            if isinstance(head, Command):
                self._relayed(self._relay.command(self._own, head))
            else:
                self._coordinate(_arrival(head), now)
        actions, self._actions = self._actions, []
        return actions

    def _take(self, event: MemberEvent, now: float) -> None:
        match event:
            case UpdateMade(samples, at):
                self.trigger.updated(samples, at)
                self._request_if_due()
            case EpochEnded(at):
                self.trigger.epoch_ended(at)
                self._request_if_due()
            case TrainingPaused():
                self._pause(event, now)
            case MessageArrived(cluster, head):
                self._message(cluster, head, now)
            case NodeReplied(head):
                self._node_replied(head)
            case ClusterJoined(cluster):
                self._joined(cluster, now)
            case ClusterLost():
                self._lost(event, now)
            case Tick():
                self.wake = math.inf
                if self._coordinator is not None:
                    self._coordinate(event, now)

    # Training of this cluster

    def _request_if_due(self) -> None:
        if self._mode == "background" and self.trigger.is_due:
            self._to_coordinator(self.trigger.request())

    def _pause(self, event: TrainingPaused, now: float) -> None:
        self.trigger.paused()
        if event.final:
            self._await_unseen(now)
        request = self.trigger.request(final=event.final, kept=event.kept, call=event.call)
        self._to_coordinator(request)

    # Messages

    def _message(self, cluster: int, head: RoundMessage, now: float) -> None:
        if isinstance(head, Command):
            self._relayed(self._relay.command(cluster, head))
        else:
            self._coordinate(_arrival(head), now)

    def _refusal(self, head: Start, own: Prepared, assign: bool) -> str:
        return start_refusal(
            head,
            own,
            assign=assign,
            planned=self._planned,
            robust=self._robust,
            live=len(self._live),
        )

    def _node_replied(self, head: Reply) -> None:
        if isinstance(head, Prepared) and head.node == self._nodes[0]:
            behind = self.trigger.is_behind(head.round.number)
            head = msgspec.structs.replace(head, samples=self.trigger.hold(), behind=behind)
        self._relayed(self._relay.reply(head))

    def _relayed(self, actions: list[RelayAction]) -> None:
        for action in actions:
            match action:
                case ReplyToCoordinator(head):
                    self._to_coordinator(head)
                case RoundOver(decision, resume):
                    self.trigger.settled(decision.round.number, commit=decision.commit, assign=resume)
                    self._actions.append(action)
                case RelayToNodes():
                    self._actions.append(action)

    def _to_coordinator(self, head: RoundRequest | Reply) -> None:
        self._send(self._relay.coordinator, head)

    def _send(self, cluster: int, head: RoundMessage) -> None:
        if cluster == self._own:
            self._local.append(head)
        else:
            self._actions.append(SendToCluster(cluster, head))

    # Other clusters

    def _await_unseen(self, now: float) -> None:
        """Wait at the end of training for clusters of which this process knows nothing yet."""
        unseen, self._unseen = self._unseen, {}
        for cluster, until in unseen.items():
            self._lost(ClusterLost(cluster, "it has not connected again", until), now)

    def _joined(self, cluster: int, now: float) -> None:
        reconnected = cluster in self._live
        self._live.add(cluster)
        self._absent.pop(cluster, None)
        self._unseen.pop(cluster, None)
        self._relay.forget(cluster)
        if self._coordinator is not None:
            if reconnected:  # it knows nothing of the open round, or has given it up
                self._coordinate(ClusterLost(cluster, "it has connected again", math.inf), now)
            self._coordinate(ClusterJoined(cluster), now)
        again = reconnected and cluster == self._relay.coordinator
        self._follow_lowest(f"cluster {cluster} has joined", now, reconnected=again)

    def _lost(self, event: ClusterLost, now: float) -> None:
        cluster = event.cluster
        if event.until > now:
            self._absent[cluster] = event.until
        else:
            self._absent.pop(cluster, None)
        if self._coordinator is not None:
            self._coordinate(event, now)
        if cluster not in self._live:
            return
        self._live.discard(cluster)
        self._relay.forget(cluster)
        self._follow_lowest(f"cluster {cluster} is gone", now)

    def _follow_lowest(self, reason: str, now: float, *, reconnected: bool = False) -> None:
        lowest = min(self._live)
        if lowest == self._relay.coordinator and not reconnected:
            return
        self._relayed(self._relay.follow(lowest, reason))
        if lowest != self._own:
            self._coordinator, self.wake = None, math.inf
        elif self._coordinator is None:
            self._take_over(now)
        if self.trigger.pending is not None:
            self._to_coordinator(self.trigger.pending)

    # Coordination by this Root

    def _new_coordinator(self) -> Coordinator:
        return Coordinator(
            self._live,
            self._own,
            mode=self._mode,
            first_round=self._relay.next_round,
            deadlines=self._deadlines,
            absent=self._absent,
            planned=self._planned,
            robust=self._robust,
        )

    def _take_over(self, now: float) -> None:
        self._coordinator = self._new_coordinator()
        early = list(self._early)
        self._early.clear()
        for event in early:
            self._coordinate(event, now)

    def _coordinate(self, event: Event, now: float) -> None:
        if self._coordinator is None:
            self._early.append(event)
            return
        for action in self._coordinator.handle(event, now):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case SendToCluster(cluster, head):
                self._send(cluster, head)
            case Wake(at):
                self.wake = at
            case RoundEnded():
                self._actions.append(action)


def _arrival(head: RoundRequest | Reply) -> Event:
    match head:
        case RoundRequest():
            return RequestArrived(head)
        case Prepared():
            return PreparedArrived(head)
        case Reduced():
            return ReducedArrived(head)
