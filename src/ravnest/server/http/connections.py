"""Limits of the server's connections: number, time for a request's header, and unread bodies.

A connection has a place in the table from the moment in which it is accepted, before the TLS handshake.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ravnest.server.connection_table import ConnectionTable
from ravnest.server.settings import ConnectionLimits

CONNECTION = "ravnest.connection"
"""Key of the connection in the scope of a request."""
_REVOKED_SECONDS = 2.0
"""Time in which a request of a member whose credential was revoked is answered."""
_LOOKED_AT = 8
"""Oldest accepted connections that are looked at for each new one: some of them are closed already."""

Peer = tuple[str, int]
"""Address and port of a client."""


class AcceptedConnection:
    """Connection that was accepted, and whose TLS handshake is not over."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @property
    def is_closed(self) -> bool:
        """True if its handshake has failed."""
        return self._connection.fileno() < 0

    def close_now(self) -> None:
        """End the handshake: the event loop sees the end of the stream, and closes the socket."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close_soon(self) -> None:
        """End the handshake."""
        self.close_now()


class CountedListener(socket.socket):
    """Listening socket that gives each connection a place as soon as it is accepted.

    asyncio tells a protocol of its connection only after the TLS handshake. Until then it would take
    memory and a file without being counted. The event loop of Windows accepts in another way: there,
    connections are counted after the handshake.
    """

    def __init__(self, listener: socket.socket, table: ConnectionTable) -> None:
        family, kind, protocol = listener.family, listener.type, listener.proto
        super().__init__(family, kind, protocol, fileno=listener.detach())
        self._table = table
        self._accepted: OrderedDict[Peer, AcceptedConnection] = OrderedDict()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and close older ones of strangers if there are too many."""
        connection, address = super().accept()
        for peer in [
            peer for peer, each in islice(self._accepted.items(), _LOOKED_AT) if each.is_closed
        ]:
            self._forget(peer)
        peer = (str(address[0]), int(address[1]))
        self._forget(peer)
        accepted = self._accepted[peer] = AcceptedConnection(connection)
        for each in self._table.open(accepted, peer[0]):
            each.close_now()
        return connection, address

    def made(self, peer: Peer, connection: LimitedProtocol) -> bool:
        """Give the place of an accepted connection to its protocol, after the handshake.

        Return ``False`` if it has lost its place meanwhile.
        """
        accepted = self._accepted.pop(peer, None)
        if accepted is not None:
            return self._table.replace(accepted, connection)
        for each in self._table.open(connection, peer[0]):
            each.close_now()
        return True

    def _forget(self, peer: Peer) -> None:
        found = self._accepted.pop(peer, None)
        if found is not None:
            self._table.close(found)


class LimitedProtocol(H11Protocol):
    """HTTP connection with limits, and without uvicorn's access log.

    That log would contain the tokens of login links. Disabling its logger by name would affect other
    servers in this process, and a logging configuration could enable it again.
    """

    table: ConnectionTable
    limits: ConnectionLimits
    listener: CountedListener

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.access_log = False
        app = self.app
        self._header_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._unread = 0
        """Bytes of a body that arrived after its request was answered."""

        async def with_connection(scope: Any, receive: Any, send: Any) -> None:
            scope[CONNECTION] = self
            await app(scope, receive, send)

        self.app = with_connection

    def identify(self, member: str) -> bool:
        """Note who uses this connection; return ``False`` if that member has too many connections."""
        return self.table.identify(self, member)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Add the connection; close it if newer ones of strangers have all places."""
        super().connection_made(transport)
        if not self.listener.made(self.client or ("", 0), self):
            self.close_now()
            return
        self._header_timer = self.loop.call_later(self.limits.header_seconds, self.close_now)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self.table.close(self)
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on; close if a header takes too long or an answered request goes on and on."""
        if self._linger_timer is not None:
            self._unread += len(data)
            if self._unread > self.limits.unread_bytes:
                self.close_now()
                return
        super().data_received(data)
        if self.conn.their_state is not h11.SEND_BODY and self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        is_in_header = self.conn.their_state is h11.IDLE
        if not is_in_header and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        elif is_in_header and self._header_timer is None and self.conn.trailing_data[0]:
            self._header_timer = self.loop.call_later(self.limits.header_seconds, self.close_now)

    def on_response_complete(self) -> None:
        """Limit what may still arrive of a request that was answered before its end."""
        if self.conn.their_state is h11.SEND_BODY and self._linger_timer is None:
            self._unread = 0
            self._linger_timer = self.loop.call_later(self.limits.linger_seconds, self.close_now)
        super().on_response_complete()

    def close_soon(self) -> None:
        """Close the connection after its present answer had time to be sent; called by any thread."""
        close = partial(self.loop.call_later, _REVOKED_SECONDS, self.close_now)
        with suppress(RuntimeError):  # the event loop has ended
            self.loop.call_soon_threadsafe(close)

    def close_now(self) -> None:
        """Close the connection."""
        self._stop_timers()
        self.transport.abort()

    def _stop_timers(self) -> None:
        for timer in (self._header_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._linger_timer = None


def limited_protocol(
    table: ConnectionTable, limits: ConnectionLimits, listener: CountedListener
) -> type[LimitedProtocol]:
    """Return a protocol class for the connections of one listener."""
    fields = {"table": table, "limits": limits, "listener": listener}
    return type("ServerProtocol", (LimitedProtocol,), fields)
