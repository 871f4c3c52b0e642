"""TCP proxy in front of a node's listener that can hold back what passes, in each direction.

Neither end is told, as with packets that get lost: connections stay open, and new ones are accepted but
carry nothing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self

_INWARD, _OUTWARD = 0, 1


class LinkProxy:
    """Proxy at a port for the listener at another port; ``with`` runs it."""

    def __init__(self, port: int, target: int) -> None:
        self._port, self._target = port, target
        self._open = (threading.Event(), threading.Event())
        """Directions that let data pass: to the listener, and from it."""
        for gate in self._open:
            gate.set()
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for gate in self._open:
            gate.set()
        with self._lock:
            sockets = [self._listener, *self._sockets]
        for each in sockets:
            _end(each)
            each.close()

    def block(self, *, inward: bool) -> None:
        """Hold back what is sent to the listener, or what the listener sends."""
        self._open[_INWARD if inward else _OUTWARD].clear()

    def unblock(self, *, inward: bool) -> None:
        """Let data pass again, first what was held back."""
        self._open[_INWARD if inward else _OUTWARD].set()

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
            for source, sink, gate in (
                (near, far, self._open[_INWARD]),
                (far, near, self._open[_OUTWARD]),
            ):
                threading.Thread(target=self._forward, args=(source, sink, gate), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, gate: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                gate.wait()
                sink.sendall(data)
        gate.wait()  # the end of a connection does not pass either
        _end(sink)
        with self._lock:
            self._sockets -= {source, sink}


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
