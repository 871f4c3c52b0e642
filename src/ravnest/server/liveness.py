"""Who was heard of lately. In memory only: after a restart everybody's time counts anew."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class _Seen:
    steady: float
    wall: float


class Liveness:
    """When each provider was last heard of; threads may use it at once."""

    def __init__(self, lost_after: float) -> None:
        self._lost_after = lost_after
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}

    def see(self, provider: str, *, steady: float, wall: float) -> None:
        """It was heard of now."""
        with self._lock:
            self._seen[provider] = _Seen(steady, wall)

    def forget(self, provider: str) -> None:
        """It is not expected any more."""
        with self._lock:
            self._seen.pop(provider, None)

    def seen(self, provider: str) -> float | None:
        """When it was last heard of, in seconds since 1970."""
        found = self._seen.get(provider)
        return None if found is None else found.wall

    def overdue(self, steady: float) -> list[str]:
        """Those that were not heard of for too long."""
        with self._lock:
            return [
                name for name, seen in self._seen.items() if seen.steady + self._lost_after <= steady
            ]

    def next_deadline(self) -> float | None:
        """When the next one would be overdue, by the steady clock."""
        with self._lock:
            times = [seen.steady for seen in self._seen.values()]
        return min(times) + self._lost_after if times else None
