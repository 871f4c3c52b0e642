"""Stream of frames over a TCP connection, with TLS or, for peers on the same machine, without."""

from __future__ import annotations

import os
import socket
import ssl
import time
import weakref
from contextlib import suppress

from ravnest.errors import WireError
from ravnest.transport.tls_channel import TlsChannel
from ravnest.wire import envelope
from ravnest.wire.envelope import Buffer, frame_size

_BUFFER_BYTES = 512 << 10
"""First size of the receive buffer; it grows with what arrives, up to the size of a frame."""
_KEPT_BYTES = 4 << 20
"""Largest receive buffer that is kept when its frame has been processed."""
_MOST_PARTS = 512
"""Parts that one system call sends; systems permit at least 1,024."""


class FrameSocket:
    """Connected socket that carries frames; one thread reads, and one thread at a time sends."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        """The connection; used by others only before it is encrypted."""
        self._tls: TlsChannel | None = None
        self._view = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0
        """Bounds of what was received and not returned yet."""
        self._missing = 0
        """Bytes of an incomplete frame that have not arrived; 0 if its size is not known."""

    def start(self) -> None:
        """Send small frames at once, and stay closed in processes that are forked from this one."""
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        CLOSED_IN_CHILDREN.add(self)

    def secure(self, context: ssl.SSLContext, deadline: float, *, listens: bool) -> str:
        """Encrypt the connection, and return the name in the peer's certificate.

        Before anything is read or sent. ``ssl.SSLError`` if either side rejects the other,
        ``TimeoutError`` at this time of ``time.monotonic()``. ``listens``: the other side has dialled.
        """
        tls = TlsChannel(context, self.socket, listens=listens)
        tls.handshake(deadline)
        self._tls = tls
        return tls.peer_name

    def read(self, limit: int) -> memoryview | None:
        """Return the next whole frames, valid until the next call; None at the end of the stream.

        ``WireError`` if the data is not a frame of at most ``limit`` bytes.
        """
        while not (count := self._complete(limit)):
            if not self._receive():
                return None
        return self._taken(count)

    def read_one(self, limit: int, deadline: float) -> memoryview | None:
        """Return the next frame like ``read``; ``TimeoutError`` at this time of ``time.monotonic()``."""
        try:
            while not (count := self._complete(limit, single=True)):
                self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
                if not self._receive():
                    return None
                if time.monotonic() >= deadline:
                    raise TimeoutError
        finally:
            self.socket.settimeout(None)
        return self._taken(count)

    def send_frame(self, frame: bytes) -> None:
        """Send a frame, and wait until it is sent."""
        self.send(self.sealed([frame]), wait=True)

    def sealed(self, parts: list[Buffer]) -> list[Buffer]:
        """Return the bytes to send for some parts of frames, encrypted if the connection is."""
        return parts if self._tls is None else self._tls.seal(parts)

    def send(self, parts: list[Buffer], *, wait: bool) -> list[Buffer]:
        """Send sealed bytes and return those that are left; ``wait`` until nothing is left."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        while parts:
            try:
                sent = self.socket.sendmsg(parts[:_MOST_PARTS], (), flags)
            except BlockingIOError:
                return parts
            parts = _without(parts, sent)
        return parts

    def end_writing(self) -> None:
        """Tell the peer that nothing follows."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def await_end(self, seconds: float | None = None) -> None:
        """Read until the peer ends the stream, and ignore what arrives; at most for this time."""
        end = None if seconds is None else time.monotonic() + seconds
        with suppress(OSError):
            while end is None or time.monotonic() < end:
                self.socket.settimeout(None if end is None else max(end - time.monotonic(), 0.001))
                if not self.socket.recv_into(self._view):
                    return

    def hang_up(self) -> None:
        """End the stream in both directions; calls that wait in other threads return."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        """Return the number of the open file; -1 after ``close``."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close the socket; no other thread may use it any more."""
        self.socket.close()

    def _complete(self, limit: int, *, single: bool = False) -> int:
        """Return the number of received bytes that are whole frames; ``single``: the first one."""
        at, self._missing = self._begin, 0
        while self._end - at >= envelope.SIZE:
            try:
                size = frame_size(self._view[at:], limit)
            except WireError:
                if at == self._begin:
                    raise
                break  # the frames before it are valid
            if at + size > self._end:
                self._missing = at + size - self._end
                break
            at += size
            if single:
                break
        return at - self._begin

    def _taken(self, count: int) -> memoryview:
        begin, self._begin = self._begin, self._begin + count
        return self._view[begin : self._begin]

    def _receive(self) -> int:
        """Wait for more bytes and return their number; 0 at the end of the stream.

        The rest of a frame is awaited in one system call, since each return from one competes for
        Python's lock.
        """
        self._make_room()
        free = self._view[self._end :]
        if self._tls is not None:
            count = self._tls.receive(free, self._missing)
        elif self._missing:
            count = self.socket.recv_into(free[: self._missing], 0, socket.MSG_WAITALL)
        else:
            count = self.socket.recv_into(free)
        self._end += count
        return count

    def _make_room(self) -> None:
        """Move what has not been returned to the beginning of the buffer, or of a larger one.

        A buffer grows only when it is full, so that a peer that announces much and sends little takes
        little memory.
        """
        count, size = self._end - self._begin, len(self._view)
        if not count and size > _KEPT_BYTES:
            self._view = memoryview(bytearray(_BUFFER_BYTES))
        elif count == size:
            larger = memoryview(bytearray(min(2 * size, size + self._missing)))
            larger[:count] = self._view
            self._view = larger
        elif self._begin and count:
            self._view[:count] = self._view[self._begin : self._end]
        self._begin, self._end = 0, count


def _without(parts: list[Buffer], count: int) -> list[Buffer]:
    """Return the parts without their first ``count`` bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *parts[index + 1 :]]
        count -= len(part)
    return []


CLOSED_IN_CHILDREN: weakref.WeakSet[FrameSocket | socket.socket] = weakref.WeakSet()
"""Open sockets. Processes that are forked from this one (workers of data loaders) close their copies,
which would keep connections and ports of a process open that has ended."""


def _close_in_child() -> None:
    for each in list(CLOSED_IN_CHILDREN):
        each.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
