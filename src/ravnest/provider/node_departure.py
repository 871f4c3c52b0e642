"""Departure of a worker's node when its agent stops it: others go on from a last checkpoint."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ravnest.deadlines import DEPARTURE
from ravnest.runtime.node import Node

logger = logging.getLogger(__name__)


@contextmanager
def departure_on_interrupt(node: Node) -> Iterator[None]:
    """Have the node leave at the first SIGINT so that its neighbours wait for another one in its place.

    The second SIGINT, which this module sends once the node has left, raises ``KeyboardInterrupt``. Only
    the main thread can receive signals; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def depart() -> None:
        try:
            if not node.hand_over(DEPARTURE):
                logger.warning("%s leaves without a last checkpoint", node.name)
            node.close(f"{node.name} has left", recoverable=True)
        finally:
            os.kill(os.getpid(), signal.SIGINT)  # wakes the main thread, whatever it waits for

    def begin(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=depart, name="departure", daemon=True).start()

    before = signal.signal(signal.SIGINT, begin)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
