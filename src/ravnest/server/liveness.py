"""Signs of life of providers, by the monotonic clock.

In memory only: neither a jump of the wall clock nor the time for which the server was down counts as
silence of a provider.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class _Seen:
    steady: float
    """Time of the last request, by the monotonic clock."""
    wall: float
    """The same by the wall clock, to be shown only."""
    alive: float
    """Time until which something else has shown that the provider works."""


class Liveness:
    """Times of the last requests of providers, and their open polls; thread-safe."""

    def __init__(self, lost_after: float) -> None:
        self._lost_after = lost_after
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}
        self._limits: dict[str, float] = {}
        """Providers of which less silence is tolerated, in seconds."""
        self._polls: Counter[str] = Counter()

    def see(self, provider: str, *, steady: float, wall: float, grace: float = 0.0) -> None:
        """Store that a provider sent a request now; it may be silent for ``grace`` seconds more."""
        with self._lock:
            self._seen[provider] = _Seen(steady, wall, steady + grace)

    @contextmanager
    def polling(self, provider: str, steady: Callable[[], float]) -> Iterator[None]:
        """Count a provider as alive while the server holds a request of it open."""
        with self._lock:
            self._polls[provider] += 1
        try:
            yield
        finally:
            with self._lock:
                self._polls[provider] -= 1
                if not self._polls[provider]:
                    del self._polls[provider]
                self._extend(provider, steady())

    def extend(self, provider: str, alive: float) -> None:
        """Store that a provider worked at time ``alive``, although it sent no request."""
        with self._lock:
            self._extend(provider, alive)

    def limit(self, providers: Iterable[str], seconds: float) -> None:
        """Tolerate only so much silence of these providers, and as much as usual of the others."""
        with self._lock:
            self._limits = dict.fromkeys(providers, seconds)

    def is_limited(self, provider: str) -> bool:
        """Return whether less silence than usual is tolerated of a provider."""
        return provider in self._limits

    def excuse(self, steady: float) -> None:
        """Count the silence of all providers from now on, because the server did not listen."""
        with self._lock:
            for provider in self._seen:
                self._extend(provider, steady)

    def forget(self, provider: str) -> None:
        """Stop expecting requests of a provider."""
        with self._lock:
            self._seen.pop(provider, None)

    def seen(self, provider: str) -> float | None:
        """Return the time of a provider's last request, in seconds since 1970."""
        found = self._seen.get(provider)
        return None if found is None else found.wall

    def silence(self, provider: str, steady: float) -> float:
        """Return the seconds since a provider's last request; 0 if none is expected."""
        found = self._seen.get(provider)
        return 0.0 if found is None else steady - found.steady

    def overdue(self, steady: float) -> list[str]:
        """Return the providers whose last sign of life is too old."""
        return [name for name, deadline in self._deadlines().items() if deadline <= steady]

    def next_deadline(self) -> float | None:
        """Return when the next provider becomes overdue, by the steady clock."""
        return min(self._deadlines().values(), default=None)

    def _deadlines(self) -> dict[str, float]:
        with self._lock:
            return {
                name: max(seen.steady, seen.alive) + self._limits.get(name, self._lost_after)
                for name, seen in self._seen.items()
                if not self._polls[name]
            }

    def _extend(self, provider: str, alive: float) -> None:
        found = self._seen.get(provider)
        if found is not None:
            self._seen[provider] = replace(found, alive=max(found.alive, alive))
