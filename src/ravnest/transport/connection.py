"""One connection of a link: a stream that carries batches of frames in both directions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from ravnest.wire.control import Control
from ravnest.wire.envelope import Buffer


class Connection:
    """State of one stream. The link's lock guards all attributes but ``wake`` and ``frames``."""

    def __init__(self, hang_up: Callable[[], None], *, relayed: bool = False) -> None:
        """``hang_up`` ends the stream at once in both directions."""
        self.hang_up = hang_up
        self.relayed = relayed
        """The stream passes a relay."""
        self.wake: SimpleQueue[None] = SimpleQueue()
        """Filled when there may be something to send."""
        self.controls: deque[Control] = deque()
        """Control frames to send."""
        self.resumed = False
        """The peer's position is known, so that messages can be sent."""
        self.over = False
        """The stream has ended, or another connection replaced it."""
        self.last = False
        """The link has failed, and only the peer is still to be told."""
        self.frames: Iterator[list[Buffer]] | None = None
        """Frames of the message that is being sent; used by the writer only."""

    def prompt(self) -> None:
        """Have new messages sent: here by the connection's writer, which this wakes.

        The link's lock must not be held.
        """
        self.wake.put(None)

    def await_wake(self) -> None:
        """Wait until there may be something to send."""
        self.wake.get()
        while not self.wake.empty():
            self.wake.get()
