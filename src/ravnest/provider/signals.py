"""Signals that ask this process to end, turned into calls of a function."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from ravnest.host import END_SIGNALS

_MOST_AT_ONCE = 64


@contextmanager
def interrupts(note: Callable[[], None]) -> Iterator[None]:
    """Call ``note``, in another thread, for each signal that asks this process to end.

    Python runs handlers in the main thread, and not while that waits: a signal that arrives just before
    it begins to wait would be noticed at the end of the wait. Only the main thread can receive signals;
    in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def read() -> None:
        while numbers := reader.recv(_MOST_AT_ONCE):
            for number in numbers:
                if number in END_SIGNALS:
                    note()

    thread = threading.Thread(target=read, name="ravnest-signals", daemon=True)
    with reader, writer:
        thread.start()
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        handlers = _set_handlers(_ignore)
        try:
            yield
        finally:
            _restore(handlers)
            signal.set_wakeup_fd(before)
            writer.close()
            thread.join()


@contextmanager
def raised_interrupts() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` in the main thread for each signal that asks this process to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = _set_handlers(_raise)
    try:
        yield
    finally:
        _restore(handlers)


def _set_handlers(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    return {number: signal.signal(number, handler) for number in END_SIGNALS}


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the thread that reads the numbers of signals calls the function."""


def _raise(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
