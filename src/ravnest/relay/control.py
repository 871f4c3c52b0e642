"""Control connection of a node to a relay, in an event loop."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from ravnest.deadlines import RELAY_ANSWER, RELAY_SILENCE
from ravnest.errors import RelayError
from ravnest.relay.access import RelayAccess
from ravnest.relay.circuits import INCOMING_LINE, PING_LINE, PONG_LINE
from ravnest.relay.heads import HeadReader, RelayMethod, parse_answer, request
from ravnest.relay.lines import LineReader
from ravnest.relay.loop import READ, WRITE, EventLoop

_RECEIVE_BYTES = 4096


class ControlConnection:
    """Registration over one connection, until it ends; its methods belong to the loop's thread."""

    def __init__(
        self,
        loop: EventLoop,
        connection: socket.socket,
        access: RelayAccess,
        on_registered: Callable[[], None],
        on_incoming: Callable[[str], None],
        on_end: Callable[[str], None],
    ) -> None:
        """``on_incoming`` is called with the id of each circuit, ``on_end`` once with the reason."""
        self._loop = loop
        self._socket = connection
        self._on_registered = on_registered
        self._on_incoming = on_incoming
        self._on_end = on_end
        self._sending = request(RelayMethod.REGISTER, str(access.endpoint), access.ticket)
        self._head = HeadReader()
        self._lines: LineReader | None = None
        self._heard = 0.0
        self._ended = False
        self._on_ready = self._ready

    def begin(self) -> None:
        """Ask the relay to register the node."""
        self._heard = self._loop.now
        self._loop.call_at(self._loop.now + RELAY_ANSWER, self._check_silence)
        self._send()

    def end(self, reason: str) -> None:
        """Close the connection."""
        if not self._ended:
            self._ended = True
            self._loop.unwatch(self._socket)
            self._socket.close()
            self._on_end(reason)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._send()
        if events & READ and not self._ended:
            self._receive()

    def _send(self) -> None:
        try:
            with contextlib.suppress(BlockingIOError):
                self._sending = self._sending[self._socket.send(self._sending) :]
        except OSError as error:
            self.end(f"the connection is lost: {error}")
            return
        self._loop.watch(self._socket, READ | (WRITE if self._sending else 0), self._on_ready)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.end(f"the connection is lost: {error}")
            return
        if not data:
            self.end("the relay closed the connection")
            return
        self._heard = self._loop.now
        try:
            self._on_bytes(data)
        except RelayError as error:
            self.end(str(error))

    def _on_bytes(self, data: bytes) -> None:
        if self._lines is None:
            found = self._head.feed(data)
            if found is None:
                return
            head, data = found
            status, reason = parse_answer(head)
            if status != 200:
                raise RelayError(f"the relay refused: {status} {reason}")
            self._lines = LineReader()
            self._on_registered()
        for line in self._lines.feed(data):
            self._on_line(line)

    def _on_line(self, line: str) -> None:
        word, _, circuit = line.partition(" ")
        if word == INCOMING_LINE and circuit:
            self._on_incoming(circuit)
        elif line == PING_LINE:
            self._sending += f"{PONG_LINE}\n".encode("ascii")
            self._send()
        else:
            raise RelayError(f"the relay sent a line that is not known: {line[:50]!r}")

    def _check_silence(self) -> None:
        """End a connection on which nothing arrives, not even pings."""
        if self._ended:
            return
        until = self._heard + (RELAY_ANSWER if self._lines is None else RELAY_SILENCE)
        if self._loop.now >= until:
            self.end("the relay is silent")
        else:
            self._loop.call_at(until, self._check_silence)
