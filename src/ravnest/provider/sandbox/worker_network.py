"""Network of a sandboxed worker: the addresses of its peers, of its relays and of its own listener."""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from ravnest.errors import RavnestError
from ravnest.provider.sandbox.network_policy import NetworkPolicy, SocketPlace, canonical
from ravnest.provider.sandbox.socket_broker import SocketBroker
from ravnest.relay.sockets import resolve
from ravnest.store.node_spec import NeighbourSpec, NodeSpec, RelaySpec
from ravnest.types import Address

logger = logging.getLogger(__name__)

_LOOK_UP_SECONDS = 5.0
_PAUSE_SECONDS = 2.0
"""Shortest time between two questions for the peers' addresses."""
_MOST_ADDRESSES = 16
"""Most addresses of one peer or relay."""
_LOOPBACK = ("127.0.0.1", "::1")

FindPeers = Callable[[], Iterable[str]]
"""Returns the addresses of the peers now, as the server knows them."""


def peer_addresses(spec: NodeSpec) -> Iterator[str]:
    """Yield the addresses of all nodes and relays that a node may dial."""
    members = (member for ring in spec.rings for member in ring.members)
    for neighbour in (spec.previous, spec.next, *spec.roots, *members):
        if neighbour is not None:
            yield from (neighbour.address, *neighbour.others)
    if spec.relay is not None:
        for relay in spec.relay.relays:
            yield from relay


def network_policy(spec: NodeSpec, listen: str | None) -> NetworkPolicy:
    """Return the network of a node: its peers and relays, and its own listener, to which relays lead."""
    own = Address.parse(listen or spec.address)
    places = [*map(Address.parse, (*peer_addresses(spec), spec.address, *spec.others)), own]
    places += [Address(host, own.port) for host in _LOOPBACK]
    return NetworkPolicy(port=own.port).joined_by(places)


def with_ip_addresses(spec: NodeSpec) -> NodeSpec:
    """Return a node whose peers and relays have IP addresses: a sandboxed worker asks no name server.

    Names that are not found stay, and are not reached.
    """

    def found(neighbour: NeighbourSpec) -> NeighbourSpec:
        first, *others = _looked_up((neighbour.address, *neighbour.others))
        return NeighbourSpec(neighbour.node, first, tuple(others[: _MOST_ADDRESSES - 1]))

    if all(map(_is_ip, peer_addresses(spec))):
        return spec
    relay = spec.relay
    return replace(
        spec,
        previous=None if spec.previous is None else found(spec.previous),
        next=None if spec.next is None else found(spec.next),
        roots=tuple(map(found, spec.roots)),
        rings=tuple(replace(ring, members=tuple(map(found, ring.members))) for ring in spec.rings),
        relay=relay
        and RelaySpec(
            relay.job,
            relay.ticket,
            tuple(tuple(_looked_up(each)[:_MOST_ADDRESSES]) for each in relay.relays),
        ),
    )


def _looked_up(addresses: Iterable[str]) -> list[str]:
    """Return addresses with each name replaced by its IP addresses."""
    result: list[str] = []
    for text in addresses:
        if _is_ip(text):
            result.append(text)
            continue
        address = Address.parse(text)
        hosts = (str(where[0]) for _, where in resolve([address], _LOOK_UP_SECONDS))
        result += [str(replace(address, host=canonical(host))) for host in hosts] or [text]
    return list(dict.fromkeys(result))


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(Address.parse(text).host)
    except ValueError:
        return False
    return True


@dataclass
class PeerUpdates:
    """Keeps the policy of a broker up to date: another machine can take a peer's place at any time.

    A worker learns the new address from its peers, which are not believed here: when it dials an address
    that is not known, the server is asked, and a later attempt succeeds.
    """

    broker: SocketBroker
    find_peers: FindPeers
    _asked_at: float = float("-inf")
    _asking: threading.Lock = field(default_factory=threading.Lock)

    def on_refusal(self, place: SocketPlace | None) -> None:
        """Ask the server for the peers' addresses, in a thread, unless that happened just now."""
        now = time.monotonic()
        if place is None or now - self._asked_at < _PAUSE_SECONDS or self._asking.locked():
            return
        self._asked_at = now
        logger.info("the worker may not connect to %s: it is not known as a peer", place.address)
        threading.Thread(target=self._update, name="peers of a worker", daemon=True).start()

    def _update(self) -> None:
        with self._asking:
            try:
                found = [Address.parse(each) for each in _looked_up(self.find_peers())]
            except (RavnestError, OSError, ValueError) as error:
                logger.info("the addresses of the worker's peers are not known: %s", error)
                return
            self.broker.policy = self.broker.policy.joined_by(found)
