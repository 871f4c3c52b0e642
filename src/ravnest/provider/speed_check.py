"""Repeated measurement of the speed of an idle provider. Pure.

A machine that was busy for the minute in which it joined offers less than it has. An idle provider
measures again from time to time, and offers the median of its last measurements.
"""

from __future__ import annotations

from collections import deque

from ravnest.provider.events import (
    Action,
    AgentEvent,
    Announce,
    MeasureSpeed,
    SpeedMeasured,
    UpdateOffer,
)

FIRST_CHECK = 60.0
"""Seconds after joining until the speed is measured again."""
NEXT_CHECKS = 600.0
"""Seconds between two later measurements; each takes less than half a second."""
_MEASUREMENTS = 3
_LEAST_CHANGE = 0.1
"""Relative change of the speed below which the offer stays: each new offer makes new plans."""


class SpeedCheck:
    """Measurements of one provider: when the next one is due, and what to offer after it."""

    def __init__(self, offered: float, now: float) -> None:
        """``offered``: GFLOP/s, as measured at ``now``, before joining."""
        self._offered = offered
        self._last: deque[float] = deque([offered], maxlen=_MEASUREMENTS)
        self._is_running = False
        self._due = now + FIRST_CHECK

    @property
    def deadline(self) -> float | None:
        """Time of the next measurement; ``None`` while one runs."""
        return None if self._is_running else self._due

    def handle(self, event: AgentEvent, now: float, *, is_idle: bool) -> list[Action]:
        """Measure if it is time and nothing else runs; a provider that works waits for its next turn."""
        if isinstance(event, SpeedMeasured):
            return self._measured(event.rate, is_idle=is_idle)
        if self._is_running or now < self._due:
            return []
        self._due = now + NEXT_CHECKS
        if not is_idle:
            return []
        self._is_running = True
        return [MeasureSpeed()]

    def _measured(self, rate: float | None, *, is_idle: bool) -> list[Action]:
        """Offer the new speed if it differs enough.

        One that ended while work began does not count: both shared the machine.
        """
        self._is_running = False
        if rate is None or not is_idle:
            return []
        self._last.append(rate)
        found = sorted(self._last)[len(self._last) // 2]
        if abs(found / self._offered - 1) < _LEAST_CHANGE:
            return []
        line = (
            f"measured again: {found:.0f} GFLOP/s, not {self._offered:.0f}; the server plans with that"
        )
        self._offered = found
        return [Announce(line), UpdateOffer(found)]
