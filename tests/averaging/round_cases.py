"""A coordinator in virtual time, with scripted replies of the clusters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ravnest.averaging.coordinator import Coordinator, Mode
from ravnest.averaging.deadlines import Deadlines
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
from ravnest.averaging.outcome import RoundOutcome
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundId, RoundRequest, Start


class Case:
    """A coordinator, the time, and all its actions so far."""

    def __init__(
        self,
        clusters: int | Iterable[int] = 3,
        mode: Mode = "background",
        *,
        first_round: int = 0,
        deadlines: Deadlines | None = None,
        planned: Sequence[int] = (),
        robust: bool = False,
    ) -> None:
        members = range(clusters) if isinstance(clusters, int) else clusters
        self.coordinator = Coordinator(
            members,
            min(members),
            mode=mode,
            first_round=first_round,
            deadlines=deadlines,
            planned=planned,
            robust=robust,
        )
        self.now = 0.0
        self.done: list[Action] = []

    def feed(self, event: Event) -> list[Action]:
        actions = self.coordinator.handle(event, self.now)
        self.done += actions
        return actions

    def request(
        self,
        cluster: int,
        updates: int = 8,
        *,
        interval: float = 0.0,
        final: bool = False,
        kept: bool = False,
        call: int = 0,
    ) -> list[Action]:
        head = RoundRequest(cluster, updates, 32 * updates, interval, final, kept, call)
        return self.feed(RequestArrived(head))

    def prepared(
        self,
        cluster: int,
        samples: int = 1,
        problem: str = "",
        of: RoundId | None = None,
        scales: Mapping[int, float] | None = None,
        *,
        behind: bool = False,
    ) -> list[Action]:
        of = of or self.round
        found = dict(scales or {})
        head = Prepared(of, cluster, cluster, samples, problem, scales=found, behind=behind)
        return self.feed(PreparedArrived(head))

    def reduced(
        self,
        cluster: int,
        digest: str = "same",
        problem: str = "",
        missing: int | None = None,
        of: RoundId | None = None,
        *,
        wrong: bool = False,
    ) -> list[Action]:
        head = Reduced(of or self.round, cluster, cluster, {0: digest}, 100, problem, missing, wrong)
        return self.feed(ReducedArrived(head))

    def lost(
        self, cluster: int, reason: str = "its link is gone", *, until: float = -math.inf
    ) -> list[Action]:
        return self.feed(ClusterLost(cluster, reason, until))

    def joined(self, cluster: int) -> list[Action]:
        return self.feed(ClusterJoined(cluster))

    def wait(self, seconds: float) -> list[Action]:
        """Let time pass, with a Tick at each Wake."""
        end, found = self.now + seconds, list[Action]()
        while (wake := self.wake) is not None and self.now < wake <= end:
            self.now = wake
            found += self.feed(Tick())
        self.now = end
        return found

    def all_prepare(self, *clusters: int, samples: int = 1) -> list[Action]:
        return [action for cluster in clusters for action in self.prepared(cluster, samples)]

    def all_reduce(self, *clusters: int) -> list[Action]:
        return [action for cluster in clusters for action in self.reduced(cluster)]

    @property
    def round(self) -> RoundId:
        """The newest round that was prepared."""
        return [s.head.round for s in self.sends if isinstance(s.head, Prepare)][-1]

    @property
    def sends(self) -> list[SendToCluster]:
        return [action for action in self.done if isinstance(action, SendToCluster)]

    @property
    def wake(self) -> float | None:
        wakes = [action.at for action in self.done if isinstance(action, Wake)]
        return wakes[-1] if wakes else None

    @property
    def outcomes(self) -> list[RoundOutcome]:
        return [action.outcome for action in self.done if isinstance(action, RoundEnded)]

    @property
    def outcome(self) -> RoundOutcome:
        return self.outcomes[-1]


def asked(actions: Iterable[Action]) -> list[int]:
    """Return the clusters that receive a Prepare."""
    return [a.cluster for a in actions if isinstance(a, SendToCluster) and isinstance(a.head, Prepare)]


def weights(actions: Iterable[Action]) -> dict[int, float]:
    """Return the weights of the Start among the actions, which all its members receive."""
    sent = [a for a in actions if isinstance(a, SendToCluster) and isinstance(a.head, Start)]
    (found,) = {tuple(sorted(a.head.weights.items())) for a in sent if isinstance(a.head, Start)}
    assert [a.cluster for a in sent] == [cluster for cluster, _ in found]
    return dict(found)


def decided(actions: Iterable[Action]) -> dict[int, bool]:
    """Return the clusters that receive a Decision, and if it commits."""
    sent = [a for a in actions if isinstance(a, SendToCluster)]
    return {a.cluster: a.head.commit for a in sent if isinstance(a.head, Decision)}
