"""Messages that a link has to send, kept until the peer has acknowledged them. Pure."""

from __future__ import annotations

from collections import deque

from ravnest.errors import WireError
from ravnest.wire.control import START, Position
from ravnest.wire.messages import Message


class Outbox:
    """Messages in order; the first one has number 0."""

    def __init__(self) -> None:
        self._kept: deque[Message] = deque()
        """Messages that are not acknowledged; the first has the number ``acknowledged``."""
        self._next = 0
        self._partial = START
        """Position from which the first message after a new connection continues."""
        self.acknowledged = 0
        """Messages that the peer has received."""

    @property
    def queued(self) -> int:
        """Number of messages queued so far."""
        return self.acknowledged + len(self._kept)

    @property
    def unsent(self) -> bool:
        """True if a message waits to be sent."""
        return self._next < self.queued

    def put(self, message: Message) -> int:
        """Queue a message and return its number."""
        self._kept.append(message)
        return self.queued - 1

    def take(self) -> tuple[Message, Position] | None:
        """Return the next message to send, its number and what the peer already has of it."""
        if not self.unsent:
            return None
        number, partial = self._next, self._partial
        self._next += 1
        message = self._kept[number - self.acknowledged]
        return message, partial if partial.messages == number else Position(number)

    def acknowledge(self, count: int) -> None:
        """Forget the messages that the peer has received: the first ``count``."""
        if count > self._next:
            raise WireError(f"{count} messages are acknowledged, but only {self._next} were sent")
        while self.acknowledged < count:
            self._kept.popleft()
            self.acknowledged += 1

    def resume(self, position: Position) -> None:
        """Continue at the peer's position on a new connection."""
        messages = position.messages
        if not self.acknowledged <= messages <= self.queued:
            raise WireError(
                f"the peer has received {messages} messages, but {self.acknowledged} were acknowledged "
                f"and {self.queued} queued"
            )
        if position.frames and messages == self.queued:
            raise WireError("the peer has received a part of a message that was not sent")
        self._next = messages
        self.acknowledge(messages)
        self._partial = position

    def clear(self) -> None:
        """Forget all messages; the link has ended."""
        self._next = self.acknowledged = self.queued
        self._kept.clear()
