"""Limits of a relay, and the token bucket that limits its rate."""

from __future__ import annotations

from dataclasses import dataclass

_SHARE_SECONDS = 0.02
_BURST_SECONDS = 0.1
_SMALLEST_SHARE = 4 << 10
_LARGEST_SHARE = 64 << 10


@dataclass(frozen=True)
class RelayLimits:
    """Most that a relay does at a time; whoever asks for more is refused with status 429."""

    connections_per_address: int = 512
    """Connections from one IPv4 address or IPv6 /64 network; nodes behind one NAT share it."""
    pending_heads: int = 256
    """Connections whose request has not arrived; the oldest makes room for another one."""
    endpoints: int = 1024
    circuits: int = 1024
    circuits_per_endpoint: int = 64
    circuits_per_job: int = 256
    mbit_per_second: float | None = None
    """Rate of all circuits together, both directions; ``None`` is unlimited."""

    @property
    def connections(self) -> int:
        """Most connections in total, which follows from the other limits."""
        return self.pending_heads + self.endpoints + 2 * self.circuits


class TokenBucket:
    """Bytes that may be forwarded now: they grow with time at a rate, up to a burst."""

    def __init__(self, rate: float, now: float) -> None:
        """``rate`` is in bytes per second."""
        self._rate = rate
        self.share = int(min(max(rate * _SHARE_SECONDS, _SMALLEST_SHARE), _LARGEST_SHARE))
        """Bytes to forward for one direction at a time."""
        self._burst = max(rate * _BURST_SECONDS, 2.0 * self.share)
        self._tokens = self._burst
        self._then = now

    def available(self, now: float) -> int:
        """Return the bytes that may be forwarded at ``now``; 0 or less if none."""
        self._tokens = min(self._burst, self._tokens + self._rate * max(now - self._then, 0.0))
        self._then = now
        return int(self._tokens)

    def take(self, count: int) -> None:
        """Count bytes that were forwarded."""
        self._tokens -= count

    def ready_at(self, count: int) -> float:
        """Return the time at which ``count`` bytes will be available."""
        return self._then + max(count + 1 - self._tokens, 0.0) / self._rate
