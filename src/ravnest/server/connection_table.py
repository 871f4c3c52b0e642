"""Connections of strangers and members, and which one is closed for another.

A connection is a stranger's until a request on it had a valid credential. Strangers share a small
number of places. The oldest of them is closed for a new one, instead of refusing the new one: a member
sends its credential at once, so that it needs a place for a moment only, even if somebody else at its
address holds all places.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from ravnest.relay.sockets import network_of
from ravnest.server.settings import ConnectionLimits


class ClosableConnection(Protocol):
    """A connection to the server."""

    def close_now(self) -> None:
        """Close it; called by the thread of the event loop."""

    def close_soon(self) -> None:
        """Close it after its present answer had time to be sent; called by any thread."""


class ConnectionTable:
    """Open connections of strangers and members; decides which one is closed. Pure."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._strangers: OrderedDict[ClosableConnection, str] = OrderedDict()
        """Connections without a credential with their addresses, oldest first."""
        self._by_address: dict[str, OrderedDict[ClosableConnection, None]] = {}
        self._members: dict[ClosableConnection, str] = {}
        self._by_member: dict[str, int] = {}

    @property
    def strangers(self) -> int:
        """Number of connections without a credential."""
        return len(self._strangers)

    def open(self, connection: ClosableConnection, address: str) -> list[ClosableConnection]:
        """Add a connection; return those that must be closed for it."""
        address = network_of(address)
        closed: list[ClosableConnection] = []
        own = self._by_address.setdefault(address, OrderedDict())
        if len(own) >= self._limits.strangers_per_address:
            closed.append(next(iter(own)))
        elif len(self._strangers) >= self._limits.strangers:
            closed.append(next(iter(self._strangers)))
        for each in closed:
            self._forget_stranger(each)
        self._add_stranger(connection, address)
        return closed

    def replace(self, connection: ClosableConnection, later: ClosableConnection) -> bool:
        """Give the place of a stranger to what its connection became; ``False`` if it has none."""
        address = self._strangers.get(connection)
        if address is None:
            return False
        self._forget_stranger(connection)
        self._add_stranger(later, address)
        return True

    def identify(self, connection: ClosableConnection, member: str) -> bool:
        """Note the member of a connection; return ``False`` if that member has too many."""
        if self._members.get(connection) == member:
            return True
        if self._by_member.get(member, 0) >= self._limits.per_member:
            return False
        self.close(connection)
        self._members[connection] = member
        self._by_member[member] = self._by_member.get(member, 0) + 1
        return True

    def close_member(self, member: str) -> None:
        """Close the connections of a member; called by any thread."""
        for connection, owner in list(self._members.items()):
            if owner == member:
                connection.close_soon()

    def close(self, connection: ClosableConnection) -> None:
        """Remove a connection; one that is not here is ignored."""
        self._forget_stranger(connection)
        member = self._members.pop(connection, None)
        if member is not None:
            self._by_member[member] -= 1
            if not self._by_member[member]:
                del self._by_member[member]

    def _add_stranger(self, connection: ClosableConnection, address: str) -> None:
        self._strangers[connection] = address
        self._by_address.setdefault(address, OrderedDict())[connection] = None

    def _forget_stranger(self, connection: ClosableConnection) -> None:
        address = self._strangers.pop(connection, None)
        if address is not None:
            own = self._by_address[address]
            del own[connection]
            if not own:
                del self._by_address[address]
