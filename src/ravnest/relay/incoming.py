"""Incoming circuit of a node: one connection to the relay, and one to the node's own listener."""

from __future__ import annotations

import contextlib
import logging
import socket

from ravnest.deadlines import RELAY_ANSWER
from ravnest.errors import RelayError
from ravnest.relay.heads import HeadReader, RelayMethod, parse_answer, request
from ravnest.relay.loop import READ, WRITE, EventLoop
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
        circuit: str,
        ticket: str,
    ) -> None:
        self._loop = loop
        self._splicer = splicer
        self._places = relay, target
        self._sending = request(RelayMethod.ACCEPT, circuit, ticket)
        self._head = HeadReader()
        self._rest: bytes | None = None
        """Bytes after the relay's answer, once it has arrived."""
        self._target_connected = False
        self._sockets: list[socket.socket] = []
        self._on_relay = self._relay_ready
        self._on_target = self._target_ready

    def begin(self) -> None:
        """Connect to both."""
        try:
            for place in self._places:
                self._sockets.append(begin_connect(place))
        except OSError as error:
            self._end(str(error))
            return
        relay, target = self._sockets
        self._loop.watch(relay, WRITE, self._on_relay)
        self._loop.watch(target, WRITE, self._on_target)
        self._loop.call_at(self._loop.now + RELAY_ANSWER, lambda: self._end("no answer in time"))

    def _relay_ready(self, events: int) -> None:
        relay = self._sockets[0]
        try:
            if events & WRITE:
                self._send(relay)
            if events & READ:
                self._receive(relay)
        except (OSError, RelayError) as error:
            self._end(str(error))

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
            self._end(f"cannot connect to the node's listener: {OSError(number, '')}")
            return
        self._target_connected = True
        self._loop.unwatch(target)
        self._join()

    def _join(self) -> None:
        if self._rest is not None and self._target_connected:
            relay, target = self._sockets
            self._sockets = []
            self._splicer.join(relay, target, to_far=self._rest)

    def _end(self, reason: str) -> None:
        if self._sockets:
            logger.info("an incoming circuit failed: %s", reason)
        for opened in self._sockets:
            self._loop.unwatch(opened)
            opened.close()
        self._sockets = []
