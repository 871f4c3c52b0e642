"""Values that were read from the database, kept until the server changes them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class VersionedCache(Generic[Value]):
    """Values by key; thread-safe, with bounded memory.

    Whoever changes a value in the database calls ``forget`` after the commit. ``put`` ignores what was
    read before such a change: read ``changes`` first, begin the transaction then, and pass it on.
    """

    def __init__(self, most: int) -> None:
        """``most``: values that are kept; the one that was not used for longest is dropped."""
        self._most = most
        self._lock = threading.Lock()
        self._values: OrderedDict[str, Value] = OrderedDict()
        self._changes = 0

    @property
    def changes(self) -> int:
        """Number of changes so far."""
        return self._changes

    def get(self, key: str) -> Value | None:
        """Return a value; ``None`` if it must be read from the database."""
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                self._values.move_to_end(key)
            return found

    def put(self, key: str, value: Value, changes: int) -> None:
        """Keep a value, unless anything was changed after ``changes``."""
        with self._lock:
            if changes == self._changes:
                self._values[key] = value
                if len(self._values) > self._most:
                    self._values.popitem(last=False)

    def forget(self, keys: Iterable[str]) -> None:
        """Forget values that were changed."""
        with self._lock:
            self._changes += 1
            for key in keys:
                self._values.pop(key, None)
