"""Decision whether a silent connection is slow or dead. Pure: time is an argument.

Each side of a connection sends something at least every ``LINK_HEARTBEAT``. The intervals at which
it arrives have a distribution, which is measured. The suspicion is phi of the phi-accrual detector
(Hayashibara et al. 2004): the negative decimal logarithm of the probability that a living peer is silent
for so long. A slow link has long intervals and is given more time.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from ravnest.deadlines import LINK_HEARTBEAT

SUSPICIOUS = 8.0
"""Suspicion from which a connection is taken for dead: a probability of 1e-8."""
_REMEMBERED = 32
_LEAST_DEVIATION = 1.0
"""Smallest standard deviation of an interval in seconds: threads and machines stall now and then."""
_LONGEST_STEP = 2 * LINK_HEARTBEAT
"""Time that passes at most between two looks at the clock: if this process itself was stopped, what the
peer sent in the meantime still waits to be read."""


class FailureDetector:
    """Suspicion that the peer of one connection is gone."""

    def __init__(self) -> None:
        self._intervals = deque([LINK_HEARTBEAT], maxlen=_REMEMBERED)
        self._silence = 0.0
        self._looked: float | None = None

    def arrived(self, now: float) -> None:
        """Record that something has arrived."""
        self._advance(now)
        if self._silence >= LINK_HEARTBEAT / 2:  # shorter ones are those of traffic
            self._intervals.append(self._silence)
        self._silence = 0.0

    def restarted(self) -> None:
        """Record a new connection: the silence begins anew."""
        self._silence, self._looked = 0.0, None

    def suspicion(self, now: float) -> float:
        """Return phi."""
        self._advance(now)
        mean = statistics.fmean(self._intervals)
        deviation = max(statistics.pstdev(self._intervals), _LEAST_DEVIATION)
        alive = 0.5 * math.erfc((self._silence - mean) / deviation / math.sqrt(2))
        return math.inf if alive == 0.0 else -math.log10(alive)

    def suspects(self, now: float) -> bool:
        """Return whether the connection is dead; being wrong makes the detector more patient."""
        if self.suspicion(now) < SUSPICIOUS:
            return False
        self._intervals.append(self._silence)
        return True

    def _advance(self, now: float) -> None:
        if self._looked is not None:
            self._silence += min(max(now - self._looked, 0.0), _LONGEST_STEP)
        self._looked = now
