"""How long the coordinator waits, from what it has measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MEMORY = 0.7
"""Share of the longest time seen that is still believed one measurement later."""


@dataclass(frozen=True)
class Deadlines:
    """Waits in seconds. Each is ``factor`` times what was measured, plus a floor, up to a most."""

    factor: float = 3.0
    answer_floor: float = 1.0
    """For Held: a node answers between two computations."""
    answer_most: float = 30.0
    """Also where nothing is known yet."""
    reduce_floor: float = 10.0
    """For Reduced."""
    reduce_most: float = 3600.0
    """Also where nothing is known yet: the nodes of a ring watch each other more closely."""
    due_floor: float = 5.0
    """For the Due of the others, in blocking rounds."""
    due_unknown: float = 120.0
    due_most: float = 86400.0
    grace: float = 2.0
    """For the words of the others once one has failed: to learn whose fault it is."""


class Timing:
    """What was measured, and the deadlines that follow."""

    def __init__(self, limits: Deadlines) -> None:
        self.limits = limits
        self._answers: dict[int, float] = {}
        self._intervals: dict[int, float] = {}
        self._reduce = 0.0

    def answered(self, cluster: int, seconds: float) -> None:
        """A cluster took so long to hold its copy; or so long was waited for it, in vain.

        The vain wait counts as well, so that a cluster that has become slow gets more time next.
        """
        self._answers[cluster] = max(seconds, MEMORY * self._answers.get(cluster, 0.0))

    def reduced(self, seconds: float) -> None:
        """An attempt took so long to average, or was given up after so long."""
        self._reduce = max(seconds, MEMORY * self._reduce)

    def interval(self, cluster: int, seconds: float) -> None:
        """A cluster says how long it trains between rounds; nonsense is not believed."""
        if seconds > 0 and math.isfinite(seconds):
            self._intervals[cluster] = seconds

    def answer_within(self, clusters: Iterable[int]) -> float:
        """How long to wait for Held of these clusters."""
        limits = self.limits
        slowest = max(self._answers.get(cluster, math.inf) for cluster in clusters)
        return min(limits.answer_most, limits.factor * slowest + limits.answer_floor)

    def reduce_within(self) -> float:
        """How long to wait for Reduced."""
        limits = self.limits
        if not self._reduce:
            return limits.reduce_most
        return min(limits.reduce_most, limits.factor * self._reduce + limits.reduce_floor)

    def due_within(self, clusters: Iterable[int]) -> float:
        """How long to wait for Due of these clusters, from the first Due of the others on."""
        limits = self.limits
        known = [self._intervals.get(cluster, 0.0) for cluster in clusters]
        wait = limits.factor * max(known, default=0.0) + limits.due_floor
        if not all(known):
            others = limits.factor * max(self._intervals.values(), default=0.0)
            wait = max(wait, others, limits.due_unknown)
        return min(limits.due_most, wait)
