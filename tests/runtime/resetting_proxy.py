"""TCP proxy that resets connections after a given number of bytes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence


class ResettingProxy:
    """Forwards connections to a port; the n-th reset comes after another ``limits[n]`` bytes."""

    def __init__(self, port: int, target: int, limits: Sequence[int]) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self._target = target
        self._limits = list(limits)
        self._lock = threading.Lock()
        self.resets = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                _reset(near)
                continue
            _Forwarding(self, near, far).start()

    def resets_now(self, count: int) -> bool:
        """Count forwarded bytes and return whether their connection is to be reset."""
        with self._lock:
            if not self._limits:
                return False
            self._limits[0] -= count
            if self._limits[0] > 0:
                return False
            self._limits.pop(0)
            self.resets += 1
            return True


class _Forwarding:
    def __init__(self, proxy: ResettingProxy, near: socket.socket, far: socket.socket) -> None:
        self._proxy, self._near, self._far = proxy, near, far

    def start(self) -> None:
        for source, target in ((self._near, self._far), (self._far, self._near)):
            threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if self._proxy.resets_now(len(data)):
                    _reset(self._near)
                    _reset(self._far)
                    return
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _reset(connection: socket.socket) -> None:
    """Close a connection with a TCP reset, also while another thread reads it."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
        connection.close()


@contextlib.contextmanager
def resetting(
    routes: Sequence[tuple[int, int]], limits: Sequence[Sequence[int]]
) -> Iterator[list[ResettingProxy]]:
    """Run proxies for pairs of a port and the port that it stands for."""
    proxies = [ResettingProxy(*route, each) for route, each in zip(routes, limits, strict=True)]
    try:
        yield proxies
    finally:
        for proxy in proxies:
            proxy.close()
