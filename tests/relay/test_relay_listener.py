"""Relay and listener together, over real sockets."""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from relay_keys import LOOPBACK, PUBLIC, access, ticket
from test_relay_splicing import KINDS, receive

from ravnest.relay.heads import RelayMethod, request
from ravnest.relay.limits import RelayLimits
from ravnest.relay.listener import RelayListener
from ravnest.relay.pipes import MakePipe, PipePool
from ravnest.relay.round_trip import relay_round_trip
from ravnest.relay.service import Relay
from ravnest.relay.sockets import dial_first
from ravnest.types import Address

SECONDS = 30.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for something that no event announces."""
    deadline = time.monotonic() + SECONDS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.01)


@contextlib.contextmanager
def running(relay: Relay) -> Iterator[Relay]:
    relay.start()
    try:
        yield relay
    finally:
        relay.close()


@contextlib.contextmanager
def listening(listener: RelayListener) -> Iterator[RelayListener]:
    listener.start()
    try:
        yield listener
    finally:
        listener.close()


@pytest.fixture
def relay() -> Iterator[Relay]:
    with running(Relay(LOOPBACK, PUBLIC, RelayLimits())) as started:
        yield started


@pytest.fixture
def echo() -> Iterator[Address]:
    """A listener that answers each connection with what it sends, until it ends."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield Address("127.0.0.1", server.getsockname()[1])
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def ask(relay: Address, head: bytes) -> socket.socket:
    connection = socket.create_connection((relay.host, relay.port), SECONDS)
    connection.sendall(head)
    return connection


def status(connection: socket.socket) -> int:
    line = b""
    while not line.endswith(b"\r\n\r\n"):
        piece = connection.recv(1)
        assert piece, line
        line += piece
    return int(line.split()[1])


def call(relay: Address, node: int = 1, caller: int = 0, job: str = "job-a") -> socket.socket:
    permit = ticket(caller, node, job=job)
    return ask(relay, request(RelayMethod.CONNECT, f"node-{node}.{job}:1", permit))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::", "0.0.0.0"])
def test_bytes_reach_a_node_through_a_relay(kind: MakePipe, host: str, echo: Address) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6")
    made = Relay(Address(host, 0), PUBLIC, RelayLimits(), pipes=PipePool(kind))
    with running(made) as relay:
        places = [Address(one, relay.address.port) for one in ("127.0.0.1", "::1")]
        wildcard = host in ("::", "0.0.0.0")
        for place in places if wildcard else [relay.address]:
            node = RelayListener(access(1, (0,), place), echo, pipes=PipePool(kind))
            with listening(node):
                assert node.wait_registered(SECONDS)
                with call(place) as connection:
                    assert status(connection) == 200
                    for size in (1, 100_000, 1_500_000):
                        sender = threading.Thread(target=connection.sendall, args=(b"ab" * size,))
                        sender.start()
                        assert receive(connection, 2 * size) == b"ab" * size
                        sender.join(SECONDS)
        assert relay.counters().bytes_by_job["job-a"] > 6_000_000
        assert relay.counters().refusals == {}


def test_circuits_are_counted_and_end_with_either_side(relay: Relay, echo: Address) -> None:
    with listening(RelayListener(access(1, (0,), relay.address), echo)) as node:
        assert node.wait_registered(SECONDS)
        assert node.registered == ((relay.address,),)
        calls = [call(relay.address) for _ in range(5)]
        for connection in calls:
            assert status(connection) == 200
            connection.sendall(b"hello")
            assert receive(connection, 5) == b"hello"
        counters = relay.counters()
        assert (counters.endpoints, counters.circuits, counters.circuits_opened) == (1, 5, 5)
        assert counters.connections == 11
        wait_until(lambda: relay.counters().bytes == 50)
        for connection in calls:
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
            connection.close()
        wait_until(lambda: relay.counters().circuits == 0)
    wait_until(lambda: relay.counters().connections == 0)


def test_bytes_sent_before_the_answer_are_not_lost(relay: Relay, echo: Address) -> None:
    with listening(RelayListener(access(1, (0,), relay.address), echo)) as node:
        assert node.wait_registered(SECONDS)
        head = request(RelayMethod.CONNECT, "node-1.job-a:1", ticket(0, 1))
        with ask(relay.address, head + b"early") as connection:
            assert status(connection) == 200
            assert receive(connection, 5) == b"early"


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (request(RelayMethod.CONNECT, "node-1.job-a:1", "forged"), 403),
        (request(RelayMethod.CONNECT, "node-1.job-a:1", ticket(0, 1, expires=1.0)), 403),
        (request(RelayMethod.CONNECT, "node-2.job-a:1", ticket(0, 2)), 404),
        (request(RelayMethod.REGISTER, "node-2.job-a", ticket(1, 0)), 403),
        (request(RelayMethod.ACCEPT, "abc", ticket(1, 0)), 404),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"HELO relay\r\n\r\n", 400),
        (b"\x16\x03\x01" + b"\0" * 100 + b"\r\n\r\n", 400),
        (b"GET /ping HTTP/1.1\r\nX: " + b"x" * (24 * 1024 - 23), 400),
    ],
)
def test_others_are_refused_with_a_reason(relay: Relay, head: bytes, expected: int) -> None:
    with ask(relay.address, head) as connection:
        assert status(connection) == expected
        assert connection.recv(1) == b""
    assert relay.counters().refusals == {expected: 1}


def test_connections_of_one_address_are_limited() -> None:
    with running(Relay(LOOPBACK, PUBLIC, RelayLimits(connections_per_address=3))) as relay:
        held = [socket.create_connection((relay.address.host, relay.address.port)) for _ in range(3)]
        with ask(relay.address, b"") as connection:
            assert status(connection) == 429
        for connection in held:
            connection.close()
        wait_until(lambda: relay.counters().connections == 0)
        assert relay_round_trip([relay.address], SECONDS) is not None


def test_jobs_that_end_are_cut_and_may_return(relay: Relay, echo: Address) -> None:
    with listening(RelayListener(access(1, (0,), relay.address), echo)) as node:
        assert node.wait_registered(SECONDS)
        connection = call(relay.address)
        assert status(connection) == 200
        relay.set_running_jobs(frozenset({"job-b"}))
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""
        wait_until(lambda: not node.registered)
        with call(relay.address) as refused:
            assert status(refused) == 403
        relay.set_running_jobs(None)
        assert node.wait_registered(SECONDS)


def test_a_node_registers_again_when_its_relay_returns(echo: Address) -> None:
    told: list[str] = []
    with running(Relay(LOOPBACK, PUBLIC, RelayLimits())) as first:
        place = first.address
        node = RelayListener(access(1, (0,), place), echo, told.append)
        node.start()
        assert node.wait_registered(SECONDS)
    try:
        wait_until(lambda: not node.registered)
        with running(Relay(place, PUBLIC, RelayLimits())):
            assert node.wait_registered(SECONDS)
            with call(place) as connection:
                assert status(connection) == 200
        assert "not registered at the relay" in told[0]
    finally:
        node.close()


def test_a_node_is_reached_through_each_of_its_relays(relay: Relay, echo: Address) -> None:
    with (
        running(Relay(LOOPBACK, PUBLIC, RelayLimits())) as other,
        listening(RelayListener(access(1, (0,), relay.address, other.address), echo)) as node,
    ):
        wait_until(lambda: len(node.registered) == 2)
        for place in node.registered:
            with call(place[0]) as connection:
                assert status(connection) == 200


def test_a_refused_node_is_told_why(relay: Relay, echo: Address) -> None:
    told: list[str] = []
    relay.set_running_jobs(frozenset())
    with listening(RelayListener(access(1, (0,), relay.address), echo, told.append)) as node:
        wait_until(lambda: bool(told))
        assert not node.wait_registered(0.0)
    assert "403 the job of the ticket does not run" in told[0]


def test_a_listener_that_is_gone_ends_the_circuit(relay: Relay) -> None:
    with listening(RelayListener(access(1, (0,), relay.address), Address("127.0.0.1", 1))) as node:
        assert node.wait_registered(SECONDS)
        with call(relay.address) as connection, contextlib.suppress(ConnectionError):
            while connection.recv(100):
                pass
        wait_until(lambda: relay.counters().circuits == 0 or relay.counters().refusals != {})


def test_a_second_registration_replaces_the_first(relay: Relay, echo: Address) -> None:
    head = request(RelayMethod.REGISTER, "node-1.job-a", ticket(1, 0))
    with ask(relay.address, head) as first, ask(relay.address, head) as second:
        assert status(first) == 200
        assert first.recv(1) == b""
        assert status(second) == 200
        assert relay.counters().endpoints == 1


def test_the_first_address_that_answers_is_used(relay: Relay) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening
        dead = Address("127.0.0.1", closed.getsockname()[1])
        unknown = Address("unknown.invalid", 1)
        connection = dial_first([dead, relay.address], SECONDS)
        assert connection is not None
        assert connection.getpeername()[1] == relay.address.port
        connection.close()
        assert dial_first([dead], SECONDS) is None
        assert dial_first([], SECONDS) is None
        assert relay_round_trip([dead], SECONDS) is None
        taken = relay_round_trip([unknown, dead, Address("localhost", relay.address.port)], SECONDS)
    assert taken is not None
    assert 0 < taken < SECONDS


def test_a_silent_relay_does_not_answer_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert relay_round_trip([Address("127.0.0.1", silent.getsockname()[1])], 0.1) is None


def test_closing_ends_a_listener_that_is_not_registered() -> None:
    with listening(RelayListener(access(1, (0,), Address("127.0.0.1", 1)), LOOPBACK)) as node:
        assert not node.wait_registered(0.0)
    assert not node.wait_registered(SECONDS)


def test_an_address_without_a_route_does_not_count_as_connected() -> None:
    assert dial_first([Address("ff02::1", 9), Address("255.255.255.255", 9)], 1.0) is None


def test_strangers_neither_disturb_a_circuit_nor_leave_anything_behind(
    relay: Relay, echo: Address
) -> None:
    dice = random.Random(0)
    process = psutil.Process()
    with listening(RelayListener(access(1, (0,), relay.address), echo)) as node:
        assert node.wait_registered(SECONDS)
        connection = call(relay.address)
        assert status(connection) == 200
        heads = [
            request(RelayMethod.CONNECT, "node-1.job-a:1", ticket(0, 1)),
            request(RelayMethod.CONNECT, "node-1.job-a:1", ticket(2, 1)),
            request(RelayMethod.ACCEPT, "x", ticket(1, 0)),
            request(RelayMethod.REGISTER, "node-3.job-a", ticket(3)) + b"PONG\nPONG\n?\n",
            request(RelayMethod.GET, "/ping"),
            bytes(range(256)),
        ]
        before = process.num_fds()
        for _ in range(200):
            with ask(relay.address, b"") as stranger:
                head = dice.choice(heads)
                with contextlib.suppress(OSError):
                    stranger.sendall(head[: dice.choice([1, 50, 10_000])])
                    stranger.settimeout(dice.choice([0.0, 0.002]))
                    stranger.recv(100)
                if dice.random() < 0.5:
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            data = dice.randbytes(1000)
            connection.sendall(data)
            assert receive(connection, 1000) == data
        connection.close()
        wait_until(lambda: relay.counters().connections == 1)
        wait_until(lambda: process.num_fds() <= before)
