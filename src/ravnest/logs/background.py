"""Receivers of records that work in a thread of their own, so that training does not wait for them."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import ClassVar, NamedTuple, Self

from ravnest.deadlines import LOG_CLOSE
from ravnest.telemetry import WorkerRecord

logger = logging.getLogger(__name__)

_MOST = 100_000
"""Records that may wait; more are dropped, so that a slow disk costs no memory."""
_BATCH = 2000
"""Records that are handled before they are flushed."""


class TimedRecord(NamedTuple):
    """A record and when it arrived, in seconds since 1970."""

    time: float
    record: WorkerRecord


class BackgroundSink(ABC):
    """Takes records at once and handles them in a thread; a failure is logged once and ends nothing."""

    PAUSE: ClassVar[float] = 1.0
    """Seconds for which records are collected: a thread that wakes up for each one takes Python's lock
    from the threads that train."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._waiting: queue.SimpleQueue[tuple[float, WorkerRecord] | None] = queue.SimpleQueue()
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

    def emit(self, record: WorkerRecord, at: float | None = None) -> None:
        """Take a record of now, or of time ``at``; after ``close`` it is dropped."""
        if self._closed.is_set():
            return
        if self._waiting.qsize() < _MOST:
            self._waiting.put((self._clock() if at is None else at, record))
        else:
            self._fail("it is too slow; records were dropped")

    def close(self, timeout: float = LOG_CLOSE) -> None:
        """Handle what was taken, for a bounded time, and end."""
        if not self._closed.is_set():
            self._closed.set()
            self._waiting.put(None)
            self._thread.join(timeout)
            atexit.unregister(self.close)
            if self._thread.is_alive():
                self._fail(f"it has not ended after {timeout:g} s; its last records may be lost")

    @abstractmethod
    def handle(self, items: Sequence[TimedRecord]) -> None:
        """Handle some records, oldest first, in the thread."""

    @abstractmethod
    def flush(self) -> None:
        """Called in the thread after each ``handle``."""

    @abstractmethod
    def end(self) -> None:
        """Called in the thread after the last record."""

    def guard(self, call: Callable[[], None]) -> None:
        """Call something that may fail: code of the user, or a write to a full disk."""
        try:
            call()
        except Exception as error:  # training must not end for it
            self._fail(f"{type(error).__name__}: {error}")

    def _work(self) -> None:
        while items := self._next():
            self.guard(partial(self.handle, items))
            self.guard(self.flush)
            if len(items) < _BATCH:
                self._closed.wait(self.PAUSE)
        self.guard(self.end)

    def _next(self) -> list[TimedRecord]:
        """Wait for records, and return those that wait; none after the last."""
        found: list[TimedRecord] = []
        while (item := self._waiting.get()) is not None:
            found.append(TimedRecord._make(item))
            if len(found) >= _BATCH or self._waiting.empty():
                return found
        if found:
            self._waiting.put(None)
        return found

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("%s: %s; told once, training continues", type(self).__name__, reason)
