"""Test of the link to another provider, with the transport that nodes use.

One provider listens at the port of its node, the other one dials it, measures and reports: the round
trip, then the rate in each direction with messages of random bytes. A measurement starts small and
grows until it takes long enough to be exact, so that a slow link is not occupied for long.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ravnest.deadlines import LINK_TEST, LINK_TEST_DIAL, LINK_TEST_RATE
from ravnest.errors import RavnestError, TransportError
from ravnest.relay.access import RelayAccess
from ravnest.relay.tickets import Endpoint
from ravnest.schemas.link_tests import LinkTestOrder, LinkTestResult
from ravnest.transport.base import Link, Transport
from ravnest.transport.socket_transport import SocketTransport
from ravnest.transport.tls import Credentials
from ravnest.types import Address
from ravnest.wire.messages import PROTOCOL, Goodbye, Hello, HelloRefused, Message, RateProbe

FIRST_BYTES = 16 << 10
"""Bytes of the first transfer: 0.13 s at 1 Mbit/s."""
MOST_BYTES = 64 << 20
"""Bytes of a transfer at most."""
MESSAGE_BYTES = 1 << 20
"""Bytes of a message at most."""
LONG_ENOUGH = 0.8
"""Seconds that the last transfer takes at least."""
ROUND_TRIPS = 4
"""Round trips that the last transfer takes at least, so that the connection reaches its rate."""
GROWTH = 8
"""Most by which a transfer is larger than the one before."""
_TRIES = 5
"""Small messages that measure the round trip."""

TransportFactory = Callable[[Credentials | None, RelayAccess | None, str], Transport]


def _sockets(credentials: Credentials | None, relay: RelayAccess | None, secret: str) -> Transport:
    return SocketTransport(credentials, relay=relay, secret=secret)


@dataclass
class LinkTest:
    """One provider's part in a test."""

    order: LinkTestOrder
    listen: Address
    """Address at which this provider's node listens."""
    certify: Callable[[str], Credentials]
    """Returns the credentials of a node name; used for tests with TLS."""
    open_transport: TransportFactory = _sockets
    _stopped: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _transport: Transport | None = None

    def run(self) -> LinkTestResult | None:
        """Take part in the test; return what to report, or None."""
        try:
            credentials = self.certify(f"node_{self.order.node}") if self.order.tls else None
            transport = self.open_transport(credentials, self._relay(), self.order.secret)
            with self._lock:
                if self._stopped.is_set():
                    return None
                self._transport = transport
            try:
                if not self.order.listens:
                    return self._measure(transport)
                self._serve(transport)
                return None
            finally:
                transport.close()
        except RavnestError as error:
            return None if self._stopped.is_set() else LinkTestResult(failure=str(error))

    def stop(self) -> None:
        """End the test soon; thread-safe."""
        self._stopped.set()
        with self._lock:
            transport = self._transport
        if transport is not None and not self.order.listens:
            transport.close()  # ends an attempt to connect

    def _relay(self) -> RelayAccess | None:
        spec = self.order.relay
        if spec is None:
            return None
        relays = tuple(tuple(map(Address.parse, addresses)) for addresses in spec.relays)
        return RelayAccess(relays, Endpoint(spec.job, self.order.node), spec.ticket)

    def _hello(self) -> Hello:
        stage = 1 if self.order.listens else 0
        return Hello(PROTOCOL, plan=self.order.id, node=self.order.node, cluster=0, stage=stage)

    def _serve(self, transport: Transport) -> None:
        """Answer until the test is over."""
        known_as = Address.parse(self.order.addresses[0])
        transport.serve(self.listen, self._admit, _Answers(), lambda _: None, known_as=known_as)
        self._stopped.wait(LINK_TEST)

    def _admit(self, hello: Hello) -> Hello | HelloRefused:
        if (hello.plan, hello.node) != (self.order.id, self.order.peer):
            return HelloRefused("this node takes part in another link test")
        return self._hello()

    def _measure(self, transport: Transport) -> LinkTestResult:
        first, *others = map(Address.parse, self.order.addresses)
        arrivals = _Arrivals()
        link = transport.dial(
            first,
            self._hello(),
            arrivals,
            deadline=LINK_TEST_DIAL,
            expect=self.order.peer,
            others=others,
        )
        trip = _round_trip(link)
        to_listener = measured_rate(lambda size: _sent(link, size), trip)
        to_dialer = measured_rate(lambda size: _received(link, arrivals, size), trip)
        route = link.route
        link.send(Message(Goodbye(self.order.node)))
        link.close()
        return LinkTestResult(to_listener=to_listener, to_dialer=to_dialer, round_trip=trip, route=route)


def measured_rate(transfer: Callable[[int], float | None], round_trip: float) -> float:
    """Return the Mbit/s of a link.

    ``transfer`` moves some bytes and returns the seconds it took; None if ``LINK_TEST_RATE`` seconds
    were not enough. ``TransportError`` if they were not enough for the first transfer.
    """
    long_enough = max(LONG_ENOUGH, ROUND_TRIPS * round_trip)
    size, left, rate = FIRST_BYTES, LINK_TEST_RATE, 0.0
    while True:
        taken = transfer(size)
        if taken is None:
            if not rate:
                raise TransportError(f"{size} bytes were not delivered within {LINK_TEST_RATE:g} s")
            return min(rate, 8e-6 * size / LINK_TEST_RATE)
        left -= taken
        seconds = max(taken - round_trip, 1e-6)
        rate = 8e-6 * size / seconds
        growth = min(GROWTH, max(1.2 * long_enough / seconds, 2.0))
        following = min(int(size * growth), MOST_BYTES)
        in_time = round_trip + seconds * following / size <= left
        if seconds >= long_enough or following <= size or not in_time:
            return rate
        size = following


def _round_trip(link: Link) -> float:
    """Return the seconds of the shortest of some round trips."""
    trips = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        link.send(Message(RateProbe()))
        if not link.flush(LINK_TEST_RATE):
            raise TransportError(f"it did not answer within {LINK_TEST_RATE:g} s")
        trips.append(time.perf_counter() - begin)
    probed = link.delay().round_trip
    return min([*trips, probed] if probed > 0 else trips)


def _sent(link: Link, size: int) -> float | None:
    """Send some bytes; return the seconds until the peer has acknowledged them."""
    begin = time.perf_counter()
    _send_load(link, size)
    return time.perf_counter() - begin if link.flush(LINK_TEST_RATE) else None


def _received(link: Link, arrivals: _Arrivals, size: int) -> float | None:
    """Ask for some bytes; return the seconds until all are here."""
    begin = time.perf_counter()
    arrivals.expect()
    link.send(Message(RateProbe(wanted=size)))
    arrived = arrivals.wait(LINK_TEST_RATE)
    return None if arrived is None else arrived - begin


def _send_load(link: Link, size: int) -> None:
    """Queue some bytes; messages share one tensor, since only their number matters."""
    message = min(size, MESSAGE_BYTES)
    load = torch.frombuffer(bytearray(os.urandom(message)), dtype=torch.uint8)
    for start in range(0, size, message):
        part = load[: min(message, size - start)]
        link.send(Message(RateProbe(is_last=start + message >= size), {"load": part}))


class _Answers:
    """Handler of the provider that listens: sends as many bytes as it is asked for."""

    def on_message(self, link: Link, message: Message) -> None:
        if isinstance(message.head, RateProbe) and 0 < message.head.wanted <= MOST_BYTES:
            _send_load(link, message.head.wanted)

    def on_lost(self, link: Link, reason: str) -> None:
        """Ignore the end of a link: the provider that dialled reports it."""


class _Arrivals:
    """Handler of the provider that dials: notes when the last message of a transfer arrives."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: float | None = None
        self._lost = ""

    def expect(self) -> None:
        """Forget the last transfer."""
        with self._changed:
            self._arrived = None

    def wait(self, seconds: float) -> float | None:
        """Return the time of arrival; None after a timeout. ``TransportError`` if the link is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived is not None or self._lost, seconds)
            if self._lost:
                raise TransportError(self._lost)
            return self._arrived

    def on_message(self, link: Link, message: Message) -> None:  # noqa: ARG002 - of LinkHandler
        now = time.perf_counter()
        if isinstance(message.head, RateProbe) and message.head.is_last:
            with self._changed:
                self._arrived = now
                self._changed.notify_all()

    def on_lost(self, link: Link, reason: str) -> None:  # noqa: ARG002 - of LinkHandler
        with self._changed:
            self._lost = reason
            self._changed.notify_all()
