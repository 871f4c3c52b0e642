"""Notifications that wake requests which wait for a change; nothing polls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

Topic = tuple[Literal["provider", "job", "clock", "relays", "page"], str]
"""``page``: anything that the web page shows may have changed."""


class Subscription:
    """A waiting request."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self.is_closed = False
        """True if the server stops; the request must be answered now."""

    def notify(self, *, is_closed: bool = False) -> None:
        """Wake the request; thread-safe."""
        self.is_closed = self.is_closed or is_closed
        with suppress(RuntimeError):  # its event loop has just ended, and with it the request
            self._loop.call_soon_threadsafe(self._news.set)

    async def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for a notification; return whether there was one."""
        if self.is_closed or seconds <= 0:
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return not self.is_closed


class Notifications:
    """Subscriptions by topic."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: dict[Topic, set[Subscription]] = {}
        self._closed = False

    @contextmanager
    def subscribe(self, topic: Topic) -> Iterator[Subscription]:
        """Subscribe to a topic; read the state afterwards, so that no change in between is missed."""
        subscription = Subscription()
        with self._lock:
            subscription.is_closed = self._closed
            self._subscriptions.setdefault(topic, set()).add(subscription)
        try:
            yield subscription
        finally:
            with self._lock:
                subscriptions = self._subscriptions[topic]
                subscriptions.discard(subscription)
                if not subscriptions:
                    del self._subscriptions[topic]

    def notify(self, topic: Topic) -> None:
        """Notify the subscribers of a topic; thread-safe."""
        with self._lock:
            for subscription in self._subscriptions.get(topic, ()):
                subscription.notify()

    def close(self) -> None:
        """Wake all requests, for good: the server stops."""
        with self._lock:
            self._closed = True
            for subscriptions in self._subscriptions.values():
                for subscription in subscriptions:
                    subscription.notify(is_closed=True)
