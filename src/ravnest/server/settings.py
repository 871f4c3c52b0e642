"""What can be set about a server, apart from where it listens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Limits of time and size; seconds and bytes."""

    lost_after: float = 30.0
    """A provider that was not heard of for so long is lost."""
    fetch_grace: float = 600.0
    """A provider may take so long to fetch its part, and four times what its bandwidth explains."""
    ending_grace: float = 10.0
    """Nodes of a cluster that failed may take so long to end and to say why."""
    shown_after_loss: float = 3600.0
    """Lost providers are listed for so long."""
    longest_wait: float = 60.0
    """A request may wait for news for so long."""
    largest_artifact: int = 256 << 30
    kept_parts: float = 7 * 86400.0
    """An upload that nobody goes on with is removed at a start after so long."""
    disk_reserve: int = 256 << 20
    """An upload that would leave less than this on the disk is refused."""
    largest_message: int = 32 << 20
    """Of a request that is not an upload."""
    probe_bytes: int = 16 << 20
    page_login: float = 30 * 86400.0
    """A browser is known for so long."""
    kept_refusals: int = 10_000
    """Of refusals, the newest are kept: nobody can fill the disk with wrong tokens."""

    @property
    def heartbeat_wait(self) -> float:
        """A heartbeat waits less than it takes to be lost: three fit in."""
        return min(self.longest_wait, self.lost_after / 3)


@dataclass(frozen=True)
class Clock:
    """The two kinds of time; tests give their own."""

    wall: Callable[[], float] = time.time
    """Seconds since 1970, for what people read."""
    steady: Callable[[], float] = time.monotonic
    """For deadlines: nobody sets it."""
