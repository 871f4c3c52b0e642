"""Cost of a relay, compared with a direct connection.

Two processes on loopback exchange frames over a connection with mutual TLS, as nodes do, directly and
through a relay in a third process. The far process registers at the relay as a node behind NAT does, so
each byte passes through the relay and the forwarding thread of the far process. The measurements
alternate, so that other load on the machine affects both. Each number is a median of its own; the last
column but one is the median over pairs of adjacent measurements, which differs from the quotient of the
medians while the load changes. Run as a script to print the report.
"""

from __future__ import annotations

import datetime
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ravnest.relay.access import RelayAccess
from ravnest.relay.limits import RelayLimits
from ravnest.relay.listener import RelayListener
from ravnest.relay.process import RelayProcess
from ravnest.relay.tickets import Endpoint, RelayTicket, sign_ticket
from ravnest.transport.certificates import Authority
from ravnest.transport.frame_socket import FrameSocket
from ravnest.transport.routes import Route, connect
from ravnest.transport.socket_client import pass_relay
from ravnest.transport.tls import Credentials, dialling_context, listening_context
from ravnest.types import Address
from ravnest.wire.envelope import SIZE, Kind, seal

ROUNDS = 9
LARGE_BYTES = 4 << 20
LARGE_MESSAGES = 48
SMALL_BYTES = 1 << 10
SMALL_MESSAGES = 200
LOOPBACK = "127.0.0.1"
JOB = "benchmark"
SECONDS = 60.0
"""Longest wait for a connection."""
ECHO, TAKE, LAST = range(3)
"""Numbers of frames: send it back, take it, take it and answer."""


def _frame(number: int, size: int) -> bytes:
    return b"".join(seal(Kind.CHUNK, number, [bytes(size)]))


def _answer(connection: socket.socket, credentials: Credentials) -> None:
    stream = FrameSocket(connection)
    stream.start()
    stream.secure(listening_context(credentials), time.monotonic() + SECONDS, listens=True)
    while (frames := stream.read(2 * LARGE_BYTES)) is not None:
        while frames:
            number = int.from_bytes(frames[8:12], "little")
            size = SIZE + int.from_bytes(frames[12:16], "little")
            if number == ECHO:
                stream.send_frame(bytes(frames[:size]))
            elif number == LAST:
                stream.send_frame(_frame(LAST, 0))
            frames = frames[size:]


def _serve(control: Connection, credentials: Credentials, access: RelayAccess) -> None:
    """Run the far process: a listener, reachable directly and through the relay."""
    server = socket.create_server((LOOPBACK, 0))
    port = server.getsockname()[1]

    def accept() -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_answer, args=(connection, credentials), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    listener = RelayListener(access, Address(LOOPBACK, port))
    listener.start()
    assert listener.wait_registered(SECONDS)
    control.send(port)
    control.recv()
    listener.close()


class Stream:
    """Open connection to the far process."""

    def __init__(self, route: Route, credentials: Credentials) -> None:
        connection = connect(route.address, SECONDS)
        deadline = time.monotonic() + SECONDS
        if route.endpoint is not None:
            pass_relay(connection, route, deadline)
        self._stream = FrameSocket(connection)
        self._stream.start()
        self._stream.secure(dialling_context(credentials), deadline, listens=False)
        self._large = {number: _frame(number, LARGE_BYTES - SIZE) for number in (TAKE, LAST)}
        self._small = _frame(ECHO, SMALL_BYTES - SIZE)

    def rate(self) -> float:
        """Return the bytes per second of a series of large frames."""
        begin = time.perf_counter()
        for _ in range(LARGE_MESSAGES - 1):
            self._stream.send_frame(self._large[TAKE])
        self._stream.send_frame(self._large[LAST])
        self._stream.read(LARGE_BYTES)
        return LARGE_MESSAGES * LARGE_BYTES / (time.perf_counter() - begin)

    def round_trip(self) -> float:
        """Return the median of the round trips of small frames, in seconds."""
        taken = []
        for _ in range(SMALL_MESSAGES):
            begin = time.perf_counter()
            self._stream.send_frame(self._small)
            self._stream.read(LARGE_BYTES)
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken)

    def close(self) -> None:
        """End the connection."""
        self._stream.hang_up()
        self._stream.close()


class Processor:
    """Processor time of a process."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    def seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def streams() -> Iterator[tuple[Stream, Stream, Processor, Processor]]:
    """Open a direct and a relayed stream, with the processors of the relay and the far process."""
    now = datetime.datetime.now(datetime.UTC)
    authority = Authority("benchmark", now)
    identities = [authority.issue(f"node_{number}", [LOOPBACK]) for number in (0, 1)]
    near, far = (Credentials(authority.certificate, each.certificate, each.key) for each in identities)
    key = Ed25519PrivateKey.generate()
    ends = time.time() + 3600
    tickets = [sign_ticket(RelayTicket(JOB, node, (1 - node,), ends), key) for node in (0, 1)]
    relay = RelayProcess(Address(LOOPBACK, 0), key.public_key(), RelayLimits(), frozenset({JOB}))
    relay.start()
    access = RelayAccess(((relay.address,),), Endpoint(JOB, 1), tickets[1])
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, far, access))
    process.start()
    try:
        port = here.recv()
        direct = Stream(Route(Address(LOOPBACK, port)), near)
        relayed = Stream(Route(relay.address, Endpoint(JOB, 1), tickets[0]), near)
        assert relay.pid is not None
        assert process.pid is not None
        yield direct, relayed, Processor(relay.pid), Processor(process.pid)
        direct.close()
        relayed.close()
        here.send(None)
        process.join(30)
    finally:
        process.kill()
        relay.stop()


def _rates(direct: Stream, relayed: Stream, relay: Processor, far: Processor) -> tuple[float, ...]:
    """Return both rates, their ratio, and processor seconds: far direct, far relayed, relay."""
    begin = far.seconds()
    plain = direct.rate()
    middle, relay_begin = far.seconds(), relay.seconds()
    through = relayed.rate()
    costs = middle - begin, far.seconds() - middle, relay.seconds() - relay_begin
    return plain, through, through / plain, *costs


def measure() -> str:
    """Return the report as Markdown."""
    rates, trips = [], []
    with streams() as (direct, relayed, relay, far):
        for _ in range(ROUNDS + 1):
            rates.append(_rates(direct, relayed, relay, far))
            trips.append((direct.round_trip(), relayed.round_trip()))
    plain, through, ratio, *_ = map(statistics.median, zip(*rates[1:], strict=True))
    own, cost, relay_cost = (sum(column) / ROUNDS for column in list(zip(*rates[1:], strict=True))[3:])
    short, long = map(statistics.median, zip(*trips[1:], strict=True))
    added = statistics.median(there - here for here, there in trips[1:])
    gigabytes = LARGE_MESSAGES * LARGE_BYTES / 1e9
    rows = [
        "| | direct | through the relay | compared | required |",
        "|---|---|---|---|---|",
        (
            f"| messages of 4 MiB, MB/s | {plain / 1e6:.0f} | {through / 1e6:.0f} |"
            f" {ratio:.2f} of the rate (below 1 is slower) | at least 0.6 |"
        ),
        (
            f"| round trip of 1 KiB, ms | {1e3 * short:.2f} | {1e3 * long:.2f} |"
            f" {1e3 * added:.2f} ms more for both directions together | below 0.3 ms |"
        ),
        (
            f"| processor time of the far process, s per GB | {own / gigabytes:.2f} |"
            f" {cost / gigabytes:.2f} | | |"
        ),
        f"| processor time of the relay, s per GB | | {relay_cost / gigabytes:.2f} | | |",
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    print(measure())
