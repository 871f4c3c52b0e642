"""Decision when to acknowledge received messages. Pure: time is an argument."""

from __future__ import annotations

from ravnest.wire.control import Ack

ACK_BYTES = 2 << 20
"""Received bytes after which an acknowledgement is sent on its own; until then it waits for other
frames."""
_ACK_SECONDS = 0.01
"""Shortest time between two acknowledgements that are sent together with other frames."""


class Acknowledgements:
    """Messages received on a link, and those of them that the peer knows to be received."""

    def __init__(self) -> None:
        self.arrived = 0
        """Complete messages that the handler has taken."""
        self._arrived_at = 0.0
        self._sent = 0
        self._sent_at = 0.0
        self._bytes = 0

    def message_arrived(self, now: float) -> None:
        """Count a message; ``now`` is the time of its arrival."""
        self.arrived += 1
        self._arrived_at = now

    def bytes_arrived(self, count: int) -> bool:
        """Count received bytes; return whether an acknowledgement is due on its own."""
        self._bytes += count
        return self._bytes >= ACK_BYTES and self.arrived > self._sent

    def resumed(self) -> None:
        """Record that the peer has been told everything on a new connection."""
        self._sent, self._bytes = self.arrived, 0

    def due(self, now: float, *, alone: bool) -> Ack | None:
        """Return an acknowledgement if one is due; ``alone``: nothing else is sent now."""
        if self._bytes < ACK_BYTES and (alone or now - self._sent_at < _ACK_SECONDS):
            return None
        return self.requested(now)

    def requested(self, now: float) -> Ack | None:
        """Return an acknowledgement if there is anything new."""
        if self.arrived == self._sent:
            return None
        self._sent, self._sent_at, self._bytes = self.arrived, now, 0
        return Ack(self.arrived, now - self._arrived_at)
