"""Bounded stores of bytes between two sockets: pipes of the kernel, or buffers of this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Protocol

from ravnest import host

PIPE_BYTES = 1 << 20
"""Size of a pipe. In two runs each on a loaded machine, 256 KiB took 0.38 and 0.40 s of processor time
per GB at the relay, 1 MiB 0.33 and 0.35 s."""
_MANY_PIPES = 16
"""Number from which pipes are small: the system lets a user's pipes hold 64 MiB together."""
_SMALL_PIPE_BYTES = 128 << 10
_BUFFER_BYTES = 64 << 10
"""Size of a buffer. In two runs each, 256 KiB took 0.50 and 0.50 s of processor time per GB at the
relay, 64 KiB 0.41 and 0.46 s."""


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

    def __init__(self, size: int) -> None:
        self._reader, self._writer = host.open_pipe(size)
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

    def __init__(self, size: int) -> None:
        self._buffer = memoryview(bytearray(min(size, _BUFFER_BYTES)))
        self._begin = 0
        self.held = 0

    def fill(self, source: socket.socket, most: int) -> int:
        """Read from ``source`` while empty."""
        count = source.recv_into(self._buffer[:most])
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


MakePipe = Callable[[int], BytePipe]
"""Opens a pipe of about so many bytes."""


class PipePool:
    """Empty pipes for reuse: only directions that hold bytes need one."""

    def __init__(self, make: MakePipe | None = None) -> None:
        """``make`` opens a pipe; by default the best kind that this machine has."""
        self._make: MakePipe = make or (KernelPipe if host.can_splice() else BufferPipe)
        self._empty: list[BytePipe] = []
        self._taken = 0

    @property
    def taken(self) -> int:
        """Number of pipes that are in use."""
        return self._taken

    def take(self) -> BytePipe:
        """Return an empty pipe."""
        self._taken += 1
        if self._empty:
            return self._empty.pop()
        size = PIPE_BYTES if self._taken <= _MANY_PIPES else _SMALL_PIPE_BYTES
        try:
            return self._make(size)
        except OSError:  # no descriptors are left; a buffer needs none
            return BufferPipe(size)

    def give_back(self, pipe: BytePipe) -> None:
        """Keep a pipe for others if it is empty, or close it."""
        self._taken -= 1
        if pipe.held or len(self._empty) >= _MANY_PIPES:
            pipe.close()
        else:
            self._empty.append(pipe)

    def close(self) -> None:
        """Close all pipes that nobody uses."""
        while self._empty:
            self._empty.pop().close()
