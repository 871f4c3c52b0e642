"""Size of the pieces in which a link sends data, by the rate at which the network takes them. Pure.

A piece should not take long: nothing arrives at the peer while it is under way, acknowledgements wait
behind it, and it is lost with the connection. On fast networks small pieces cost time.
"""

from __future__ import annotations

from ravnest.wire.frames import CHUNK_BYTES

SMALLEST_BYTES = 32 << 10
_FIRST_BYTES = 256 << 10
_FAST_SECONDS, _SLOW_SECONDS = 0.1, 0.4
_FAST_PIECES = 4
"""Fast pieces in a row before the size grows: the first ones go only into buffers of this machine."""


class ChunkSize:
    """Number of bytes that a link sends at once."""

    def __init__(self) -> None:
        self.bytes = _FIRST_BYTES
        self._fast = 0

    def sent(self, count: int, seconds: float) -> None:
        """Record that the network took ``count`` bytes in this time."""
        if seconds > _SLOW_SECONDS:
            self.bytes = max(self.bytes // 2, SMALLEST_BYTES)
            self._fast = 0
        elif count >= self.bytes and seconds < _FAST_SECONDS:
            self._fast += 1
            if self._fast == _FAST_PIECES:
                self.bytes, self._fast = min(2 * self.bytes, CHUNK_BYTES), 0

    def disconnected(self) -> None:
        """Record a lost connection: pieces may have been too large to get through."""
        self.bytes, self._fast = max(self.bytes // 4, SMALLEST_BYTES), 0
