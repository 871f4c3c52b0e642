"""Time by which training takes longer while a checkpoint is being stored. Pure: time is an argument.

Nodes know for how long they stop, but not what the whole pipeline loses when a replica shares a link
with activations. The Root sees it: updates take longer than before and after.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

_REMEMBERED = 256
"""Last updates beside which nothing was stored."""
_FEWEST = 8
"""Updates that must be known before others are compared with them."""


class CheckpointSlowdown:
    """Times between updates, with and without a checkpoint that is being stored."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Time by which the last checkpoint made training longer, as far as that is more than noise."""
        self._last: float | None = None
        self._quiet: deque[float] = deque(maxlen=_REMEMBERED)
        self._storing: list[float] = []

    def update(self, now: float, *, storing: bool) -> None:
        """Record an update; ``storing``: a checkpoint was being stored since the one before."""
        if not storing:
            self._settle()
        if self._last is not None:
            (self._storing if storing else self._quiet).append(now - self._last)
        self._last = now

    def interrupt(self) -> None:
        """Record the end of a phase: the time until the next update is not one of training."""
        self._last = None

    def _settle(self) -> None:
        """Compare the updates beside a checkpoint with the others."""
        count = len(self._storing)
        if count and len(self._quiet) >= _FEWEST:
            excess = sum(self._storing) - count * statistics.fmean(self._quiet)
            noise = statistics.stdev(self._quiet) * math.sqrt(count)
            self.seconds = max(excess - noise, 0.0)
        self._storing.clear()
