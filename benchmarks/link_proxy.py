"""TCP proxy in front of a node's listener that can hold back, delay and change what passes.

Each direction has faults of its own. Neither end is told, as with packets that get lost: connections
stay open, and new ones are accepted but carry nothing while data is held back.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field
from queue import Queue
from typing import Self

_INWARD, _OUTWARD = 0, 1
_MOST_PASSING = 64
"""Pieces of data that a direction holds at most; then the sender has to wait."""


@dataclass
class _Direction:
    """Faults of what is sent to the listener, or of what it sends."""

    open: threading.Event = field(default_factory=threading.Event)
    """Set while data may pass."""
    late: float = 0.0
    """Seconds by which data arrives later."""
    corrupts: bool = False
    """A bit of the next data that passes is changed."""

    def changed(self, data: bytes) -> bytes:
        """Return what arrives instead of ``data``."""
        if not self.corrupts:
            return data
        self.corrupts = False
        wrong = bytearray(data)
        wrong[len(wrong) // 2] ^= 1
        return bytes(wrong)


class LinkProxy:
    """Proxy at a port for the listener at another port; ``with`` runs it."""

    def __init__(self, port: int, target: int) -> None:
        self._port, self._target = port, target
        self._ways = (_Direction(), _Direction())
        """To the listener, and from it."""
        for way in self._ways:
            way.open.set()
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for way in self._ways:
            way.open.set()
        with self._lock:
            sockets = [self._listener, *self._sockets]
        for each in sockets:
            _end(each)
            each.close()

    def block(self, *, inward: bool) -> None:
        """Hold back what is sent to the listener, or what the listener sends."""
        self._way(inward=inward).open.clear()

    def unblock(self, *, inward: bool) -> None:
        """Let data pass again, first what was held back."""
        self._way(inward=inward).open.set()

    def delay(self, seconds: float, *, inward: bool) -> None:
        """Let what is sent from now on arrive this much later; 0: at once again."""
        self._way(inward=inward).late = seconds

    def corrupt(self, *, inward: bool) -> None:
        """Change a bit of the next data that passes."""
        self._way(inward=inward).corrupts = True

    def _way(self, *, inward: bool) -> _Direction:
        return self._ways[_INWARD if inward else _OUTWARD]

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # nothing listens, and the node that dials is to know that
                near.close()
                continue
            with self._lock:
                self._sockets |= {near, far}
            for source, sink, way in (
                (near, far, self._ways[_INWARD]),
                (far, near, self._ways[_OUTWARD]),
            ):
                passing: Queue[tuple[float, bytes]] = Queue(_MOST_PASSING)
                for target, end in ((self._receive, source), (self._deliver, sink)):
                    threading.Thread(target=target, args=(end, way, passing), daemon=True).start()

    def _receive(
        self, source: socket.socket, way: _Direction, passing: Queue[tuple[float, bytes]]
    ) -> None:
        """Queue what arrives with the time at which it is due, and then the end of the connection."""
        data = b" "
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            passing.put((time.monotonic() + way.late, data))

    def _deliver(
        self, sink: socket.socket, way: _Direction, passing: Queue[tuple[float, bytes]]
    ) -> None:
        while True:
            due, data = passing.get()
            time.sleep(max(due - time.monotonic(), 0.0))
            way.open.wait()  # the end of a connection does not pass either
            if not data:
                break
            with contextlib.suppress(OSError):
                sink.sendall(way.changed(data))
        _end(sink)
        with self._lock:
            self._sockets.discard(sink)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
