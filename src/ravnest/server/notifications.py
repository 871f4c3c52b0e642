"""Requests that wait for news, and how they get it: no request ever looks again just in case."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

Topic = tuple[Literal["provider", "job", "clock"], str]


class Subscription:
    """One request that waits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self.is_last = False
        """The server stops: answer now."""

    def wake(self, *, is_last: bool = False) -> None:
        """Called from any thread."""
        self.is_last = self.is_last or is_last
        with suppress(RuntimeError):  # its loop has just ended, and with it who waited
            self._loop.call_soon_threadsafe(self._news.set)

    async def wait(self, seconds: float) -> bool:
        """Wait for news at most so long; whether there was some."""
        if self.is_last or seconds <= 0:
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return not self.is_last


class Notifications:
    """Who waits for news of what."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[Topic, set[Subscription]] = {}
        self._closed = False

    @contextmanager
    def listen(self, topic: Topic) -> Iterator[Subscription]:
        """Listen first and look then: news in between is not missed."""
        listener = Subscription()
        with self._lock:
            listener.is_last = self._closed
            self._listeners.setdefault(topic, set()).add(listener)
        try:
            yield listener
        finally:
            with self._lock:
                listeners = self._listeners[topic]
                listeners.discard(listener)
                if not listeners:
                    del self._listeners[topic]

    def wake(self, topic: Topic) -> None:
        """There is news; called from any thread."""
        with self._lock:
            for listener in self._listeners.get(topic, ()):
                listener.wake()

    def close(self) -> None:
        """The server stops: nobody waits any longer."""
        with self._lock:
            self._closed = True
            for listeners in self._listeners.values():
                for listener in listeners:
                    listener.wake(is_last=True)
