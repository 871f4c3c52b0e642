"""Bounded stores of bytes between two sockets: pipes of the kernel, or buffers of this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Protocol

from ravnest import host

PIPE_BYTES = 1 << 20
_BUFFER_BYTES = 256 << 10
_KEPT_PIPES = 64


class BytePipe(Protocol):
    """Bytes on their way from one socket to another."""

    held: int
    """Bytes that it holds."""

    def fill(self, source: socket.socket, most: int) -> int:
        """Read from ``source`` while empty; 0 is its end, ``BlockingIOError`` if it has nothing now."""

    def drain(self, target: socket.socket) -> None:
        """Write all that ``target`` takes now; ``held`` is what remains."""

    def close(self) -> None:
        """Free what it uses."""


class KernelPipe:
    """Pipe of the kernel, between which and sockets no byte is copied to this process."""

    def __init__(self) -> None:
        self._reader, self._writer = host.open_pipe(PIPE_BYTES)
        self.held = 0

    def fill(self, source: socket.socket, most: int) -> int:
        """Read from ``source`` while empty."""
        count = host.splice(source.fileno(), self._writer, min(most, PIPE_BYTES))
        self.held += count
        return count

    def drain(self, target: socket.socket) -> None:
        """Write all that ``target`` takes now."""
        number = target.fileno()
        try:
            while self.held:
                self.held -= host.splice(self._reader, number, self.held)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close both ends."""
        os.close(self._reader)
        os.close(self._writer)


class BufferPipe:
    """Buffer of this process."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = 0
        self.held = 0

    def fill(self, source: socket.socket, most: int) -> int:
        """Read from ``source`` while empty."""
        count = source.recv_into(self._buffer[: min(most, _BUFFER_BYTES)])
        self._begin, self.held = 0, count
        return count

    def drain(self, target: socket.socket) -> None:
        """Write all that ``target`` takes now."""
        try:
            while self.held:
                count = target.send(self._buffer[self._begin : self._begin + self.held])
                self._begin += count
                self.held -= count
        except BlockingIOError:
            return

    def close(self) -> None:
        """Free the buffer."""
        self._buffer.release()


class PipePool:
    """Empty pipes for reuse: only directions that hold bytes need one."""

    def __init__(self, make: Callable[[], BytePipe] | None = None) -> None:
        """``make`` opens a pipe; by default the best kind that this machine has."""
        self._make = make or (KernelPipe if host.can_splice() else BufferPipe)
        self._empty: list[BytePipe] = []

    def take(self) -> BytePipe:
        """Return an empty pipe; ``OSError`` if the system has no more."""
        return self._empty.pop() if self._empty else self._make()

    def give_back(self, pipe: BytePipe) -> None:
        """Keep a pipe for others if it is empty, or close it."""
        if pipe.held or len(self._empty) >= _KEPT_PIPES:
            pipe.close()
        else:
            self._empty.append(pipe)

    def close(self) -> None:
        """Close all pipes that nobody uses."""
        while self._empty:
            self._empty.pop().close()
