"""Incomplete uploads: declared sizes by owner, and the space that those in progress reserve. Pure.

A reservation is what a member says that it will send. It keeps others from beginning what would not fit,
but not from all space: together, the uploads of others count for at most half of what is free. The disk
is checked at each block anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

RESERVED = 60.0
"""Seconds for which an upload without progress keeps its reservation."""


@dataclass
class _Reservation:
    owner: str
    missing: int
    """Bytes that are still to come."""
    time: float
    """Time of its last progress."""


class UploadTable:
    """Incomplete uploads by the names of their partial files. Not thread-safe."""

    def __init__(self) -> None:
        self._declared: dict[str, dict[str, int]] = {}
        """Declared sizes by owner and name."""
        self._open: dict[str, _Reservation] = {}
        """Uploads in progress, by name."""

    def declare(self, name: str, owner: str, size: int) -> None:
        """Note the size of an incomplete upload."""
        self._declared.setdefault(owner, {})[name] = size

    def forget(self, name: str, owner: str) -> None:
        """Remove an upload that is complete or was deleted."""
        own = self._declared.get(owner, {})
        own.pop(name, None)
        if not own:
            self._declared.pop(owner, None)

    def declared(self, owner: str, name: str) -> tuple[int, int]:
        """Return the size and the number of the other incomplete uploads of an owner."""
        own = self._declared.get(owner, {})
        return sum(own.values()) - own.get(name, 0), len(own) - (name in own)

    def is_open(self, name: str) -> bool:
        """Return whether an upload is in progress."""
        return name in self._open

    def begin(self, name: str, owner: str, missing: int, now: float) -> None:
        """Reserve the space of an upload."""
        self._open[name] = _Reservation(owner, missing, now)

    def count(self, name: str, received: int, now: float) -> None:
        """Note that bytes of an upload are on the disk."""
        found = self._open[name]
        found.missing = max(found.missing - received, 0)
        found.time = now

    def end(self, name: str) -> None:
        """Release what an upload has reserved."""
        self._open.pop(name, None)

    def left(self, owner: str, free: int, now: float) -> int:
        """Return how much of the free space an owner may reserve."""
        live = [each for each in self._open.values() if now < each.time + RESERVED]
        own = sum(each.missing for each in live if each.owner == owner)
        others = sum(each.missing for each in live if each.owner != owner)
        return max(free - own - min(others, free // 2), 0)
