"""What would end this process becomes an event instead."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts(note: Callable[[], None]) -> Iterator[None]:
    """While inside, call ``note`` for each signal that asks us to end; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def noted(_number: int, _frame: FrameType | None) -> None:
        note()

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, noted) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
