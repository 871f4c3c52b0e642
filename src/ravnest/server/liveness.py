"""Time of the last request of each provider. In memory only: a restart of the server resets it."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class _Seen:
    steady: float
    wall: float


class Liveness:
    """Times of the last requests of providers; thread-safe."""

    def __init__(self, lost_after: float) -> None:
        self._lost_after = lost_after
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}

    def see(self, provider: str, *, steady: float, wall: float) -> None:
        """Store that a provider sent a request now."""
        with self._lock:
            self._seen[provider] = _Seen(steady, wall)

    def forget(self, provider: str) -> None:
        """Stop expecting requests of a provider."""
        with self._lock:
            self._seen.pop(provider, None)

    def seen(self, provider: str) -> float | None:
        """Return the time of a provider's last request, in seconds since 1970."""
        found = self._seen.get(provider)
        return None if found is None else found.wall

    def overdue(self, steady: float) -> list[str]:
        """Return the providers whose last request is too old."""
        with self._lock:
            return [
                name for name, seen in self._seen.items() if seen.steady + self._lost_after <= steady
            ]

    def next_deadline(self) -> float | None:
        """Return when the next provider becomes overdue, by the steady clock."""
        with self._lock:
            times = [seen.steady for seen in self._seen.values()]
        return min(times) + self._lost_after if times else None
