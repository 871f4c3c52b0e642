"""Deadlines by key, by the monotonic clock."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class DeadlineTable(Generic[Key]):
    """Deadlines of things that wait, in memory: they count anew after a restart. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[Key, float] = {}

    def add(self, key: Key, deadline: float) -> None:
        """Set the deadline of a key that has none yet."""
        with self._lock:
            self._deadlines.setdefault(key, deadline)

    def remove(self, key: Key) -> None:
        """Forget the deadline of a key, if it has one."""
        with self._lock:
            self._deadlines.pop(key, None)

    def keep_only(self, keys: set[Key]) -> None:
        """Forget the deadlines of all other keys."""
        with self._lock:
            self._deadlines = {key: time for key, time in self._deadlines.items() if key in keys}

    def take_due(self, now: float) -> list[Key]:
        """Remove the keys whose deadlines have passed, and return them."""
        with self._lock:
            due = [key for key, deadline in self._deadlines.items() if deadline <= now]
            for key in due:
                del self._deadlines[key]
            return due

    @property
    def next(self) -> float | None:
        """The earliest deadline."""
        with self._lock:
            return min(self._deadlines.values(), default=None)
