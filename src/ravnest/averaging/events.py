"""What happens to the coordinator of rounds, and what it wants done: plain values."""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.averaging.outcome import RoundOutcome
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundRequest, Start

# Events. The heads name the cluster that speaks; whoever hands them in has checked that they came
# over that cluster's link.


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A cluster asks for a round, or is ready for one."""

    head: RoundRequest


@dataclass(frozen=True, slots=True)
class PreparedArrived:
    """A cluster has its copy."""

    head: Prepared


@dataclass(frozen=True, slots=True)
class ReducedArrived:
    """A cluster is done with its part."""

    head: Reduced


@dataclass(frozen=True, slots=True)
class ClusterJoined:
    """A cluster can be talked to, for the first time or again."""

    cluster: int


@dataclass(frozen=True, slots=True)
class ClusterLost:
    """A cluster cannot be talked to any more: its link is gone or its heart has stopped."""

    cluster: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that a Wake named has come."""


Event = RequestArrived | PreparedArrived | ReducedArrived | ClusterJoined | ClusterLost | Tick

# Actions, to be carried out in the order given.


@dataclass(frozen=True, slots=True)
class SendToCluster:
    """A head to the Root of a cluster; the coordinator's own cluster is one of them."""

    cluster: int
    head: Prepare | Start | Decision


@dataclass(frozen=True, slots=True)
class Wake:
    """Hand in a Tick at this time; it takes the place of an earlier Wake."""

    at: float


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """A round is over."""

    outcome: RoundOutcome


Action = SendToCluster | Wake | RoundEnded
