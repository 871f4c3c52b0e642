"""Connection of a link over a socket."""

from __future__ import annotations

import threading
import time

from ravnest.errors import WireError
from ravnest.transport.connection import Connection
from ravnest.transport.frame_socket import FrameSocket
from ravnest.transport.link import FrameLink
from ravnest.wire.control import Closing, encode_control
from ravnest.wire.envelope import Buffer


class SocketConnection(Connection):
    """Connection whose messages are sent by the thread that queues them, as far as that does not block.

    A hand-over to another thread costs more than a system call. The writer sends what does not fit into
    the buffers of the system, control frames, and the end.
    """

    def __init__(
        self, stream: FrameSocket, link: FrameLink, largest: int, *, relayed: bool = False
    ) -> None:
        """``largest``: maximum size of a received frame, in bytes."""
        super().__init__(stream.hang_up, relayed=relayed)
        self._stream = stream
        self._link = link
        self._largest = largest
        self._turn = threading.Lock()
        """Held by the thread that sends; guards all attributes below but ``_wanted``."""
        self._wanted = False
        """There may be something to send that the thread which sends has not seen."""
        self._rest: list[Buffer] = []
        """Bytes that were taken from the link and are not sent yet."""
        self._begun = (0, 0.0)
        """Size of the batch to which they belong, and the time at which it was taken."""
        self._unsendable: WireError | None = None
        self._broken = False

    def start(self) -> None:
        """Attach this connection to its link, and start its writer."""
        self._link.attach(self)
        threading.Thread(target=self._write, name="ravnest link writer", daemon=True).start()

    def prompt(self) -> None:
        """Send new messages in this thread; the writer is woken for what would block."""
        self._wanted = True
        # The thread that has the turn looks for new messages once more after it has given it up.
        while self._wanted and self._turn.acquire(blocking=False):
            try:
                complete = self._send_all(wait=False)
            finally:
                self._turn.release()
            if not complete:
                self.wake.put(None)
                return

    def read(self) -> None:
        """Pass what arrives to the link until the connection ends."""
        detail = "the connection was closed"
        try:
            while (data := self._stream.read(self._largest)) is not None:
                self._link.received(self, data)
        except WireError as error:
            self._link.invalid(error)
            self._stream.await_end()  # closing now could discard what the link tells the peer
        except OSError as error:
            detail = error.strerror or str(error)
        self._stream.hang_up()
        with self._turn:
            self._broken, self._rest = True, []
            self._stream.close()
        self._link.disconnected(self, detail)

    def _write(self) -> None:
        """Send what other threads leave, until the connection ends."""
        while True:
            with self._turn:
                self._send_all(wait=True)
                unsendable = self._unsendable
            if unsendable is not None:
                self._link.unsendable(unsendable)
            if self._wanted and not self._broken and unsendable is None:
                continue
            if self._link.writes_end(self):
                self._send_end()
                return
            if self._link.stale(self):
                return
            self.await_wake()

    def _send_all(self, *, wait: bool) -> bool:
        """Send everything that the link has; return False if something is left for the writer."""
        self._wanted = False
        try:
            while not self._broken and self._unsendable is None:
                if self._rest:
                    self._rest = self._stream.send(self._rest, wait=wait)
                    if self._rest:
                        return False
                    count, begun = self._begun
                    self._link.written(count, time.perf_counter() - begun)
                parts = self._link.next_parts(self)
                if parts is None:
                    break
                self._begun = sum(map(len, parts)), time.perf_counter()
                self._rest = self._stream.sealed(parts)
        except WireError as error:
            self._unsendable = error
        except OSError:  # the reader notices the end of the connection
            self._broken, self._rest = True, []
            self._stream.hang_up()
        return self._unsendable is None

    def _send_end(self) -> None:
        with self._turn:
            if self._broken:
                return
            try:
                self._stream.send(self._stream.sealed(encode_control(Closing())), wait=True)
            except OSError:
                self._broken = True
            self._stream.end_writing()
