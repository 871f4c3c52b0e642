"""Listening side of links over sockets, with TLS except for peers on the same machine."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ravnest import host
from ravnest.deadlines import LINK_HELLO
from ravnest.errors import LinkClosedError, RefusedError, WireError
from ravnest.transport.base import Admit
from ravnest.transport.frame_socket import CLOSED_IN_CHILDREN, FrameSocket
from ravnest.transport.handshake import LARGEST_HELLO, Greeting, ListenHandshake, hello_frame
from ravnest.transport.link import FrameLink
from ravnest.transport.listen_address import MAX_LINKS, bound_socket
from ravnest.transport.socket_connection import SocketConnection
from ravnest.transport.tls import Credentials, listening_context
from ravnest.transport.tls_rejections import report_rejection
from ravnest.types import Address
from ravnest.wire.frames import largest_frame
from ravnest.wire.header import Limits
from ravnest.wire.messages import HelloRefused

_ACCEPT_PAUSE = 0.5
"""Seconds until connections are accepted again, after the system had no room for one."""
_FAREWELL_SECONDS = 1.0
"""Time for a refused peer to read the reason."""

logger = logging.getLogger(__name__)


class SocketListener:
    """Listening socket that accepts connections, of new links and of open ones."""

    def __init__(
        self,
        admit: Admit,
        find: Callable[[str], FrameLink | None],
        open_link: Callable[[Greeting], FrameLink],
        limits: Limits,
        credentials: Credentials | None,
        secret: str,
    ) -> None:
        """``credentials``: identity of this node; None: no TLS, and peers have to prove ``secret``.

        With an empty secret they have to prove nothing.
        """
        self._admit = admit
        self._find = find
        self._open_link = open_link
        self._largest = largest_frame(limits)
        self._context = None if credentials is None else listening_context(credentials)
        self._secret = secret
        self._listening: socket.socket | None = None
        self._lock = threading.Lock()
        self._strangers: dict[FrameSocket, None] = {}
        """Connections of peers that are not admitted yet, the oldest first."""
        self._streams: set[FrameSocket] = set()
        self._stopped = threading.Event()

    def start(self, address: Address) -> int:
        """Listen, and return the port."""
        self._listening = listening = bound_socket(address)
        listening.listen(MAX_LINKS)
        CLOSED_IN_CHILDREN.add(listening)
        threading.Thread(
            target=self._accept, args=(listening,), name="ravnest listener", daemon=True
        ).start()
        return int(listening.getsockname()[1])

    def stop(self) -> None:
        """Stop listening and end open streams."""
        self._stopped.set()
        if self._listening is not None:
            with suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)  # otherwise accept() goes on
            self._listening.close()
        with self._lock:
            streams = [*self._strangers, *self._streams]
        for stream in streams:
            stream.hang_up()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connected, where = listening.accept()
            except ConnectionAbortedError:
                continue
            except OSError as error:  # all descriptors are in use, unless it was stopped
                if self._pause(host.explained(error)):
                    return
                continue
            stream = FrameSocket(connected)
            with self._lock:
                self._strangers[stream] = None
                oldest = next(iter(self._strangers)) if len(self._strangers) > MAX_LINKS else None
                if oldest is not None:
                    del self._strangers[oldest]
            if oldest is not None:  # strangers who say nothing must not keep peers out
                oldest.hang_up()
            reader = threading.Thread(
                target=self._serve, args=(stream, str(where[0])), name="ravnest link reader", daemon=True
            )
            try:
                reader.start()
            except RuntimeError as error:  # the system has no room for another thread
                self._forget(stream)
                if self._pause(str(error)):
                    return

    def _pause(self, reason: str) -> bool:
        """Wait until strangers have left, and return False; True if this listener was stopped."""
        if self._stopped.is_set():
            return True
        logger.warning("a connection was not accepted: %s", reason)
        return self._stopped.wait(_ACCEPT_PAUSE)

    def _forget(self, stream: FrameSocket) -> None:
        with self._lock:
            self._strangers.pop(stream, None)
            self._streams.discard(stream)
        stream.close()

    def _serve(self, stream: FrameSocket, peer: str) -> None:
        """Answer the Hello of a peer, then read what it sends; ``peer`` is its address."""
        try:
            stream.start()
            answered = self._greet(stream)
            if isinstance(answered, HelloRefused):
                _refuse(stream, answered)
            elif answered is not None:
                answered.read()
        except ssl.SSLError as error:
            report_rejection(error, peer)
        except OSError:  # the peer has ended the connection
            return
        finally:
            self._forget(stream)

    def _greet(self, stream: FrameSocket) -> SocketConnection | HelloRefused | None:
        """Return the connection of a peer that is admitted, a refusal, or None if the peer is gone."""
        deadline = time.monotonic() + LINK_HELLO
        certified = None
        if self._context is not None:
            certified = stream.secure(self._context, deadline, listens=True)
        handshake = ListenHandshake(self._admit, self._find, certified, self._secret)
        while True:
            try:
                frame = stream.read_one(LARGEST_HELLO, deadline)
            except TimeoutError:
                return HelloRefused(f"no Hello arrived within {LINK_HELLO:g} s")
            except WireError as error:
                return HelloRefused(f"your Hello is unreadable: {error}")
            if frame is None:
                return None
            reply = handshake.next(bytes(frame))
            if isinstance(reply, HelloRefused):
                return reply
            if isinstance(reply, Greeting):
                return self._opened(stream, reply)
            stream.send_frame(hello_frame(reply))

    def _opened(self, stream: FrameSocket, greeting: Greeting) -> SocketConnection | HelloRefused | None:
        with self._lock:
            if len(self._streams) >= MAX_LINKS:
                return HelloRefused(f"this node has {MAX_LINKS} connections already")
            self._strangers.pop(stream, None)
            self._streams.add(stream)
        try:
            link = greeting.link or self._open_link(greeting)
        except RefusedError as error:
            return HelloRefused(str(error))
        except LinkClosedError:  # the peer dials again
            return None
        stream.send_frame(greeting.frame)
        connection = SocketConnection(stream, link, self._largest, relayed=greeting.theirs.relayed)
        connection.start()
        return connection


def _refuse(stream: FrameSocket, reason: HelloRefused) -> None:
    """Send the reason and wait until the peer has read it: closing earlier could discard it."""
    stream.send_frame(hello_frame(reason))
    stream.end_writing()
    stream.await_end(_FAREWELL_SECONDS)
