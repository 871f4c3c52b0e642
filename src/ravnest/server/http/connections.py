"""Limits of the server's connections: number, time for a request's header, and unread bodies.

A connection is a stranger's until a request on it had a valid credential. Strangers share a small
number of places. The oldest of them is closed for a new one, instead of refusing the new one: a member
sends its credential at once, so that it needs a place for a moment only, even if somebody else at its
address holds all places.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ravnest.server.settings import ConnectionLimits

CONNECTION = "ravnest.connection"
"""Key of the connection in the scope of a request."""


class ConnectionTable:
    """Open connections of strangers and members; decides which one is closed. Pure."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._strangers: OrderedDict[object, str] = OrderedDict()
        """Connections without a credential with their addresses, oldest first."""
        self._by_address: dict[str, OrderedDict[object, None]] = {}
        self._members: dict[object, str] = {}
        self._by_member: dict[str, int] = {}

    @property
    def strangers(self) -> int:
        """Number of connections without a credential."""
        return len(self._strangers)

    def open(self, connection: object, address: str) -> list[object]:
        """Add a connection; return those that must be closed for it."""
        closed: list[object] = []
        own = self._by_address.setdefault(address, OrderedDict())
        if len(own) >= self._limits.strangers_per_address:
            closed.append(next(iter(own)))
        elif len(self._strangers) >= self._limits.strangers:
            closed.append(next(iter(self._strangers)))
        for each in closed:
            self._forget_stranger(each)
        self._strangers[connection] = address
        self._by_address.setdefault(address, OrderedDict())[connection] = None
        return closed

    def identify(self, connection: object, member: str) -> bool:
        """Note the member of a connection; return ``False`` if that member has too many."""
        if self._members.get(connection) == member:
            return True
        if self._by_member.get(member, 0) >= self._limits.per_member:
            return False
        self.close(connection)
        self._members[connection] = member
        self._by_member[member] = self._by_member.get(member, 0) + 1
        return True

    def close(self, connection: object) -> None:
        """Remove a connection; one that is not here is ignored."""
        self._forget_stranger(connection)
        member = self._members.pop(connection, None)
        if member is not None:
            self._by_member[member] -= 1
            if not self._by_member[member]:
                del self._by_member[member]

    def _forget_stranger(self, connection: object) -> None:
        address = self._strangers.pop(connection, None)
        if address is not None:
            own = self._by_address[address]
            del own[connection]
            if not own:
                del self._by_address[address]


class LimitedProtocol(H11Protocol):
    """HTTP connection with limits, and without uvicorn's access log.

    That log would contain the tokens of login links. Disabling its logger by name would affect other
    servers in this process, and a logging configuration could enable it again.
    """

    table: ConnectionTable
    limits: ConnectionLimits

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
        """Add the connection, and close older ones of strangers if there are too many."""
        super().connection_made(transport)
        for each in self.table.open(self, self.client[0] if self.client else ""):
            assert isinstance(each, LimitedProtocol)
            each.transport.abort()
        self._header_timer = self.loop.call_later(self.limits.header_seconds, self._abort)

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
                self._abort()
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
            self._header_timer = self.loop.call_later(self.limits.header_seconds, self._abort)

    def on_response_complete(self) -> None:
        """Limit what may still arrive of a request that was answered before its end."""
        if self.conn.their_state is h11.SEND_BODY and self._linger_timer is None:
            self._unread = 0
            self._linger_timer = self.loop.call_later(self.limits.linger_seconds, self._abort)
        super().on_response_complete()

    def _abort(self) -> None:
        self._stop_timers()
        self.transport.abort()

    def _stop_timers(self) -> None:
        for timer in (self._header_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._linger_timer = None


def limited_protocol(limits: ConnectionLimits) -> type[LimitedProtocol]:
    """Return a protocol class for one server, whose connections share a table."""
    return type(
        "ServerProtocol", (LimitedProtocol,), {"table": ConnectionTable(limits), "limits": limits}
    )
