"""Two-phase commit of one round, at the coordinator. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ravnest.averaging.checks import bounded_weights, counted_samples, outliers, usual_scales
from ravnest.averaging.deadlines import Timing
from ravnest.averaging.events import Command, RoundEnded, SendToCluster
from ravnest.averaging.outcome import RoundKind, RoundOutcome
from ravnest.averaging.round import Round
from ravnest.store.robust_mean import trim_of
from ravnest.types import ROBUST_CLUSTERS
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundId, Start

BEHIND = "it went back to a checkpoint before the last average, and takes that of the others"
ATTEMPTS = 3
"""Attempts of a round; a final round is retried until its deadline, while two clusters are alive."""


class TwoPhaseCommit:
    """Asks clusters to prepare, starts the average with those that did, and decides.

    No cluster averages before all members are known, and none applies an average before all members
    have it: no model is averaged in part. A failed attempt is followed at once by the next one,
    without the cluster that caused the failure. For clusters that take part again, the new Prepare
    itself voids the previous attempt, so training that has paused for the round stays paused.
    Clusters that are left out receive a Decision with the reason.

    Methods append to ``actions``; the caller takes them. ``outcome`` is set when the round is over.
    """

    def __init__(
        self,
        number: int,
        kind: RoundKind,
        clusters: Iterable[int],
        missing: Mapping[int, str],
        timing: Timing,
        now: float,
        sources: Iterable[int] = (),
        planned: Sequence[int] = (),
        *,
        robust_of: int | None = None,
    ) -> None:
        """``sources``: clusters that have the average of an earlier final round; the others get it.

        ``planned``: samples of each cluster in an epoch, as far as they are known. ``robust_of``: number
        of live clusters, if a robust mean is taken, in which all that contribute count the same.
        """
        self._planned = planned
        self._robust_of = robust_of
        self.kind: RoundKind = kind
        self.sources = frozenset(sources)
        self.released: set[int] = set()
        """Clusters that a Decision has released without an average."""
        self.round = Round(RoundId(number), kind != "background", tuple(sorted(clusters)), now)
        """The current attempt."""
        self.missing = dict(missing)
        """Clusters that do not take part, with the reason."""
        self.deadline: float | None = None
        self.outcome: RoundOutcome | None = None
        self.actions: list[SendToCluster | RoundEnded] = []
        self._timing = timing
        self._opened = now
        self._last = now + timing.limits.final_most if kind == "final" else None
        """Time at which a final round is given up."""
        self._sent_bytes = 0
        self._disagreed = False
        self._outliers: Mapping[int, str] = {}
        """Clusters whose parameters are far larger than those of the others."""
        self._behind: set[int] = set()
        """Clusters that went back to a checkpoint before the last average of the others."""

    def awaits_copy(self, cluster: int) -> bool:
        """Return True if the cluster has not replied to Prepare yet."""
        return self.round.state == "preparing" and cluster in self.round.awaited

    # Events

    def open(self, now: float) -> None:
        """Send Prepare; with fewer than two clusters, close the round at once."""
        if len(self.round.members) >= self._least:
            self._prepare(now)
        else:
            self._close(self._too_few(), now, announce=self.round.assign)

    def prepared(self, head: Prepared, now: float) -> None:
        """Take a cluster's reply to Prepare."""
        if head.round == self.round.id and self.awaits_copy(head.cluster):
            self._timing.answered(head.cluster, now - self.round.since)
            self.round = self.round.with_prepared(head.cluster, head)

    def reduced(self, head: Reduced, now: float) -> None:
        """Take a cluster's reply to Start."""
        current = self.round
        awaited = current.state == "reducing" and head.cluster in current.awaited
        if head.round != current.id or not awaited:
            return
        self.round = current.with_reduced(head.cluster, head)
        self._sent_bytes += max(0, head.sent_bytes)
        if head.problem:
            soon = now + self._timing.limits.grace
            self.deadline = soon if self.deadline is None else min(soon, self.deadline)

    def lost(self, cluster: int, reason: str, now: float) -> None:
        """Continue without a cluster that is gone; after Start this voids the attempt."""
        if self._robust_of is not None:
            self._robust_of -= 1
        if cluster not in self.round.members:
            return
        if self.round.state == "reducing":
            self._retry(f"cluster {cluster} was lost: {reason}", {cluster: reason}, now, gone=True)
        else:
            self._leave_out({cluster: reason}, tell=False)
            if len(self.round.members) < self._least:
                self._close(self._too_few(), now)

    def check(self, now: float) -> None:
        """Continue if all clusters have replied or the deadline has passed."""
        while self.outcome is None:
            late = self.deadline is not None and now >= self.deadline
            if self.round.awaited and not late:
                return
            if late and self._last is not None and now >= self._last:
                self._give_up(now)
            elif self.round.state == "reducing":
                self._decide(now)
            else:
                self._start(now)

    def abandon(self, reason: str, now: float, *, report: bool = True) -> None:
        """End the round without a Decision, because a newer Prepare follows."""
        self._close(reason, now, announce=False)
        if not report:
            self.actions.pop()

    # Steps

    def _prepare(self, now: float) -> None:
        members, timing = self.round.members, self._timing
        final = self.kind == "final"
        self._wait(timing.final_answer_within(members) if final else timing.answer_within(members), now)
        self._send(Prepare(self.round.id, self.round.assign))

    def _start(self, now: float) -> None:
        waited = now - self.round.since
        silent = self.round.awaited
        for cluster in silent:
            self._timing.answered(cluster, waited)
        self._leave_out(dict.fromkeys(silent, f"no reply within {waited:.1f} s"))
        if len(self.round.members) < self._least:
            self._close(self._too_few(), now)
            return
        replies = self.round.prepared
        valid = {c: head for c, head in replies.items() if not head.problem}
        self._outliers = outliers(valid)
        usable = {c: head for c, head in valid.items() if c not in self._outliers}
        self._behind = self._left_behind(usable)
        able = {c: head.samples for c, head in usable.items() if c not in self._behind}
        if not able:
            causes = "; ".join(f"cluster {c}: {text}" for c, text in sorted(self._problems().items()))
            self._close(f"no cluster has valid parameters: {causes}", now)
            return
        self.round = self.round.start(
            dict.fromkeys(self.round.members, 0.0) | self._weights_of(able), now
        )
        self._wait(self._timing.limits.reduce_most, now)
        codec, base = self._compression()
        usual = usual_scales(valid[cluster] for cluster in able)
        self._send(Start(self.round.id, dict(self.round.weights), codec, base, usual))

    def _left_behind(self, copies: Mapping[int, Prepared]) -> set[int]:
        """Return the clusters that take the average of the others, because they went back behind it.

        Only in background rounds, which a cluster requests as soon as it is back: at a later one it
        would lose what it has trained since. None if no cluster has a newer average.
        """
        behind = {c for c, head in copies.items() if head.behind and self.kind == "background"}
        return set() if behind == copies.keys() else behind

    def _weights_of(self, samples: Mapping[int, int]) -> dict[int, float]:
        """Return the weights of clusters with valid parameters, from their samples."""
        sources = sorted(self.sources & samples.keys())
        if self._robust_of is not None:
            return shares(dict.fromkeys(self._contributors(sources, samples), 1))
        if sources:
            return {sources[0]: 1.0}
        return bounded_weights(shares(counted_samples(samples, self._planned)), self._planned)

    def _contributors(self, sources: Sequence[int], samples: Mapping[int, int]) -> Iterable[int]:
        """Return the clusters whose values enter a robust mean.

        If too few have samples or valid parameters, others contribute too, instead of a plain mean that
        one cluster could move: wrong values are left out of the mean as those of a liar are.
        """
        trained = [cluster for cluster, count in samples.items() if count > 0]
        for found in (sources, trained, samples):
            if len(found) >= self._least or (found and self._least < ROBUST_CLUSTERS):
                return found
        return self.round.members

    @property
    def _least(self) -> int:
        """The number of clusters that a round needs: 2, or those of a robust mean if they are alive."""
        return ROBUST_CLUSTERS if (self._robust_of or 0) >= ROBUST_CLUSTERS else 2

    def _wait(self, seconds: float, now: float) -> None:
        """Set the deadline of the step that begins; that of a final round limits it."""
        self.deadline = now + seconds if self._last is None else min(now + seconds, self._last)

    def _give_up(self, now: float) -> None:
        """End a final round that takes too long; the clusters end without it."""
        waited = f"{now - self._opened:.0f} s"
        late = ", ".join(str(cluster) for cluster in sorted(self.round.awaited))
        self._close(f"given up after {waited}, without a reply of cluster {late}", now)

    def _compression(self) -> tuple[str, RoundId | None]:
        """Return the codec of the attempt and the average it is based on.

        Values are compressed if all clusters ask for the same codec and hold the same last average.
        Final rounds are exact.
        """
        wishes = {(reply.codec, reply.base) for reply in self.round.prepared.values()}
        exact = self.kind == "final" or len(wishes) > 1
        codec, base = next(iter(wishes))
        return ("raw", None) if exact or base is None else (codec, base)

    def _decide(self, now: float) -> None:
        replies = self.round.reduced
        silent = set(self.round.awaited)
        wrong = [f"cluster {c}: {head.problem}" for c, head in sorted(replies.items()) if head.wrong]
        if wrong:
            # Nobody knows whose values are wrong, and those who noticed are not to blame; others may be
            # silent because those who noticed send nothing.
            self._reject("; ".join(wrong), now)
            return
        blamed = Counter(self._culprit(head) for head in replies.values() if head.problem)
        if silent or blamed:
            self._retry_without_culprits(silent, blamed, now)
            return
        reason = disagreement({c: head.digests for c, head in replies.items()})
        if not reason:
            self._close("", now)
        else:
            self._reject(reason, now)

    def _reject(self, reason: str, now: float) -> None:
        """Retry once with all clusters, then give up."""
        if self._disagreed:
            self._close(f"{reason}, twice: a node computes or transmits wrongly", now)
        else:
            self._disagreed = True
            self._retry(reason, {}, now)

    def _problems(self) -> dict[int, str]:
        """Return why clusters have no weight in the average."""
        replies = self.round.prepared.items()
        problems = {c: head.problem for c, head in replies if head.problem} | dict(self._outliers)
        return problems | dict.fromkeys(self._behind, BEHIND)

    def _culprit(self, head: Reduced) -> int:
        """Return the cluster that a failed one blames; itself if it blames no other member."""
        named = head.missing in self.round.members and head.missing != head.cluster
        return head.missing if named and head.missing is not None else head.cluster

    def _retry_without_culprits(self, silent: set[int], blamed: Counter[int], now: float) -> None:
        """Retry without the clusters at fault.

        If a cluster hangs, those behind it in a ring hang too, and each blames the one before: the
        cluster that is blamed and silent is the cause. If all blamed clusters have replied, only one
        is left out (the one blamed most, then the last), because two clusters that cannot reach each
        other blame each other. A final round first retries with all clusters.
        """
        waited = f"not done within {now - self.round.since:.1f} s"
        said = "; ".join(
            f"cluster {c}: {head.problem}"
            for c, head in sorted(self.round.reduced.items())
            if head.problem
        )
        without: dict[int, str] = {}
        if self.kind != "final" or self.round.id.attempt + 1 >= ATTEMPTS:
            hanging = silent & set(blamed) if blamed else silent
            worst = max(blamed, key=lambda cluster: (blamed[cluster], cluster), default=0)
            without = dict.fromkeys(hanging, waited) or {worst: said}
        late = ", ".join(str(cluster) for cluster in sorted(silent))
        self._retry(said or f"cluster {late} {waited}", without, now)

    def _retry(self, reason: str, without: Mapping[int, str], now: float, *, gone: bool = False) -> None:
        self._leave_out(without, tell=not gone)
        if len(self.round.members) < self._least:
            self._close(f"{self._too_few()} ({reason})", now)
        elif self.kind != "final" and self.round.id.attempt + 1 >= ATTEMPTS:
            self._close(f"given up after {ATTEMPTS} attempts, the last: {reason}", now)
        else:
            self.round = self.round.next_attempt(now)
            self._prepare(now)

    def _leave_out(self, reasons: Mapping[int, str], *, tell: bool = True) -> None:
        self.round = self.round.without(reasons)
        for cluster, reason in sorted(reasons.items()):
            self.missing[cluster] = reason
            if tell:
                self.released.add(cluster)
                self.actions.append(SendToCluster(cluster, self._decision(False, reason)))

    def _too_few(self) -> str:
        members = self.round.members
        if not members:
            return "no cluster takes part"
        if len(members) == 1:
            return f"only cluster {members[0]} takes part"
        shown = ", ".join(str(cluster) for cluster in members)
        return f"only clusters {shown} take part, and a robust mean needs {self._least}"

    def _close(self, reason: str, now: float, *, announce: bool = True) -> None:
        current, committed = self.round, not reason
        self.outcome = RoundOutcome(
            round=current.id,
            kind=self.kind,
            committed=committed,
            reason=reason,
            weights=dict(current.weights),
            missing=dict(self.missing),
            problems={c: why for c, why in self._problems().items() if not current.weights.get(c)},
            sent_bytes=self._sent_bytes,
            seconds=now - self._opened,
            digests=current.reduced[current.members[0]].digests if committed else {},
            trimmed=0
            if self._robust_of is None
            else trim_of(sum(w > 0 for w in current.weights.values())),
        )
        if announce and not committed:
            self.released |= set(current.members)
        if announce:
            self._send(self._decision(committed, reason or self.outcome.describe()))
        self.actions.append(RoundEnded(self.outcome))

    def _decision(self, commit: bool, reason: str) -> Decision:
        return Decision(self.round.id, commit, reason, self.round.assign)

    def _send(self, head: Command) -> None:
        self.actions += [SendToCluster(cluster, head) for cluster in self.round.members]


def shares(samples: Mapping[int, int]) -> dict[int, float]:
    """Return weights in proportion to the samples, which sum to 1; equal weights without samples."""
    total = sum(samples.values())
    if total == 0:
        return {cluster: 1 / len(samples) for cluster in samples}
    return {cluster: count / total for cluster, count in samples.items()}


def disagreement(digests: Mapping[int, Mapping[int, str]]) -> str:
    """Describe where clusters hold different averages; empty if they agree.

    Every cluster has exactly one owner of each ring, so a cluster that lacks a ring disagrees too.
    """
    for ring in sorted({ring for found in digests.values() for ring in found}):
        found = {cluster: by_ring.get(ring, "none") for cluster, by_ring in sorted(digests.items())}
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{digest} at cluster {cluster}" for cluster, digest in found.items())
            return f"the averages of ring {ring} differ: {shown}"
    return ""
