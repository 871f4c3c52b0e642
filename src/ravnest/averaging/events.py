"""Messages of a round by direction, and the events and actions of the coordinator: plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ravnest.averaging.outcome import RoundOutcome
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundRequest, Start

Command = Prepare | Start | Decision
"""Messages from the coordinator to the Roots, which relay them to their nodes."""
Reply = Prepared | Reduced
"""Messages from nodes to their Root, which combines them into one reply to the coordinator."""
RoundMessage = RoundRequest | Command | Reply
"""Messages between Roots."""

# Events. Messages name the cluster that sent them; the service has checked that they came over a link
# to the Root of that cluster.


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A cluster requests a round, or is ready for one."""

    head: RoundRequest


@dataclass(frozen=True, slots=True)
class PreparedArrived:
    """A cluster has copied its parameters."""

    head: Prepared


@dataclass(frozen=True, slots=True)
class ReducedArrived:
    """A cluster has the average, or failed to compute it."""

    head: Reduced


@dataclass(frozen=True, slots=True)
class ClusterJoined:
    """The Root of a cluster has connected, for the first time or again."""

    cluster: int


@dataclass(frozen=True, slots=True)
class ClusterLost:
    """The link to the Root of a cluster is gone."""

    cluster: int
    reason: str
    until: float = -math.inf
    """Time until which the cluster may return, and the final round waits for it."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of the last Wake has come."""


Event = RequestArrived | PreparedArrived | ReducedArrived | ClusterJoined | ClusterLost | Tick

# Actions, to be carried out in the given order.


@dataclass(frozen=True, slots=True)
class SendToCluster:
    """Send a message to the Root of a cluster; the coordinator also addresses its own cluster."""

    cluster: int
    head: RoundMessage


@dataclass(frozen=True, slots=True)
class Wake:
    """Pass in a Tick at this time; replaces an earlier Wake."""

    at: float


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """A round is over, committed or not."""

    outcome: RoundOutcome


Action = SendToCluster | Wake | RoundEnded
