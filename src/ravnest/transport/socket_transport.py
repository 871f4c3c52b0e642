"""Links over the network: one long-lived connection for each pair of neighbours, with frames both ways.

One connection serves both directions, so only one connection has to be opened, authenticated and
watched. The earlier stage dials first; after a loss, both sides do. It is a TCP connection, with mutual
TLS except on loopback, that carries nothing but frames.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from ravnest.deadlines import LINK_HELLO, LINK_OUTAGE
from ravnest.errors import RefusedError, TransportError, UnreachableError, WrongCertificateError
from ravnest.host import keep_freed_memory
from ravnest.relay.access import RelayAccess
from ravnest.relay.listener import RelayListener
from ravnest.tracing.recorder import SpanRecorder
from ravnest.transport.base import Admit, Link, LinkHandler
from ravnest.transport.handshake import Greeting, new_session
from ravnest.transport.link import FrameLink
from ravnest.transport.link_keeper import LinkKeeper
from ravnest.transport.routes import Route, RouteSearch, Unanswered, combined, routes_to
from ravnest.transport.socket_client import DialRequest, try_dial
from ravnest.transport.socket_server import SocketListener
from ravnest.transport.tls import Credentials, dial_address, is_loopback
from ravnest.types import Address
from ravnest.wire.frames import DEFAULT_LIMITS
from ravnest.wire.header import Limits
from ravnest.wire.messages import Hello

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0
_WAITING_SECONDS = 10.0


class SocketTransport:
    """Transport over TCP connections; implements ``base.Transport``."""

    def __init__(
        self,
        credentials: Credentials | None = None,
        limits: Limits = DEFAULT_LIMITS,
        outage: float = LINK_OUTAGE,
        relay: RelayAccess | None = None,
        secret: str = "",
        trace: SpanRecorder | None = None,
    ) -> None:
        """``credentials`` are required for all addresses other than loopback.

        ``outage`` is the time for which a link without a connection is kept, in seconds. ``relay``:
        relays through which this node reaches others, and is reached. ``secret``: what both sides of a
        connection without TLS have to prove; empty: nothing. ``trace`` records the messages of
        all links.
        """
        self._secret = secret
        self._relay = relay
        self._relay_listeners: list[RelayListener] = []
        self._credentials = credentials
        self._limits = limits
        self._lock = threading.Lock()
        self._listeners: list[SocketListener] = []
        self._links = LinkKeeper(self._redial, outage, self._leave_relay, trace)

    def serve(
        self,
        address: Address,
        admit: Admit,
        handler: LinkHandler,
        on_link: Callable[[Link], None],
        *,
        known_as: Address | None = None,
    ) -> Address:
        """Listen, with mutual TLS except on loopback."""

        def open_link(greeting: Greeting) -> FrameLink:
            theirs = greeting.theirs
            session = theirs.session or new_session()
            link = self._links.open(greeting.ours, theirs, handler, session, (), self._limits)
            link.introduce(on_link)
            return link

        keep_freed_memory()
        credentials = self._credentials_for(known_as or address)
        listener = SocketListener(
            admit, self._links.find, open_link, self._limits, credentials, self._secret
        )
        port = listener.start(address)
        bound = replace(address, port=port)
        with self._lock:
            self._listeners.append(listener)
        if self._relay is not None and credentials is not None:
            self._listen_at_relays(self._relay, bound)
        return bound

    def _listen_at_relays(self, access: RelayAccess, bound: Address) -> None:
        """Be reachable through relays too; they connect peers with this node's own listener."""
        relay = RelayListener(access, dial_address(bound))
        with self._lock:
            self._relay_listeners.append(relay)
        relay.start()

    def dial(
        self,
        address: Address,
        hello: Hello,
        handler: LinkHandler,
        *,
        deadline: float,
        waiting: Callable[[str], None] | None = None,
        expect: int | None = None,
        others: Sequence[Address] = (),
    ) -> Link:
        """Connect to a peer; pauses between attempts grow and are jittered."""
        keep_freed_memory()
        session = new_session()
        addresses = (address, *others)

        def open_link(peer: Hello) -> FrameLink:
            return self._links.open(hello, peer, handler, session, addresses, self._limits)

        request = _Request(structs.replace(hello, session=session), open_link, expect)
        begin = time.monotonic()
        pause, next_report = _FIRST_PAUSE, begin
        while True:
            left = begin + deadline - time.monotonic()
            outcome = self._try_routes(addresses, request, max(min(left, LINK_HELLO), _FIRST_PAUSE))
            if isinstance(outcome, FrameLink):
                return outcome
            now = time.monotonic()
            if now + pause >= begin + deadline:
                raise UnreachableError(f"no answer from {address} in {deadline:g} s: {outcome.reason}")
            if waiting is not None and now >= next_report:
                next_report = now + _WAITING_SECONDS
                waiting(outcome.reason)
            if self._links.closed.wait(pause * random.uniform(0.7, 1.3)):  # noqa: S311  # no secret
                raise UnreachableError(f"gave up on {address}: this node is closing")
            pause = min(2 * pause, _LONGEST_PAUSE)

    def drop(self, node: int, generation: int, reason: str) -> None:
        """End the links to a node that has this generation, or an earlier one."""
        self._links.drop(node, generation, reason)

    def close(self) -> None:
        """Close all links in parallel and stop listening."""
        self._links.close()
        with self._lock:
            listeners, self._listeners = self._listeners, []
            relays, self._relay_listeners = self._relay_listeners, []
        for relay in relays:
            relay.close()
        for listener in listeners:
            listener.stop()

    def _redial(
        self, link: FrameLink, addresses: Sequence[Address], seconds: float
    ) -> Unanswered | None:
        outcome = self._try_routes(addresses, _continued(link), seconds)
        return outcome if isinstance(outcome, Unanswered) else None

    def _leave_relay(self, link: FrameLink, addresses: Sequence[Address], seconds: float) -> bool:
        """Connect a link that passes a relay directly; return False if no address answers."""
        try:
            outcome = self._try_routes(addresses, _continued(link), seconds, direct=True)
        except RefusedError:  # another machine has this address in the network of this node
            return False
        return isinstance(outcome, FrameLink)

    def _try_routes(
        self, addresses: Sequence[Address], request: _Request, seconds: float, *, direct: bool = False
    ) -> FrameLink | Unanswered:
        """Try once to connect on any route; ``direct``: on those that pass no relay only."""
        credentials = self._credentials_for(addresses[0])
        relay = None if direct else self._relay
        routes = routes_to(addresses, relay, request.expect)
        search = RouteSearch(routes, seconds)
        for route in search:
            try:
                outcome = self._try_route(route, request, credentials, seconds)
            except WrongCertificateError as error:
                if len(routes) == 1:
                    raise
                outcome = Unanswered(str(error))
            if isinstance(outcome, FrameLink):
                return outcome
            search.failures[route] = outcome
        return combined(search.failures)

    def _try_route(
        self, route: Route, request: _Request, credentials: Credentials | None, seconds: float
    ) -> FrameLink | Unanswered:
        """Try once to connect on one route; without credentials the peer is on this machine."""
        dialled = DialRequest(
            route,
            request.hello,
            request.open_link,
            request.expect,
            self._limits,
            credentials,
            self._secret,
        )
        return try_dial(dialled, seconds)

    def _credentials_for(self, address: Address) -> Credentials | None:
        if is_loopback(address):
            return None
        if self._credentials is None:
            raise TransportError(
                f"{address} can be reached from other machines, so it needs certificates: use those"
                " that clusterize() wrote, or an address like 127.0.0.1"
            )
        return self._credentials


@dataclass(frozen=True)
class _Request:
    """Connection to a peer, on any route."""

    hello: Hello
    open_link: Callable[[Hello], FrameLink]
    expect: int | None


def _continued(link: FrameLink) -> _Request:
    """Return the request for another connection of a link."""
    hello = structs.replace(link.local, session=link.session, continues=True)
    return _Request(hello, lambda _: link, link.peer.node)
