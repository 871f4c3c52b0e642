"""Coordinator of rounds: decides when clusters average, and which. Pure: events in, actions out.

The Root of the lowest live cluster runs it. If that cluster is lost, the Root of the next one starts a
new ``Coordinator`` after the newest round that it knows, and all Roots send it their unanswered
RoundRequest. They may learn of the loss before it does: it keeps messages that arrive early and handles
them when it takes over. If a Root knows a newer round, it replies so (``relay.py``), and the numbers
continue after that round. One round is open at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ravnest.averaging.deadlines import Deadlines, Timing
from ravnest.averaging.events import (
    Action,
    ClusterJoined,
    ClusterLost,
    Event,
    PreparedArrived,
    ReducedArrived,
    RequestArrived,
    SendToCluster,
    Tick,
    Wake,
)
from ravnest.averaging.outcome import RoundKind
from ravnest.averaging.two_phase_commit import TwoPhaseCommit
from ravnest.wire.messages import Decision, Prepared, RoundId, RoundRequest

Mode = Literal["background", "blocking"]

MAX_ROUND = 2**53
"""Round numbers from here on are ignored: no run has as many rounds."""


class Coordinator:
    """Decides when a round opens and which clusters take part.

    - ``background``: a round opens as soon as one cluster requests it. All clusters that still train
      take part, even after few updates: their weight accounts for that.
    - ``blocking``: a round opens when all clusters that still train have requested one, or when the
      deadline for the others has passed.
    - The final round opens when all live clusters have requested it, and no lost one may return. Until
      then the others continue with rounds of their own. If a member is lost that may return, the round
      is void, and opens again when the cluster has trained to the end once more.
    - A cluster that has the final average writes a checkpoint with it, and requests again. When all have
      done so, all are released. If one was lost before, the next final round gives it the average of
      those that have it.

    A cluster that cannot be reached, or replies too late, is missing in that round, with the reason,
    and takes part in the next. Late, repeated and unknown messages are ignored.
    """

    def __init__(
        self,
        clusters: Iterable[int],
        own: int,
        *,
        mode: Mode,
        first_round: int = 0,
        deadlines: Deadlines | None = None,
        absent: Mapping[int, float] | None = None,
        planned: Sequence[int] = (),
        robust: bool = False,
    ) -> None:
        """``absent``: clusters that are lost and may return, and until when they are waited for.

        ``planned``: samples of each cluster in an epoch, as far as they are known. ``robust``: a robust
        mean is taken.
        """
        self._planned = planned
        self._robust = robust
        self._absent = dict(absent or {})
        self._live = {*clusters, own}
        self._own = own
        self._mode = mode
        self._next = first_round
        self._timing = Timing(deadlines or Deadlines())
        self._lost: dict[int, str] = {}
        """Clusters that were connected before, and why they are gone."""
        self._requested: dict[int, float] = {}
        """Time of each unanswered request for a round, by cluster."""
        self._finished: set[int] = set()
        """Clusters that wait for the final round, or for its end."""
        self._kept: set[int] = set()
        """Those of them that have the average of a final round in a checkpoint."""
        self._released: set[int] = set()
        """Clusters that were released from the end of training and have not requested anything since."""
        self._calls: dict[int, int] = {}
        """Call of the script that each cluster trains in, as far as it has said so."""
        self._updates: dict[int, int] = {}
        """Updates of each cluster at its newest request; identifies repeated requests."""
        self._commit: TwoPhaseCommit | None = None
        """The open round."""
        self._ended = float("-inf")
        """Time at which the last round ended."""
        self._corrected: set[int] = set()
        """Clusters that have corrected the round number since a round last ran its course."""
        self._reopen = False
        """The round that was abandoned for a corrected number opens again."""
        self._wake: float | None = None
        self._actions: list[Action] = []
        """Actions outside of rounds."""

    @property
    def next_round(self) -> int:
        """The number of the next round."""
        return self._next

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event and return the actions that follow, in order."""
        actions: list[Action] = []
        self._take(event, now)
        while self._commit is not None or self._open(now):
            current = self._commit
            assert current is not None, "a round was opened"
            current.check(now)
            actions += current.actions
            current.actions.clear()
            if current.outcome is None:
                break
            self._close(current, now)
        actions += self._actions
        self._actions.clear()
        wake = self._deadline(now)
        if wake is not None and (wake != self._wake or isinstance(event, Tick)):
            actions.append(Wake(wake))
        self._wake = wake
        return actions

    # Events

    def _take(self, event: Event, now: float) -> None:
        match event:
            case RequestArrived(head):
                self._request(head, now)
            case PreparedArrived(head):
                self._prepared(head, now)
            case ReducedArrived(head):
                if self._commit is not None:
                    self._commit.reduced(head, now)
            case ClusterJoined(cluster):
                self._joined(cluster)
            case ClusterLost():
                self._cluster_lost(event, now)
            case Tick():
                pass

    def _request(self, head: RoundRequest, now: float) -> None:
        cluster = head.cluster
        if cluster not in self._live:
            return
        self._timing.interval(cluster, head.interval)
        self._released.discard(cluster)
        self._calls[cluster] = max(head.call, self._calls.get(cluster, 0))
        if head.final:
            self._requested.pop(cluster, None)
            current = self._commit
            if current is None or current.kind != "final" or cluster not in current.round.members:
                self._finished.add(cluster)
                (self._kept.add if head.kept else self._kept.discard)(cluster)
            return
        if head.updates <= self._updates.get(cluster, -1):
            return
        self._updates[cluster] = head.updates
        self._finished.discard(cluster)
        self._kept.discard(cluster)
        if not self._is_answered(cluster):
            self._requested.setdefault(cluster, now)

    def _is_answered(self, cluster: int) -> bool:
        """Return True if the open round answers a request of the cluster that arrives now.

        A request that arrives before the cluster's Prepared was sent before it, so the copy contains
        its updates. Clusters of equal speed request rounds at the same time, and would average twice
        without this rule.
        """
        current = self._commit
        if current is None:
            return False
        member = cluster in current.round.members
        return current.awaits_copy(cluster) or (current.round.assign and member)

    def _prepared(self, head: Prepared, now: float) -> None:
        current = self._commit
        if head.cluster not in self._live or head.round.number >= MAX_ROUND:
            return
        if current is not None and head.round <= current.round.id:
            current.prepared(head, now)
        elif current is None or head.cluster not in self._corrected:
            self._next = max(self._next, head.round.number + 1)
            if current is not None and current.awaits_copy(head.cluster):
                self._corrected.add(head.cluster)
                self._reopen = True
                current.abandon(
                    f"cluster {head.cluster} already knows round {head.round.number}; "
                    "the numbers continue after it",
                    now,
                )

    def _joined(self, cluster: int) -> None:
        if cluster in self._live:
            return
        self._live.add(cluster)
        self._lost.pop(cluster, None)
        self._absent.pop(cluster, None)
        if self._commit is not None:
            self._commit.missing.setdefault(cluster, "joined during the round")

    def _cluster_lost(self, event: ClusterLost, now: float) -> None:
        cluster, reason = event.cluster, event.reason
        if cluster == self._own:
            return
        self._absent[cluster] = event.until
        if cluster not in self._live:
            return
        self._live.discard(cluster)
        self._lost[cluster] = reason
        self._requested.pop(cluster, None)
        for group in (self._finished, self._kept, self._released):
            group.discard(cluster)
        self._updates.pop(cluster, None)
        self._calls.pop(cluster, None)
        current = self._commit
        if current is None:
            return
        if current.kind == "final" and cluster in current.round.members and event.until > now:
            current.abandon(f"cluster {cluster} was lost: {reason}", now, report=False)
            self._finished |= set(current.round.members) - {cluster}
            self._kept |= current.sources - {cluster}
        else:
            current.lost(cluster, reason, now)

    # Rounds

    def _open(self, now: float) -> bool:
        """Open a round if one is due, and return True if it was."""
        self._release_earlier_calls()
        training = self._live - self._finished
        if training <= self._released and self._is_over(now):
            self._release(self._finished, "all clusters have the average of the final round")
            return False
        if not training:
            if self._awaited(now):
                return False
            self._start("final", set(self._live), dict(self._lost), now)
            return True
        if not self._requested:
            return False
        missing = self._lost | dict.fromkeys(self._finished, "waits for the final round")
        if self._mode == "background" and len(training) < 2:
            self._requested.clear()  # no cluster waits, and there is none to average with
            return False
        if self._mode == "background":
            self._start("background", training, missing, now)
            return True
        absent = training - set(self._requested)
        if absent and now < self._request_deadline(absent):
            return False
        waited = f"not ready after {now - self._first_request():.1f} s"
        self._start("blocking", set(self._requested), missing | dict.fromkeys(absent, waited), now)
        return True

    def _is_over(self, now: float) -> bool:
        """Return whether all clusters at the end of training have the final average."""
        return bool(self._finished) and self._finished <= self._kept and not self._awaited(now)

    def _awaited(self, now: float) -> dict[int, float]:
        """Return the lost clusters that the end of training waits for, and until when."""
        return {cluster: until for cluster, until in self._absent.items() if now < until}

    def _release_earlier_calls(self) -> None:
        """Release clusters from the end of a call of the script that another one has left behind.

        They were restarted after the others had been released.
        """
        newest = max(self._calls.values(), default=0)
        behind = {c for c in self._finished & self._kept if self._calls[c] < newest}
        if behind:
            self._release(behind, "the other clusters train in a later call")

    def _release(self, clusters: set[int], reason: str) -> None:
        number = RoundId(self._next)
        self._next += 1
        for cluster in sorted(clusters):
            decision = Decision(number, commit=False, reason=reason, assign=True)
            self._actions.append(SendToCluster(cluster, decision))
        self._released |= clusters
        self._finished -= clusters
        self._kept -= clusters

    def _start(self, kind: RoundKind, clusters: set[int], missing: dict[int, str], now: float) -> None:
        for cluster in clusters:
            self._requested.pop(cluster, None)
        sources = self._kept & clusters
        if kind == "final":
            self._finished -= clusters
            self._kept -= clusters
        self._commit = TwoPhaseCommit(
            self._next,
            kind,
            clusters,
            missing,
            self._timing,
            now,
            sources,
            self._planned,
            robust_of=len(self._live) if self._robust else None,
        )
        self._next += 1
        self._commit.open(now)

    def _close(self, done: TwoPhaseCommit, now: float) -> None:
        self._commit, self._ended = None, now
        if done.kind == "final":
            self._released |= done.released & self._live
        if self._reopen:
            self._reopen = False
            self._kept |= done.sources
            self._start(done.kind, set(done.round.members), done.missing, now)
        else:
            self._corrected.clear()

    # Time

    def _first_request(self) -> float:
        """Return when the wait for the other requests began, at the earliest when the last round ended.

        A request from before that was late for the last round and does not shorten the wait.
        """
        return max(min(self._requested.values()), self._ended)

    def _request_deadline(self, absent: set[int]) -> float:
        return self._first_request() + self._timing.request_within(absent)

    def _deadline(self, now: float) -> float | None:
        if self._commit is not None:
            return self._commit.deadline
        if self._finished and self._live <= self._finished | self._released:
            return max(self._awaited(now).values(), default=None)
        absent = self._live - self._finished - set(self._requested)
        return self._request_deadline(absent) if self._requested and absent else None
