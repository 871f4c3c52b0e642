"""One round, from the proposal to the verdict, as the coordinator sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ravnest.averaging.deadlines import Timing
from ravnest.averaging.events import RoundEnded, SendToCluster
from ravnest.averaging.outcome import RoundKind, RoundOutcome
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundId, Start

ATTEMPTS = 3
"""So often a round is tried; a final round goes on for as long as two clusters live."""


class Round:
    """Asks clusters to hold a copy, lets those that did average, and gives the verdict.

    Nobody averages before all members are known, and nobody applies an average before all have it:
    no model is half averaged. An attempt that fails is followed by the next at once, without
    whoever failed it. To those that are asked again the new Propose itself says that the attempt
    before is void, so that whoever has stopped for the round stays stopped; those that are not get
    a Settle with the reason.

    Methods append to ``actions``; the owner takes them. ``outcome`` is there once the round is over.
    """

    def __init__(
        self,
        number: int,
        kind: RoundKind,
        clusters: Iterable[int],
        missing: Mapping[int, str],
        timing: Timing,
        now: float,
    ) -> None:
        self.id = RoundId(number)
        self.kind: RoundKind = kind
        self.clusters = sorted(clusters)
        """Those that take part, as far as is known."""
        self.missing = dict(missing)
        self.deadline: float | None = None
        self.outcome: RoundOutcome | None = None
        self.actions: list[SendToCluster | RoundEnded] = []
        self._timing = timing
        self._opened = self._since = now
        self._held: dict[int, Prepared] = {}
        self._weights: dict[int, float] = {}
        """Empty until all members are known."""
        self._reduced: dict[int, Reduced] = {}
        self._sent_bytes = 0
        self._disagreed = False

    @property
    def assign(self) -> bool:
        """Members have stopped, and take the average as it is."""
        return self.kind != "background"

    def awaits(self, cluster: int) -> bool:
        """Whether the cluster has yet to hold its copy."""
        return not self._weights and cluster in self.clusters and cluster not in self._held

    # What happened

    def open(self, now: float) -> None:
        """Ask the clusters; with fewer than two there is nothing to average."""
        if len(self.clusters) >= 2:
            self._propose(now)
        else:
            self._close(self._too_few(), now, settle=self.assign)

    def held(self, head: Prepared, now: float) -> None:
        """A cluster has its copy, or says why it has none to give."""
        if head.round == self.id and self.awaits(head.cluster):
            self._held[head.cluster] = head
            self._timing.answered(head.cluster, now - self._since)

    def reduced(self, head: Reduced, now: float) -> None:
        """A cluster has the average, or says why not."""
        known = head.cluster not in self._weights or head.cluster in self._reduced
        if head.round != self.id or known:
            return
        self._reduced[head.cluster] = head
        self._sent_bytes += max(0, head.sent_bytes)
        if head.problem:
            soon = now + self._timing.limits.grace
            self.deadline = soon if self.deadline is None else min(soon, self.deadline)

    def lost(self, cluster: int, reason: str, now: float) -> None:
        """A cluster is gone; once averaging has begun, that voids the attempt."""
        if cluster not in self.clusters:
            return
        if self._weights:
            self._try_again(f"cluster {cluster} was lost: {reason}", {cluster: reason}, now, gone=True)
        else:
            self._leave_out({cluster: reason}, tell=False)
            if len(self.clusters) < 2:
                self._close(self._too_few(), now)

    def check(self, now: float) -> None:
        """Go on if everyone has answered, or the time for it is over."""
        while self.outcome is None:
            late = self.deadline is not None and now >= self.deadline
            answers = self._reduced if self._weights else self._held
            if len(answers) < len(self.clusters) and not late:
                return
            if self._weights:
                self._judge(now)
            else:
                self._start(now)

    def abandon(self, reason: str, now: float) -> None:
        """End without a verdict for the members: a newer Propose is to follow."""
        self._close(reason, now, settle=False)

    # Steps

    def _propose(self, now: float) -> None:
        self._held, self._weights, self._reduced = {}, {}, {}
        self._since = now
        wait = None if self.kind == "final" else self._timing.answer_within(self.clusters)
        self.deadline = None if wait is None else now + wait
        self._send(Prepare(self.id, self.assign))

    def _start(self, now: float) -> None:
        silent = {cluster for cluster in self.clusters if cluster not in self._held}
        waited = now - self._since
        for cluster in silent:
            self._timing.answered(cluster, waited)
        self._leave_out(dict.fromkeys(silent, f"not answered within {waited:.1f} s"))
        if len(self.clusters) < 2:
            self._close(self._too_few(), now)
            return
        able = {c: max(0, head.samples) for c, head in self._held.items() if not head.problem}
        if not able:
            causes = "; ".join(f"cluster {c}: {head.problem}" for c, head in sorted(self._held.items()))
            self._close(f"no cluster has parameters to give: {causes}", now)
            return
        self._weights = dict.fromkeys(self.clusters, 0.0) | shares(able)
        self._since = now
        self.deadline = None if self.kind == "final" else now + self._timing.reduce_within()
        codec, base = self._coding()
        self._send(Start(self.id, dict(self._weights), codec, base))

    def _coding(self) -> tuple[str, RoundId | None]:
        """How the average travels: compressed if all want the same and know the same last average.

        The end result is exact.
        """
        wishes = {(held.codec, held.base) for held in self._held.values()}
        exact = self.kind == "final" or len(wishes) > 1
        codec, base = next(iter(wishes))
        return ("raw", None) if exact or base is None else (codec, base)

    def _judge(self, now: float) -> None:
        silent = {cluster for cluster in self.clusters if cluster not in self._reduced}
        blamed = Counter(self._culprit(head) for head in self._reduced.values() if head.problem)
        if not blamed:
            self._timing.reduced(now - self._since)
        if silent or blamed:
            self._leave_out_culprits(silent, blamed, now)
            return
        reason = disagreement({c: head.digests for c, head in self._reduced.items()})
        if not reason:
            self._close("", now)
        elif self._disagreed:
            self._close(f"{reason}, twice: a node computes or transmits wrongly", now)
        else:
            self._disagreed = True
            self._try_again(reason, {}, now)

    def _culprit(self, head: Reduced) -> int:
        """Whom a cluster that failed names; itself if it names nobody that could be meant."""
        named = head.missing in self.clusters and head.missing != head.cluster
        return head.missing if named and head.missing is not None else head.cluster

    def _leave_out_culprits(self, silent: set[int], blamed: Counter[int], now: float) -> None:
        """Try again without whoever is at fault.

        Where a cluster hangs, so do those behind it in a ring, and each names the one before: the
        one that is named and says nothing is the cause. If all that are named have spoken, only
        one is left out, of equals the last, since two that cannot reach each other name each
        other. A final round gives everyone another chance first.
        """
        waited = f"not done within {now - self._since:.1f} s"
        said = "; ".join(
            f"cluster {c}: {head.problem}" for c, head in sorted(self._reduced.items()) if head.problem
        )
        without: dict[int, str] = {}
        if self.kind != "final" or self.id.attempt + 1 >= ATTEMPTS:
            hanging = silent & set(blamed) if blamed else silent
            worst = max(blamed, key=lambda cluster: (blamed[cluster], cluster), default=0)
            without = dict.fromkeys(hanging, waited) or {worst: said}
        late = ", ".join(str(cluster) for cluster in sorted(silent))
        self._try_again(said or f"cluster {late} {waited}", without, now)

    def _try_again(
        self, reason: str, without: Mapping[int, str], now: float, *, gone: bool = False
    ) -> None:
        self._leave_out(without, tell=not gone)
        if len(self.clusters) < 2:
            self._close(f"{self._too_few()} ({reason})", now)
        elif self.kind != "final" and self.id.attempt + 1 >= ATTEMPTS:
            self._close(f"given up after {ATTEMPTS} attempts, the last: {reason}", now)
        else:
            self.id = RoundId(self.id.number, self.id.attempt + 1)
            self._propose(now)

    def _leave_out(self, reasons: Mapping[int, str], *, tell: bool = True) -> None:
        for cluster, reason in sorted(reasons.items()):
            self.clusters.remove(cluster)
            self._held.pop(cluster, None)
            self._weights.pop(cluster, None)
            self.missing[cluster] = reason
            if tell:
                self.actions.append(SendToCluster(cluster, self._settle(False, reason)))

    def _too_few(self) -> str:
        only = f"only cluster {self.clusters[0]} is" if self.clusters else "no cluster is"
        return f"{only} there to take part"

    def _close(self, reason: str, now: float, *, settle: bool = True) -> None:
        problems = {c: head.problem for c, head in self._held.items() if head.problem}
        committed = not reason
        digests = self._reduced[self.clusters[0]].digests if committed else {}
        self.outcome = RoundOutcome(
            round=self.id,
            kind=self.kind,
            committed=committed,
            reason=reason,
            weights=dict(self._weights),
            missing=dict(self.missing),
            problems=problems,
            sent_bytes=self._sent_bytes,
            seconds=now - self._opened,
            digests=digests,
        )
        if settle:
            self._send(self._settle(committed, reason or self.outcome.describe()))
        self.actions.append(RoundEnded(self.outcome))

    def _settle(self, commit: bool, reason: str) -> Decision:
        return Decision(self.id, commit, reason, self.assign)

    def _send(self, head: Prepare | Start | Decision) -> None:
        self.actions += [SendToCluster(cluster, head) for cluster in self.clusters]


def shares(samples: Mapping[int, int]) -> dict[int, float]:
    """Weights in proportion to the samples; equal where there are none. They add up to 1."""
    total = sum(samples.values())
    if total == 0:
        return {cluster: 1 / len(samples) for cluster in samples}
    return {cluster: count / total for cluster, count in samples.items()}


def disagreement(digests: Mapping[int, Mapping[int, str]]) -> str:
    """Where clusters hold different averages, in words; empty if they agree.

    Every cluster has exactly one owner of each ring: one that does not name a ring differs too.
    """
    for ring in sorted({ring for found in digests.values() for ring in found}):
        found = {cluster: of.get(ring, "none") for cluster, of in sorted(digests.items())}
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{digest} at cluster {cluster}" for cluster, digest in found.items())
            return f"the averages of ring {ring} differ: {shown}"
    return ""
