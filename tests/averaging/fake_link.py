"""A link without a transport."""

from __future__ import annotations

from ravnest.transport.base import LinkDelay
from ravnest.wire.messages import PROTOCOL, Hello, Message


def hello(node: int) -> Hello:
    """Return the Hello of a Root; its cluster has the number of the node."""
    return Hello(PROTOCOL, "plan", node, node, 0)


class FakeLink:
    """An open link that records the messages sent."""

    sent_bytes = received_bytes = clamped = 0

    def __init__(self, node: int) -> None:
        self.local = hello(0)
        self.peer = hello(node)
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def flush(self, timeout: float) -> bool:
        return timeout >= 0

    def close(self) -> None:
        """Do nothing."""

    def delay(self) -> LinkDelay:
        return LinkDelay(0.0, 0.0, 0.0)
