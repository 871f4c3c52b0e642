"""Links over gRPC: one long-lived stream for each pair of neighbours, with raw frames both ways.

One connection serves both directions, so only one connection has to be opened, authenticated and
watched. The earlier stage dials. gRPC provides TLS, flow control and keep-alive. Frames have their own
format instead of protobuf, which would copy and parse the tensors.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ravnest.errors import TransportError, UnreachableError
from ravnest.host import keep_freed_memory
from ravnest.transport.base import Admit, Link, LinkHandler
from ravnest.transport.grpc_client import DialRequest, try_dial
from ravnest.transport.grpc_server import GrpcListener
from ravnest.transport.handshake import HELLO_SECONDS
from ravnest.transport.link import CLOSE_SECONDS, FrameLink
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

    def __init__(self, credentials: Credentials | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        """``credentials`` are required for all addresses other than loopback."""
        self._credentials = credentials
        self._limits = limits
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._listeners: list[GrpcListener] = []
        self._links: list[FrameLink] = []

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

        def keep(link: FrameLink) -> None:
            self._keep(link)
            on_link(link)

        keep_freed_memory()
        listener = GrpcListener(admit, handler, keep, self._limits)
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
        request = DialRequest(
            address, hello, handler, expect, self._credentials_for(address), self._limits
        )
        begin = time.monotonic()
        pause, next_report = _FIRST_PAUSE, begin
        while True:
            left = begin + deadline - time.monotonic()
            outcome = try_dial(request, max(min(left, HELLO_SECONDS), _FIRST_PAUSE))
            if isinstance(outcome, FrameLink):
                self._keep(outcome)
                return outcome
            now = time.monotonic()
            if now + pause >= begin + deadline:
                raise UnreachableError(f"no answer from {address} in {deadline:g} s: {outcome}")
            if waiting is not None and now >= next_report:
                next_report = now + _WAITING_SECONDS
                waiting(str(outcome))
            if self._closed.wait(pause * random.uniform(0.7, 1.3)):  # noqa: S311  # no secret
                raise UnreachableError(f"gave up on {address}: this node is closing")
            pause = min(2 * pause, _LONGEST_PAUSE)

    def close(self) -> None:
        """Close all links in parallel and stop listening."""
        self._closed.set()
        with self._lock:
            links, listeners = self._links, self._listeners
            self._links, self._listeners = [], []
        threads = [threading.Thread(target=link.close, daemon=True) for link in links if link.alive]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * CLOSE_SECONDS)  # each link gives up earlier by itself
        for listener in listeners:
            listener.stop()

    def _keep(self, link: FrameLink) -> None:
        with self._lock:
            self._links = [other for other in self._links if other.alive] + [link]

    def _credentials_for(self, address: Address) -> Credentials | None:
        if is_loopback(address):
            return None
        if self._credentials is None:
            raise TransportError(
                f"{address} can be reached from other machines, so it needs certificates: use those"
                " that clusterize() wrote, or an address like 127.0.0.1"
            )
        return self._credentials
