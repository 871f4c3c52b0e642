"""Routes to a peer: its own addresses, and the relays at which it is registered."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal

from ravnest.deadlines import LINK_DIRECT_FIRST, LINK_NEAREST_FIRST
from ravnest.relay.access import RelayAccess
from ravnest.relay.sockets import resolve
from ravnest.relay.tickets import Endpoint
from ravnest.transport.tls import dial_address, is_loopback
from ravnest.types import Address

RouteKind = Literal["direct", "relayed"]


@dataclass(frozen=True)
class Unanswered:
    """Failed attempt to connect."""

    reason: str
    nothing_listens: bool = False
    """The machine answered that nothing listens at the address: the peer's process is not there."""


Reach = Callable[[Address, float], Unanswered | None]
"""Function that opens and closes a TCP connection within a number of seconds; returns None after a
success."""


@dataclass(frozen=True)
class Route:
    """One way to a peer."""

    address: Address
    """Address of the peer, or of a relay."""
    endpoint: Endpoint | None = None
    """Name of the peer at the relay; None: a direct route."""
    ticket: str = ""
    """This node's permission to use the relay."""

    @property
    def kind(self) -> RouteKind:
        """Kind of the route."""
        return "direct" if self.endpoint is None else "relayed"

    def __str__(self) -> str:
        return str(self.address) if self.endpoint is None else f"relay {self.address}"


def routes_to(addresses: Sequence[Address], relay: RelayAccess | None, peer: int | None) -> list[Route]:
    """Return the routes to a peer, direct ones first, each group in order of preference.

    Addresses of loopback are used without TLS, so that no relay may carry what is sent there.
    """
    direct = [Route(address) for address in dict.fromkeys(addresses)]
    if relay is None or peer is None or is_loopback(addresses[0]):
        return direct
    endpoint = Endpoint(relay.endpoint.job, peer)
    return direct + [Route(each, endpoint, relay.ticket) for known in relay.relays for each in known]


def reach(address: Address, seconds: float) -> Unanswered | None:
    """Open and close a TCP connection; return the failure, or None."""
    try:
        connect(address, seconds).close()
    except OSError as error:
        return failed_connection(error, seconds)
    return None


def connect(address: Address, seconds: float) -> socket.socket:
    """Return a TCP connection to an address; ``OSError`` if there is none within this time."""
    end = time.monotonic() + seconds
    failure: OSError = OSError(f"the name {address.host} is not known")
    for family, where in resolve([dial_address(address)], seconds):
        connecting = socket.socket(family, socket.SOCK_STREAM)
        try:
            connecting.settimeout(max(end - time.monotonic(), 0.001))
            connecting.connect(where)
            connecting.settimeout(None)
        except OSError as error:
            connecting.close()
            failure = error
        else:
            return connecting
    raise failure


def failed_connection(error: OSError, seconds: float) -> Unanswered:
    """Return the failure of a TCP connection that had to be made within a number of seconds."""
    if isinstance(error, TimeoutError):
        return Unanswered(f"no answer within {seconds:.3g} s")
    if isinstance(error, ConnectionRefusedError):
        return Unanswered("nothing listens there (connection refused)", nothing_listens=True)
    return Unanswered(error.strerror or str(error))


class RouteSearch:
    """Search for routes that answer, all of them at once.

    A direct route is used as soon as it answers. Relays wait for ``LINK_DIRECT_FIRST`` seconds, or until
    all direct routes have failed, and for ``LINK_NEAREST_FIRST`` seconds for relays to be preferred.
    """

    def __init__(self, routes: Sequence[Route], seconds: float, reach: Reach = reach) -> None:
        self.failures: dict[Route, Unanswered] = {}
        """Routes that did not answer, so far."""
        self._routes = routes
        self._seconds = seconds
        self._reach = reach
        self._answers: SimpleQueue[tuple[Route, Unanswered | None]] = SimpleQueue()

    def __iter__(self) -> Iterator[Route]:
        """Yield the routes that answer, those to try first first."""
        if len(self._routes) == 1:  # nothing to choose from
            yield self._routes[0]
            return
        begin = time.monotonic()
        end = begin + self._seconds
        for route in self._routes:
            threading.Thread(
                target=self._ask, args=(route,), name=f"ravnest route {route}", daemon=True
            ).start()
        pending = list(self._routes)
        relays: list[Route] = []
        relay_since = begin
        while pending or relays:
            until = min(end, self._wait_for_better(pending, relays, begin, relay_since))
            if relays and time.monotonic() >= until:
                yield relays.pop(0)
                continue
            try:
                route, failure = self._answers.get(timeout=max(until - time.monotonic(), 0))
            except Empty:
                if relays:
                    continue
                break
            pending.remove(route)
            if failure is not None:
                self.failures[route] = failure
            elif route.kind == "direct":
                yield route
            else:
                relay_since = relay_since if relays else time.monotonic()
                relays = sorted([*relays, route], key=self._routes.index)
        self.failures |= dict.fromkeys(pending, Unanswered(f"no answer within {self._seconds:.3g} s"))

    def _wait_for_better(
        self, pending: Sequence[Route], relays: Sequence[Route], begin: float, relay_since: float
    ) -> float:
        """Return the time until which the best relay waits for routes that are to be preferred to it."""
        if not relays:
            return math.inf
        better = self._routes[: self._routes.index(relays[0])]
        waits = [relay_since]
        if any(route in pending for route in better if route.kind == "direct"):
            waits.append(begin + LINK_DIRECT_FIRST)
        if any(route in pending for route in better if route.kind == "relayed"):
            waits.append(relay_since + LINK_NEAREST_FIRST)
        return max(waits)

    def _ask(self, route: Route) -> None:
        self._answers.put((route, self._reach(route.address, self._seconds)))


def combined(failures: Mapping[Route, Unanswered]) -> Unanswered:
    """Return the failure of all routes; with several, the reason names each.

    A peer that a relay does not know may be about to register there again, so that nothing is said
    about its process.
    """
    if len(failures) == 1:
        return next(iter(failures.values()))
    gone = all(failure.nothing_listens and route.kind == "direct" for route, failure in failures.items())
    words = "; ".join(f"{route}: {failure.reason}" for route, failure in failures.items())
    return Unanswered(words or "no route to the peer", nothing_listens=gone and bool(failures))
