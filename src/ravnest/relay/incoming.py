"""Incoming circuit of a node: one connection to the relay, and one to the node's own listener."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable

from ravnest.deadlines import RELAY_ANSWER
from ravnest.errors import RelayError
from ravnest.relay.heads import HeadReader, parse_answer
from ravnest.relay.loop import READ, WRITE, EventLoop, Timer
from ravnest.relay.sockets import SocketAddress, begin_connect, connect_error
from ravnest.relay.splicing import Splicer

logger = logging.getLogger(__name__)


class IncomingCircuit:
    """Two connections that are established at the same time and then spliced, in an event loop."""

    def __init__(
        self,
        loop: EventLoop,
        splicer: Splicer,
        relay: SocketAddress,
        target: SocketAddress,
        head: bytes,
    ) -> None:
        """``head`` is the request that accepts the circuit at the relay."""
        self._loop = loop
        self._splicer = splicer
        self._places = relay, target
        self._sending = head
        self._head = HeadReader()
        self._rest: bytes | None = None
        """Bytes after the relay's answer, once it has arrived."""
        self._target_connected = False
        self._sockets: list[socket.socket] = []
        self._timer = Timer(lambda: None)
        self._on_end: Callable[[], None] = lambda: None
        self._on_relay = self._relay_ready
        self._on_target = self._target_ready

    def begin(self, on_end: Callable[[], None]) -> None:
        """Connect to both; ``on_end`` is called once they are spliced, or have failed."""
        self._on_end = on_end
        try:
            for place in self._places:
                self._sockets.append(begin_connect(place))
        except OSError as error:
            self.end(str(error))
            return
        relay, target = self._sockets
        self._loop.watch(relay, WRITE, self._on_relay)
        self._loop.watch(target, WRITE, self._on_target)
        self._timer = self._loop.call_at(
            self._loop.now + RELAY_ANSWER, lambda: self.end("no answer in time")
        )

    def _relay_ready(self, events: int) -> None:
        relay = self._sockets[0]
        try:
            if events & WRITE:
                self._send(relay)
            if events & READ:
                self._receive(relay)
        except (OSError, RelayError) as error:
            self.end(str(error))

    def _send(self, relay: socket.socket) -> None:
        if number := connect_error(relay):
            raise OSError(number, "cannot connect to the relay")
        with contextlib.suppress(BlockingIOError):
            self._sending = self._sending[relay.send(self._sending) :]
        self._loop.watch(relay, READ | (WRITE if self._sending else 0), self._on_relay)

    def _receive(self, relay: socket.socket) -> None:
        try:
            data = relay.recv(self._head.room)
        except BlockingIOError:
            return
        if not data:
            raise RelayError("the relay closed the connection")
        found = self._head.feed(data)
        if found is not None:
            head, rest = found
            status, reason = parse_answer(head)
            if status != 200:
                raise RelayError(f"the relay refused: {status} {reason}")
            self._rest = rest
            self._loop.unwatch(relay)
            self._join()

    def _target_ready(self, _: int) -> None:
        target = self._sockets[1]
        if number := connect_error(target):
            self.end(f"cannot connect to the node's listener: {OSError(number, '')}")
            return
        self._target_connected = True
        self._loop.unwatch(target)
        self._join()

    def _join(self) -> None:
        if self._rest is not None and self._target_connected:
            relay, target = self._sockets
            self._sockets = []
            self._timer.cancel()
            self._splicer.join(relay, target, to_far=self._rest)
            self._on_end()

    def end(self, reason: str) -> None:
        """Close both connections, unless they are spliced already."""
        logger.info("an incoming circuit failed: %s", reason)
        self._timer.cancel()
        for opened in self._sockets:
            self._loop.unwatch(opened)
            opened.close()
        self._sockets = []
        self._on_end()
