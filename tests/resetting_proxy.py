"""TCP proxies that reset connections after given numbers of bytes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence


class Resets:
    """Numbers of bytes, over all connections, after which the connection in use is reset."""

    def __init__(self, limits: Sequence[int]) -> None:
        self._limits = list(limits)
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        """Resets that are still to come."""
        return len(self._limits)

    def due(self, count: int) -> bool:
        """Count forwarded bytes and return whether their connection is to be reset."""
        with self._lock:
            if not self._limits:
                return False
            self._limits[0] -= count
            if self._limits[0] > 0:
                return False
            self._limits.pop(0)
            return True


@contextlib.contextmanager
def resetting(routes: Sequence[tuple[int, int]], limits: Sequence[int]) -> Iterator[Resets]:
    """Run proxies for pairs of a port and the port that it stands for."""
    resets = Resets(limits)
    listeners = [socket.create_server(("127.0.0.1", port)) for port, _ in routes]
    for listener, (_, target) in zip(listeners, routes, strict=True):
        threading.Thread(target=_accept, args=(listener, target, resets), daemon=True).start()
    try:
        yield resets
    finally:
        for listener in listeners:
            listener.shutdown(socket.SHUT_RDWR)  # otherwise it listens until accept() returns
            listener.close()


def _accept(listener: socket.socket, target: int, resets: Resets) -> None:
    while True:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        try:
            far = socket.create_connection(("127.0.0.1", target))
        except OSError:
            _reset(near)
            continue
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=_forward, args=(source, sink, resets), daemon=True).start()


def _forward(source: socket.socket, sink: socket.socket, resets: Resets) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            if resets.due(len(data)):
                _reset(source)
                _reset(sink)
                return
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _reset(connection: socket.socket) -> None:
    """Close a connection with a TCP reset, also while another thread reads it."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
        connection.close()
