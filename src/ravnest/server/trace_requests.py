"""Requests for what the nodes of a job did when; providers learn of them in replies to heartbeats."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from ravnest.server.notifications import Notifications

_MOST = 1000
"""Jobs whose newest requests are remembered."""


class TraceRequests:
    """Newest request of each job; thread-safe. They do not outlast the server."""

    def __init__(self, notifications: Notifications, wall: Callable[[], float]) -> None:
        self._notifications = notifications
        self._wall = wall
        self._lock = threading.Lock()
        self._newest: OrderedDict[str, int] = OrderedDict()

    def add(self, job: str, providers: Iterable[str]) -> int:
        """Ask these providers of a job for their spans; return the number of the request.

        It is a time in milliseconds, so that it is larger than those before a restart of the server.
        """
        with self._lock:
            order = max(int(1000 * self._wall()), self._newest.pop(job, 0) + 1)
            self._newest[job] = order
            while len(self._newest) > _MOST:
                self._newest.popitem(last=False)
        for provider in providers:
            self._notifications.notify(("provider", provider))
        return order

    def newest(self, job: str) -> int:
        """Return the number of the newest request for a job; 0 if there is none."""
        return self._newest.get(job, 0)
