"""Signals that ask this process to end, turned into calls of a function."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ravnest.host import END_SIGNALS


@contextmanager
def interrupts(note: Callable[[], None]) -> Iterator[None]:
    """Call ``note`` for each signal that asks this process to end, while the block runs.

    Only the main thread can receive signals; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def noted(_number: int, _frame: FrameType | None) -> None:
        note()

    before = {number: signal.signal(number, noted) for number in END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
