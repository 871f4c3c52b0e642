"""Links over gRPC: one long-lived stream for each pair of neighbours, with raw frames both ways.

One connection serves both directions, so only one connection has to be opened, authenticated and
watched. The earlier stage dials first; after a loss, both sides do. gRPC provides TLS and flow control.
Frames have their own format instead of protobuf, which would copy and parse the tensors.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from ravnest.deadlines import LINK_HELLO, LINK_OUTAGE
from ravnest.errors import TransportError, UnreachableError
from ravnest.host import keep_freed_memory
from ravnest.transport.base import Admit, Link, LinkHandler
from ravnest.transport.grpc_client import DialRequest, try_dial
from ravnest.transport.grpc_server import GrpcListener
from ravnest.transport.handshake import Greeting, new_session
from ravnest.transport.link import FrameLink
from ravnest.transport.link_keeper import LinkKeeper, Unanswered
from ravnest.transport.tls import Credentials, is_loopback
from ravnest.types import Address
from ravnest.wire.frames import DEFAULT_LIMITS
from ravnest.wire.header import Limits
from ravnest.wire.messages import Hello

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0
_WAITING_SECONDS = 10.0


class GrpcTransport:
    """Transport over gRPC; implements ``base.Transport``."""

    def __init__(
        self,
        credentials: Credentials | None = None,
        limits: Limits = DEFAULT_LIMITS,
        outage: float = LINK_OUTAGE,
    ) -> None:
        """``credentials`` are required for all addresses other than loopback.

        ``outage`` is the time for which a link without a connection is kept, in seconds.
        """
        self._credentials = credentials
        self._limits = limits
        self._lock = threading.Lock()
        self._listeners: list[GrpcListener] = []
        self._links = LinkKeeper(self._redial, outage)

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
            link = self._links.open(greeting.ours, theirs, handler, session, None, self._limits)
            link.introduce(on_link)
            return link

        keep_freed_memory()
        listener = GrpcListener(admit, self._links.find, open_link, self._limits)
        port = listener.start(address, self._credentials_for(known_as or address))
        with self._lock:
            self._listeners.append(listener)
        return replace(address, port=port)

    def dial(
        self,
        address: Address,
        hello: Hello,
        handler: LinkHandler,
        *,
        deadline: float,
        waiting: Callable[[str], None] | None = None,
        expect: int | None = None,
    ) -> Link:
        """Connect to a peer; pauses between attempts grow and are jittered."""
        keep_freed_memory()
        session = new_session()

        def open_link(peer: Hello) -> FrameLink:
            return self._links.open(hello, peer, handler, session, address, self._limits)

        request = self._request(address, structs.replace(hello, session=session), open_link, expect)
        begin = time.monotonic()
        pause, next_report = _FIRST_PAUSE, begin
        while True:
            left = begin + deadline - time.monotonic()
            outcome = try_dial(request, max(min(left, LINK_HELLO), _FIRST_PAUSE))
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

    def close(self) -> None:
        """Close all links in parallel and stop listening."""
        self._links.close()
        with self._lock:
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.stop()

    def _redial(self, link: FrameLink, address: Address, seconds: float) -> Unanswered | None:
        hello = structs.replace(link.local, session=link.session, continues=True)
        request = self._request(address, hello, lambda _: link, link.peer.node)
        outcome = try_dial(request, seconds)
        return outcome if isinstance(outcome, Unanswered) else None

    def _request(
        self,
        address: Address,
        hello: Hello,
        open_link: Callable[[Hello], FrameLink],
        expect: int | None,
    ) -> DialRequest:
        return DialRequest(
            address, hello, open_link, expect, self._credentials_for(address), self._limits
        )

    def _credentials_for(self, address: Address) -> Credentials | None:
        if is_loopback(address):
            return None
        if self._credentials is None:
            raise TransportError(
                f"{address} can be reached from other machines, so it needs certificates: use those"
                " that clusterize() wrote, or an address like 127.0.0.1"
            )
        return self._credentials
