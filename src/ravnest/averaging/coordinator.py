"""When clusters average, and with whom: events in, actions out; no clock, no threads, no I/O.

The Root of the lowest live cluster runs it. If that cluster dies, the Root of the next one starts a
fresh ``Coordinator`` behind the newest round that it knows, and all Roots send it the Due that is
still unanswered. Those may learn of the death before it does: it keeps what reaches it early and
hands it in when it takes over. Should a Root know of a newer round, it says so (``gathering.py``)
and the numbering goes on behind it. One round is open at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    Tick,
    Wake,
)
from ravnest.averaging.outcome import RoundKind
from ravnest.averaging.round import Round
from ravnest.wire.messages import Prepared, RoundRequest

Mode = Literal["background", "blocking"]

LAST_NUMBER = 2**53
"""No run has as many rounds; a peer that says so is not believed."""


class Coordinator:
    """Decides when a round opens and who is asked.

    - ``background``: as soon as one cluster is due. All that still train are asked, however few
      updates they have made: their weight says how much they bring.
    - ``blocking``: when all that still train are due, or when the wait for the others is over.
    - At the end of training: when all live clusters have said that they are ready for the final
      round. Until then the others go on with rounds of their own.

    A cluster that cannot be reached, or comes too late, is missing in that round, with the reason,
    and takes part in the next. What peers say is never trusted to fit: what is late, repeated or
    unknown is ignored.
    """

    def __init__(
        self,
        clusters: Iterable[int],
        own: int,
        *,
        mode: Mode,
        first_round: int = 0,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._live = {*clusters, own}
        self._own = own
        self._mode = mode
        self._next = first_round
        self._timing = Timing(deadlines or Deadlines())
        self._lost: dict[int, str] = {}
        """Clusters that were there once, and why they are not."""
        self._due: dict[int, float] = {}
        """When each cluster became due; those of the open round are not among them."""
        self._ready: set[int] = set()
        """Clusters that wait for the final round."""
        self._updates: dict[int, int] = {}
        """Of each cluster at its newest Due, to know a repeated one."""
        self._round: Round | None = None
        self._ended = float("-inf")
        """When the last round was over."""
        self._corrected: set[int] = set()
        """Clusters that have set the numbering right since a round last went its way."""
        self._again = False
        """The round that was abandoned for that opens anew."""
        self._wake: float | None = None

    @property
    def next_round(self) -> int:
        """The number of the next round that opens."""
        return self._next

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in an event; what to do about it, in order."""
        actions: list[Action] = []
        self._take(event, now)
        while self._round is not None or self._open(now):
            current = self._round
            assert current is not None, "a round was opened"
            current.check(now)
            actions += current.actions
            current.actions.clear()
            if current.outcome is None:
                break
            self._close(current, now)
        wake = self._deadline()
        if wake is not None and (wake != self._wake or isinstance(event, Tick)):
            actions.append(Wake(wake))
        self._wake = wake
        return actions

    # What happened

    def _take(self, event: Event, now: float) -> None:
        match event:
            case RequestArrived(head):
                self._take_due(head, now)
            case PreparedArrived(head):
                self._take_held(head, now)
            case ReducedArrived(head):
                if self._round is not None:
                    self._round.reduced(head, now)
            case ClusterJoined(cluster):
                self._joined(cluster)
            case ClusterLost(cluster, reason):
                self._take_lost(cluster, reason, now)
            case Tick():
                pass

    def _take_due(self, head: RoundRequest, now: float) -> None:
        cluster = head.cluster
        if cluster not in self._live:
            return
        self._timing.interval(cluster, head.interval)
        if head.final:
            self._due.pop(cluster, None)
            current = self._round
            if current is None or current.kind != "final" or cluster not in current.clusters:
                self._ready.add(cluster)
            return
        if head.updates <= self._updates.get(cluster, -1):
            return
        self._updates[cluster] = head.updates
        self._ready.discard(cluster)
        if not self._answers(cluster):
            self._due.setdefault(cluster, now)

    def _answers(self, cluster: int) -> bool:
        """Whether the open round answers a Due of the cluster that comes now.

        It was sent before the cluster's Held if it comes before it: what it counts is in the copy.
        Clusters of equal speed become due together, and would average twice without this.
        """
        current = self._round
        if current is None:
            return False
        return current.awaits(cluster) or (current.assign and cluster in current.clusters)

    def _take_held(self, head: Prepared, now: float) -> None:
        current = self._round
        if head.cluster not in self._live or head.round.number >= LAST_NUMBER:
            return
        if current is not None and head.round <= current.id:
            current.held(head, now)
        elif current is None or head.cluster not in self._corrected:
            self._next = max(self._next, head.round.number + 1)
            if current is not None and current.awaits(head.cluster):
                self._corrected.add(head.cluster)
                self._again = True
                current.abandon(
                    f"cluster {head.cluster} knows of round {head.round.number}"
                    " already; the numbering goes on behind it",
                    now,
                )

    def _joined(self, cluster: int) -> None:
        if cluster in self._live:
            return
        self._live.add(cluster)
        self._lost.pop(cluster, None)
        if self._round is not None:
            self._round.missing.setdefault(cluster, "joined while the round was under way")

    def _take_lost(self, cluster: int, reason: str, now: float) -> None:
        if cluster not in self._live or cluster == self._own:
            return
        self._live.discard(cluster)
        self._lost[cluster] = reason
        self._due.pop(cluster, None)
        self._ready.discard(cluster)
        self._updates.pop(cluster, None)
        if self._round is not None:
            self._round.lost(cluster, reason, now)

    # Rounds

    def _open(self, now: float) -> bool:
        """Open a round if it is time for one."""
        training = self._live - self._ready
        if not training:
            self._start("final", self._live, dict(self._lost), now)
            return True
        if not self._due:
            return False
        missing = self._lost | dict.fromkeys(self._ready, "waits for the final round")
        if self._mode == "background" and len(training) < 2:
            self._due.clear()  # nobody waits, and there is nobody to average with
            return False
        if self._mode == "background":
            self._start("background", training, missing, now)
            return True
        absent = training - set(self._due)
        if absent and now < self._due_deadline(absent):
            return False
        waited = f"not ready after {now - self._first_due():.1f} s"
        self._start("blocking", set(self._due), missing | dict.fromkeys(absent, waited), now)
        return True

    def _start(self, kind: RoundKind, clusters: set[int], missing: dict[int, str], now: float) -> None:
        for cluster in clusters:
            self._due.pop(cluster, None)
        if kind == "final":
            self._ready -= clusters
        self._round = Round(self._next, kind, clusters, missing, self._timing, now)
        self._next += 1
        self._round.open(now)

    def _close(self, done: Round, now: float) -> None:
        self._round, self._ended = None, now
        if self._again:
            self._again = False
            self._start(done.kind, set(done.clusters), done.missing, now)
        else:
            self._corrected.clear()

    # Time

    def _first_due(self) -> float:
        """From when on the others are waited for: whoever was late last time has no say in it."""
        return max(min(self._due.values()), self._ended)

    def _due_deadline(self, absent: set[int]) -> float:
        return self._first_due() + self._timing.due_within(absent)

    def _deadline(self) -> float | None:
        if self._round is not None:
            return self._round.deadline
        absent = self._live - self._ready - set(self._due)
        return self._due_deadline(absent) if self._due and absent else None
