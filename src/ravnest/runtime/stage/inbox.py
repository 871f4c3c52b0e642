"""Work for the worker's thread that other threads and averaging hand in."""

from __future__ import annotations

import queue
from collections.abc import Callable


class WorkerInbox:
    """Calls that the worker's thread makes."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Made in order, between two computations."""
        self.when_idle: list[Callable[[], None]] = []
        """Made in order, once nothing is left to compute; used by the worker's thread only."""

    def post(self, call: Callable[[], None]) -> None:
        """Queue a call; may be called from any thread."""
        self.calls.put(call)

    def post_when_idle(self, call: Callable[[], None]) -> None:
        """Queue a call for the time when nothing is left to compute; from any thread."""
        self.calls.put(lambda: self.when_idle.append(call))
