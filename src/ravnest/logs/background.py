"""Receivers of records that work in a thread of their own, so that training does not wait for them."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

from ravnest.telemetry import WorkerRecord

logger = logging.getLogger(__name__)

_FLUSH = 1.0
"""Seconds after which what was taken is written at the latest."""
_PAUSE = 0.2
"""Seconds for which records are collected before they are handled: a thread that wakes up for each one
takes Python's lock from the threads that train."""
_MOST = 100_000
"""Records that may wait; more are dropped, so that a slow disk costs no memory."""


class TimedRecord(NamedTuple):
    """A record and when it arrived, in seconds since 1970."""

    time: float
    record: WorkerRecord


class BackgroundSink(ABC):
    """Takes records at once and handles them in a thread; a failure is logged once and ends nothing."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._waiting: queue.Queue[TimedRecord | None] = queue.Queue(_MOST)
        self._failed = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ravnest-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def emit(self, record: WorkerRecord) -> None:
        """Take a record; after ``close`` it is dropped."""
        if self._closed.is_set():
            return
        try:
            self._waiting.put_nowait(TimedRecord(self._clock(), record))
        except queue.Full:
            self._fail("it is too slow; records were dropped")

    def close(self) -> None:
        """Handle what was taken, and end."""
        if not self._closed.is_set():
            self._closed.set()
            self._waiting.put(None)
            self._thread.join()
            atexit.unregister(self.close)

    @abstractmethod
    def handle(self, item: TimedRecord) -> None:
        """Handle a record, in the thread."""

    @abstractmethod
    def flush(self) -> None:
        """Called in the thread after some records, when no more wait or some time has passed."""

    @abstractmethod
    def end(self) -> None:
        """Called in the thread after the last record."""

    def _work(self) -> None:
        is_last = False
        while not is_last:
            first = self._waiting.get()
            self._closed.wait(_PAUSE)
            is_last = self._handle_all(first, time.monotonic() + _FLUSH)
            self._guarded(self.flush)
        self._guarded(self.end)

    def _handle_all(self, item: TimedRecord | None, due: float) -> bool:
        """Handle a record and those that wait, until ``due``; return whether they were the last."""
        while item is not None:
            self._guarded(partial(self.handle, item))
            if self._waiting.empty() or time.monotonic() >= due:
                return False
            item = self._waiting.get()
        return True

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # code of the user, or a full disk: training must not end for it
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("%s: %s; told once, training continues", type(self).__name__, reason)
