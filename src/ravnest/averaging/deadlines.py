"""Deadlines of the coordinator, derived from measured times."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ravnest import deadlines

DECAY = 0.7
"""Factor by which the longest measured time shrinks with each new measurement."""


@dataclass(frozen=True)
class Deadlines:
    """Limits of the waits, in seconds.

    A wait is ``factor`` times the measured time plus a minimum (``_floor``), up to a maximum
    (``_most``). Links report peers that are gone: all these limits are longer than the outages that
    links tolerate, so that an outage delays a round and does not change it.
    """

    factor: float = 3.0
    answer_floor: float = deadlines.ROUND_ANSWER
    """Minimum for Prepared: a node copies its parameters between two computations."""
    answer_most: float = deadlines.ROUND_ANSWER_MOST
    """Maximum for Prepared, used too while nothing is measured."""
    reduce_most: float = deadlines.ROUND_REDUCE_MOST
    """Maximum for Reduced. Nodes report an all-reduce that makes no progress (``ring_stall``); one that
    makes progress is not given up for being slow."""
    request_floor: float = deadlines.ROUND_REQUEST
    """Minimum for the requests of the other clusters, in blocking rounds."""
    request_unknown: float = deadlines.ROUND_REQUEST_UNKNOWN
    """Minimum for requests of clusters that have not stated an interval yet."""
    request_most: float = 86400.0
    """Maximum for requests."""
    final_answer: float = deadlines.FINAL_ANSWER
    """Minimum for Prepared in the final round, used too while nothing is measured."""
    final_most: float = deadlines.FINAL_MOST
    """Maximum for a final round with all its attempts."""
    final_return: float = 0.0
    """Wait of the final round for a cluster that was lost and may return; 0 if none may."""
    grace: float = 2.0
    """Wait for the other replies after one cluster has failed, to find the cause."""
    ring_stall: float = deadlines.RING_STALL
    """Time without a chunk after which a node gives up an all-reduce."""
    reach: float = deadlines.ROUND_REACH
    """Wait of a node for the connection to another member of a ring."""

    @classmethod
    def outlasting(cls, outage: float, rejoin: float = 0.0) -> Deadlines:
        """Return limits for links that wait ``outage`` seconds for another connection.

        A cluster waits ``rejoin`` seconds for a lost node.
        """
        more = max(0.0, outage - deadlines.LINK_OUTAGE)
        step, default = deadlines.ROUND_OUTAGES * more, cls()
        return replace(
            default,
            answer_floor=default.answer_floor + step,
            answer_most=default.answer_most + step,
            reduce_most=default.reduce_most + step,
            request_floor=default.request_floor + step,
            request_unknown=default.request_unknown + step,
            final_answer=default.final_answer + step,
            final_most=default.final_most + 2 * step,
            final_return=rejoin + deadlines.RETURN_MARGIN + more if rejoin else 0.0,
            ring_stall=default.ring_stall + step,
            reach=default.reach + more,
        )


class Timing:
    """Measured times, and the deadlines that follow from them."""

    def __init__(self, limits: Deadlines) -> None:
        self.limits = limits
        self._answers: dict[int, float] = {}
        self._intervals: dict[int, float] = {}

    def answered(self, cluster: int, seconds: float) -> None:
        """Record the time of a cluster's reply to Prepare, or of a wait without a reply.

        Waits without a reply count, so that a cluster that has become slow gets more time next.
        """
        self._answers[cluster] = max(seconds, DECAY * self._answers.get(cluster, 0.0))

    def interval(self, cluster: int, seconds: float) -> None:
        """Record a cluster's own estimate of the time between its rounds, if it is valid."""
        if seconds > 0 and math.isfinite(seconds):
            self._intervals[cluster] = seconds

    def answer_within(self, clusters: Iterable[int]) -> float:
        """Return the longest wait for Prepared of these clusters."""
        limits = self.limits
        slowest = max(self._answers.get(cluster, math.inf) for cluster in clusters)
        return min(limits.answer_most, limits.factor * slowest + limits.answer_floor)

    def final_answer_within(self, clusters: Iterable[int]) -> float:
        """Return the longest wait for Prepared of these clusters in the final round."""
        slowest = max(self._answers.get(cluster, 0.0) for cluster in clusters)
        return min(self.limits.final_most, max(self.limits.final_answer, self.limits.factor * slowest))

    def request_within(self, clusters: Iterable[int]) -> float:
        """Return the longest wait for requests of these clusters, from the first request on."""
        limits = self.limits
        known = [self._intervals.get(cluster, 0.0) for cluster in clusters]
        wait = limits.factor * max(known, default=0.0) + limits.request_floor
        if not all(known):
            others = limits.factor * max(self._intervals.values(), default=0.0)
            wait = max(wait, others, limits.request_unknown)
        return min(limits.request_most, wait)
