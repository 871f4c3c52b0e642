"""Links through a relay: encrypted end to end, moved to a direct route or another relay if possible."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from resetting_proxy import resetting
from test_transport_contract import index_of, numbered
from transport_nodes import EVERYWHERE, LOOPBACK, SECONDS, Inbox, credentials, hello
from workloads import free_ports

from ravnest.errors import UnreachableError
from ravnest.relay.access import RelayAccess
from ravnest.relay.limits import RelayLimits
from ravnest.relay.service import Relay
from ravnest.relay.tickets import RelayTicket, sign_ticket
from ravnest.transport import link_keeper
from ravnest.transport.base import Link
from ravnest.transport.certificates import Authority
from ravnest.transport.socket_transport import SocketTransport
from ravnest.types import Address

JOB = "job-1"
KEY = Ed25519PrivateKey.generate()


def nowhere() -> Address:
    """Address that needs TLS and at which nothing listens."""
    (port,) = free_ports(1)
    return Address("0.0.0.0", port)


def access(relays: list[Relay], node: int) -> RelayAccess:
    made = RelayTicket(JOB, node, (1 - node,), time.time() + 3600)
    return RelayAccess(
        tuple((relay.address,) for relay in relays), made.endpoint, sign_ticket(made, KEY)
    )


@contextlib.contextmanager
def relay(address: Address = LOOPBACK) -> Iterator[Relay]:
    made = Relay(address, KEY.public_key(), RelayLimits())
    made.start()
    try:
        yield made
    finally:
        made.close()


class Nodes:
    """Two nodes; node_1 listens."""

    def __init__(self, authority: Authority, relays: list[Relay]) -> None:
        self.inboxes = [Inbox(), Inbox()]
        self.transports = [
            SocketTransport(credentials(authority, node), relay=access(relays, node)) for node in (0, 1)
        ]
        self.accepted: SimpleQueue[Link] = SimpleQueue()
        self.bound = self.transports[1].serve(
            EVERYWHERE, lambda _: hello(1), self.inboxes[1], self.accepted.put
        )

    def dial(self, address: Address) -> Link:
        return self.transports[0].dial(address, hello(0), self.inboxes[0], deadline=SECONDS, expect=1)

    def exchange(self, near: Link, far: Link, number: int) -> None:
        near.send(numbered(number))
        far.send(numbered(number))
        assert [index_of(inbox.next()) for inbox in self.inboxes] == [number, number]

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


OpenNodes = Callable[[list[Relay]], Nodes]


@pytest.fixture
def open_nodes(authority: Authority) -> Iterator[OpenNodes]:
    made: list[Nodes] = []

    def make(relays: list[Relay]) -> Nodes:
        made.append(Nodes(authority, relays))
        return made[-1]

    yield make
    for each in made:
        each.close()


def open_pair(nodes: Nodes, *, direct: Address | None = None) -> tuple[Link, Link]:
    near = nodes.dial(nowhere() if direct is None else direct)
    return near, nodes.accepted.get(timeout=SECONDS)


def test_a_peer_that_cannot_be_dialled_is_reached_through_a_relay(open_nodes: OpenNodes) -> None:
    with relay() as service:
        nodes = open_nodes([service])
        near, far = open_pair(nodes)
        for number in range(3):
            nodes.exchange(near, far, number)
        assert (near.route, far.route) == ("relayed", "relayed")
        near.send(numbered(9, x=torch.randn(3_000_000)))
        assert index_of(nodes.inboxes[1].next()) == 9
        assert service.counters().bytes > 12_000_000


def test_a_direct_route_is_preferred(open_nodes: OpenNodes) -> None:
    with relay() as service:
        nodes = open_nodes([service])
        near, far = open_pair(nodes, direct=nodes.bound)
        nodes.exchange(near, far, 0)
        assert (near.route, far.route) == ("direct", "direct")


def test_another_machine_at_an_address_of_the_peer_is_passed_over(
    open_nodes: OpenNodes, authority: Authority
) -> None:
    """Private addresses are used in many networks: another node may have the same one."""
    with relay() as service:
        nodes = open_nodes([service])
        other = SocketTransport(credentials(authority, 5))
        try:
            there = other.serve(EVERYWHERE, lambda _: hello(5), Inbox(), lambda _: None)
            near, far = open_pair(nodes, direct=there)
            nodes.exchange(near, far, 0)
            assert near.route == "relayed"
        finally:
            other.close()


def test_a_link_leaves_the_relay_when_a_direct_route_opens(
    open_nodes: OpenNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_keeper, "LINK_DIRECT_RETRY", 0.2)
    with relay() as service:
        nodes, later = open_nodes([service]), nowhere()
        near, far = open_pair(nodes, direct=later)
        nodes.exchange(near, far, 0)
        assert near.route == "relayed"
        with resetting([(later.port, nodes.bound.port)], []):
            number = 1
            while "relayed" in (near.route, far.route):  # messages go on meanwhile
                nodes.exchange(near, far, number)
                number += 1
            nodes.exchange(near, far, number)
            assert nodes.inboxes[0].lost.empty()


def test_links_move_to_another_relay_and_back_to_a_restarted_one(open_nodes: OpenNodes) -> None:
    with relay() as kept:
        with relay() as dying:
            address = dying.address
            nodes = open_nodes([dying, kept])
            near, far = open_pair(nodes)
            nodes.exchange(near, far, 0)
            assert dying.counters().bytes > 0
        nodes.exchange(near, far, 1)
        assert kept.counters().bytes > 0
    with relay(address):  # the only one now, at the old address of the first
        nodes.exchange(near, far, 2)
        assert nodes.inboxes[0].lost.empty()


def test_the_reason_says_that_the_peer_is_not_at_the_relay(
    open_nodes: OpenNodes, authority: Authority
) -> None:
    with relay() as service:
        alone = SocketTransport(credentials(authority, 0), relay=access([service], 0))
        try:
            with pytest.raises(UnreachableError, match="it is not registered at the relay"):
                alone.dial(nowhere(), hello(0), Inbox(), deadline=2, expect=1)
        finally:
            alone.close()
