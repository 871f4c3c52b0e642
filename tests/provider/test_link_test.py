"""Two providers measure the link between them with the transport of nodes."""

from __future__ import annotations

import datetime
import socket
import threading
import time
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from workloads import free_ports

from ravnest.deadlines import LINK_TEST_RATE
from ravnest.errors import ServerError, TransportError, UnreachableError
from ravnest.provider import link_test
from ravnest.provider.link_test import FIRST_BYTES, MOST_BYTES, LinkTest, measured_rate
from ravnest.relay.access import RelayAccess
from ravnest.relay.limits import RelayLimits
from ravnest.relay.service import Relay
from ravnest.relay.tickets import RelayTicket, sign_ticket
from ravnest.schemas.link_tests import LinkTestOrder, LinkTestResult
from ravnest.store.node_spec import RelaySpec
from ravnest.transport.base import Transport
from ravnest.transport.certificates import Authority
from ravnest.transport.socket_transport import SocketTransport
from ravnest.transport.tls import Credentials
from ravnest.types import Address

KEY = Ed25519PrivateKey.generate()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def order(address: str, *, listens: bool, tls: bool = False, test: str = "link-1") -> LinkTestOrder:
    nodes = (3, 2) if listens else (2, 3)
    return LinkTestOrder(
        id=test,
        listens=listens,
        node=nodes[0],
        peer=nodes[1],
        peer_name="peer",
        addresses=(address,),
        tls=tls,
    )


def never(name: str) -> Credentials:
    raise AssertionError(f"{name} needs no certificate on loopback")


def both(address: str, other: str = "link-1") -> tuple[LinkTest, LinkTest]:
    at = Address.parse(address)
    return (
        LinkTest(order(address, listens=True), at, never),
        LinkTest(order(address, listens=False, test=other), at, never),
    )


def run_both(listener: LinkTest, dialer: LinkTest) -> tuple[list[object], LinkTestResult | None]:
    """Return what both sides report."""
    reported: list[object] = []
    thread = threading.Thread(target=lambda: reported.append(listener.run()))
    thread.start()
    result = dialer.run()
    listener.stop()
    thread.join()
    return reported, result


def test_two_providers_measure_their_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_test, "LONG_ENOUGH", 0.01)
    reported, result = run_both(*both(free_address()))
    assert reported == [None]  # only the one that dials reports
    assert result is not None
    assert result.failure == ""
    assert result.to_listener is not None
    assert result.to_dialer is not None
    assert result.to_listener > 1
    assert result.to_dialer > 1
    assert 0 < result.round_trip < 5
    assert result.route == "direct"


def test_the_port_is_free_after_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_test, "LONG_ENOUGH", 0.01)
    address = free_address()
    run_both(*both(address))
    with socket.create_server(("127.0.0.1", Address.parse(address).port)):
        pass


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_test, "LINK_TEST_DIAL", 0.2)
    _, dialer = both(free_address())
    result = dialer.run()
    assert result is not None
    assert "no answer from 127.0.0.1" in result.failure


def test_a_taken_port_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listener, _ = both(f"127.0.0.1:{taken.getsockname()[1]}")
        result = listener.run()
    assert result is not None
    assert result.failure


def test_another_test_is_refused() -> None:
    _, result = run_both(*both(free_address(), other="link-2"))
    assert result is not None
    assert "another link test" in result.failure


def test_a_stopped_test_reports_nothing() -> None:
    """The dialler waits for a listener that never comes."""
    _, dialer = both(free_address())
    timer = threading.Timer(0.05, dialer.stop)
    timer.start()
    assert dialer.run() is None
    timer.join()


def test_a_test_that_was_stopped_before_it_begins() -> None:
    listener, dialer = both(free_address())
    for test in (listener, dialer):
        test.stop()
        assert test.run() is None


def test_a_server_that_signs_no_certificate_is_the_reason() -> None:
    def refused(name: str) -> Credentials:
        raise ServerError(f"{name}: the test is over")

    at = Address.parse("127.0.0.1:9")
    result = LinkTest(order("10.0.0.1:9", listens=False, tls=True), at, refused).run()
    assert result == LinkTestResult(failure="node_2: the test is over")


def test_certificates_and_relays_reach_the_transport() -> None:
    seen: list[tuple[Credentials | None, RelayAccess | None, str]] = []
    authority = Authority("test", datetime.datetime.now(datetime.UTC))

    def certify(name: str) -> Credentials:
        identity = authority.issue(name, [])
        return Credentials(authority.certificate, identity.certificate, identity.key)

    def opened(credentials: Credentials | None, relay: RelayAccess | None, secret: str) -> Transport:
        seen.append((credentials, relay, secret))
        raise UnreachableError("enough")

    wanted = order("10.0.0.1:9", listens=False, tls=True)
    wanted = wanted.model_copy(
        update={"relay": RelaySpec("job-1", "t", (("10.0.0.7:5",),)), "secret": "s"}
    )
    result = LinkTest(wanted, Address.parse("127.0.0.1:9"), certify, opened).run()
    assert result == LinkTestResult(failure="enough")
    credentials, relay, secret = seen[0]
    assert secret == "s"
    assert credentials is not None
    assert relay is not None
    assert str(relay.endpoint) == "node-2.job-1"
    assert relay.relays == ((Address("10.0.0.7", 5),),)


# TLS and relays: 0.0.0.0 counts as an address that others reach, and this machine dials it by loopback


def secure(
    port: int, relay: Relay | None = None, dialled: int | None = None
) -> tuple[LinkTest, LinkTest]:
    """Return both sides of a test with TLS; ``dialled`` is another port than that of the listener."""
    authority = Authority("test", datetime.datetime.now(datetime.UTC))

    def certify(name: str) -> Credentials:
        identity = authority.issue(name, [])
        return Credentials(authority.certificate, identity.certificate, identity.key)

    def side(*, listens: bool) -> LinkTest:
        made = order(f"0.0.0.0:{dialled or port}", listens=listens, tls=True)
        if relay is not None:
            ticket = sign_ticket(RelayTicket("job-1", made.node, (made.peer,), time.time() + 60), KEY)
            spec = RelaySpec("job-1", ticket, ((str(relay.address),),))
            made = made.model_copy(update={"relay": spec})
        return LinkTest(made, Address("0.0.0.0", port), certify)

    return side(listens=True), side(listens=False)


def test_a_link_with_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_test, "LONG_ENOUGH", 0.01)
    _, result = run_both(*secure(*free_ports(1)))
    assert result is not None
    assert (result.failure, result.route) == ("", "direct")


def test_a_relayed_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_test, "LONG_ENOUGH", 0.01)
    port, nothing = free_ports(2)
    relay = Relay(Address("127.0.0.1", 0), KEY.public_key(), RelayLimits())
    relay.start()
    try:
        _, result = run_both(*secure(port, relay, nothing))
    finally:
        relay.close()
    assert result is not None
    assert (result.failure, result.route) == ("", "relayed")
    assert result.to_dialer is not None
    assert result.to_dialer > 1


# The rate


def link_at(mbit: float, round_trip: float, sizes: list[int]) -> Callable[[int], float]:
    def transfer(size: int) -> float:
        sizes.append(size)
        return round_trip + 8e-6 * size / mbit

    return transfer


@pytest.mark.parametrize("mbit", [0.1, 1, 10, 100, 1000, 10_000])
@pytest.mark.parametrize("trip", [0.0001, 0.02, 0.3])
def test_the_rate_of_a_link(mbit: float, trip: float) -> None:
    sizes: list[int] = []
    transfer = link_at(mbit, trip, sizes)
    assert measured_rate(transfer, trip) == pytest.approx(mbit)
    assert sizes[0] == FIRST_BYTES
    assert max(sizes) <= MOST_BYTES
    assert sum(transfer(size) for size in list(sizes)) <= LINK_TEST_RATE


def test_a_link_that_becomes_slow_counts_with_less() -> None:
    times = iter((0.1, None))
    bound = 8e-6 * 8 * FIRST_BYTES / LINK_TEST_RATE
    assert measured_rate(lambda _: next(times), 0.01) == pytest.approx(bound)


def test_a_link_that_delivers_nothing_fails() -> None:
    with pytest.raises(TransportError, match="16384 bytes were not delivered within 5 s"):
        measured_rate(lambda _: None, 0.01)


def test_a_slow_link_is_measured_with_few_bytes() -> None:
    sizes: list[int] = []
    measured_rate(link_at(1.0, 0.02, sizes), 0.02)
    assert sum(sizes) <= 300_000


def test_a_long_way_needs_longer_transfers() -> None:
    near: list[int] = []
    far: list[int] = []
    measured_rate(link_at(100, 0.001, near), 0.001)
    measured_rate(link_at(100, 0.3, far), 0.3)
    assert max(far) > max(near)


def test_the_default_transport_is_that_of_nodes() -> None:
    transport = LinkTest(order("127.0.0.1:9", listens=True), Address("127.0.0.1", 9), never)
    opened = transport.open_transport(None, None, "")
    assert isinstance(opened, SocketTransport)
    opened.close()
