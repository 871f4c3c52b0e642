"""Rate limits: token buckets by key, with bounded memory. Pure: the caller passes the time."""

from __future__ import annotations

import threading
from dataclasses import dataclass

_MOST_KEYS = 20_000
"""Buckets that are kept; when there are more, those that are full again are dropped."""


@dataclass(frozen=True)
class Rate:
    """A burst, and the requests per second after it."""

    burst: float
    per_second: float


@dataclass
class _Bucket:
    level: float
    """Requests that may be made at once."""
    time: float


class RateLimits:
    """One token bucket per key, such as a credential or an address; thread-safe."""

    def __init__(self, rate: Rate, most_keys: int = _MOST_KEYS) -> None:
        self._rate = rate
        self._most_keys = most_keys
        self._lock = threading.Lock()
        self._buckets: dict[str, _Bucket] = {}

    def take(self, key: str, now: float) -> float:
        """Count a request; return 0, or the seconds after which it would be allowed."""
        with self._lock:
            bucket = self._refilled(key, now)
            if bucket.level < 1.0:
                return (1.0 - bucket.level) / self._rate.per_second
            bucket.level -= 1.0
            return 0.0

    def spend(self, key: str, now: float, cost: float) -> None:
        """Count what a request turned out to cost: it delays later ones, by a whole burst at most."""
        with self._lock:
            bucket = self._refilled(key, now)
            bucket.level = max(bucket.level - cost, -self._rate.burst)

    def wait(self, key: str, now: float) -> float:
        """Return the seconds after which a request would be allowed, without counting one."""
        with self._lock:
            level = self._refilled(key, now).level
        return 0.0 if level >= 1.0 else (1.0 - level) / self._rate.per_second

    def __len__(self) -> int:
        return len(self._buckets)

    def _refilled(self, key: str, now: float) -> _Bucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._most_keys:
                self._drop(now)
            bucket = self._buckets[key] = _Bucket(self._rate.burst, now)
        bucket.level = self._level(bucket, now)
        bucket.time = now
        return bucket

    def _level(self, bucket: _Bucket, now: float) -> float:
        elapsed = max(now - bucket.time, 0.0)
        return min(self._rate.burst, bucket.level + elapsed * self._rate.per_second)

    def _drop(self, now: float) -> None:
        """Drop the full buckets; if there are none, drop the older half."""
        burst = self._rate.burst
        kept = {key: each for key, each in self._buckets.items() if self._level(each, now) < burst}
        if len(kept) >= self._most_keys:
            newest = sorted(kept, key=lambda key: kept[key].time)[len(kept) // 2 :]
            kept = {key: kept[key] for key in newest}
        self._buckets = kept
