"""Event loop of one thread: sockets that become ready, timers, and calls from other threads."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

OnReady = Callable[[int], None]
"""Called in the loop with ``READ``, ``WRITE`` or both."""


class Timer:
    """Call at a later time, which can be cancelled."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Do not call."""
        self._action = None

    def fire(self) -> None:
        """Call, unless cancelled."""
        action, self._action = self._action, None
        if action is not None:
            action()


class EventLoop:
    """Loop that runs in a thread; ``start``, ``call`` and ``close`` are for all threads."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._watched: dict[int, tuple[int, OnReady]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._closing = False
        self._ended = False
        self._thread: threading.Thread | None = None
        self._wake_lock = threading.Lock()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self.now = self._clock()
        """Monotonic time of the current turn."""

    # From any thread

    def start(self) -> None:
        """Run the loop in a thread."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def call(self, action: Callable[[], None]) -> bool:
        """Have the loop call ``action``; return ``False`` if it has ended."""
        with self._wake_lock:
            if self._ended:
                return False
            self._calls.append(action)
            with contextlib.suppress(BlockingIOError):  # it is being woken
                self._wake.send(b"!")
            return True

    def close(self, timeout: float) -> bool:
        """End the loop after the calls made so far; return whether it ended within ``timeout``."""

        def end() -> None:
            self._closing = True

        self.call(end)
        thread = self._thread
        if thread is None:
            self._release()
            return True
        if thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    # In the loop

    def watch(self, sock: socket.socket, events: int, on_ready: OnReady) -> None:
        """Call ``on_ready`` when the socket is ready for ``events``; 0 stops it.

        Pass the same object each time: it is compared by identity, and a bound method is a new one.
        """
        number = sock.fileno()
        watched = self._watched.get(number)
        if not events:
            self.unwatch(sock)
        elif watched is None:
            self._watched[number] = events, on_ready
            self._selector.register(number, events, on_ready)
        elif watched[0] != events or watched[1] is not on_ready:
            self._watched[number] = events, on_ready
            self._selector.modify(number, events, on_ready)

    def unwatch(self, sock: socket.socket) -> None:
        """Watch a socket no longer; before it is closed."""
        if self._watched.pop(sock.fileno(), None) is not None:
            self._selector.unregister(sock.fileno())

    def call_at(self, when: float, action: Callable[[], None]) -> Timer:
        """Call ``action`` at a monotonic time."""
        timer = Timer(action)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _run(self) -> None:
        self.watch(self._woken, READ, self._on_woken)
        try:
            while not self._closing:
                self._turn()
        finally:
            self._release()

    def _turn(self) -> None:
        ready = self._selector.select(self._timeout())
        self.now = self._clock()
        for key, events in ready:
            watched = self._watched.get(key.fd)
            if watched is None or watched[1] is not key.data:  # closed in this turn
                continue
            try:
                key.data(events)
            except Exception:
                self._report()
        while self._timers and self._timers[0][0] <= self.now:
            self._protect(heapq.heappop(self._timers)[2].fire)
        for _ in range(len(self._calls)):
            self._protect(self._calls.popleft())

    def _timeout(self) -> float | None:
        if self._calls:
            return 0.0
        if not self._timers:
            return None
        return max(self._timers[0][0] - self._clock(), 0.0)

    def _protect(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            self._report()

    def _report(self) -> None:
        """Report a failed event; a bug in one connection must not end the others."""
        logger.exception("%s: an event failed", self._name)

    def _on_woken(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _release(self) -> None:
        with self._wake_lock:
            self._ended = True
        while self._calls:
            self._protect(self._calls.popleft())
        self._wake.close()
        self._woken.close()
        self._selector.close()
