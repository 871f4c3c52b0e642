"""Cost of a relay, compared with a direct connection.

Two processes on loopback exchange messages over a gRPC stream with mutual TLS, directly and through a
relay in a third process. The far process registers at the relay as a node behind NAT does, so each byte
passes through the relay and through the far process's own forwarding thread. The measurements alternate,
so that other load on the machine affects both. Each number is a median of its own; the last column but
one is the median over pairs of adjacent measurements, which differs from the quotient of the medians
while the load changes. Run as a script to print the
report.
"""

from __future__ import annotations

import datetime
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import SimpleQueue

import grpc
import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ravnest.relay.access import RelayAccess
from ravnest.relay.limits import RelayLimits
from ravnest.relay.listener import RelayListener
from ravnest.relay.process import RelayProcess
from ravnest.relay.tickets import Endpoint, RelayTicket, sign_ticket
from ravnest.transport.certificates import Authority, Identity
from ravnest.types import Address

ROUNDS = 9
LARGE_BYTES = 4 << 20
LARGE_MESSAGES = 48
SMALL_BYTES = 1 << 10
SMALL_MESSAGES = 200
LOOPBACK = "127.0.0.1"
JOB = "benchmark"
METHOD = "/ravnest.Benchmark/Exchange"
OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_send_message_length", 2 * LARGE_BYTES),
    ("grpc.max_receive_message_length", 2 * LARGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
]
ECHO, TAKE, LAST = b"e", b"t", b"l"
"""First bytes of messages: send it back, take it, take it and answer."""


def _exchange(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    for message in requests:
        kind = message[:1]
        if kind == ECHO:
            yield message
        elif kind == LAST:
            yield b""


def _serve(control: Connection, authority: bytes, identity: Identity, access: RelayAccess) -> None:
    """Run the far process: a server, reachable directly and through the relay."""
    server = grpc.server(futures.ThreadPoolExecutor(4), options=OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(_exchange)
    service, name = METHOD.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    credentials = grpc.ssl_server_credentials(
        [(identity.key, identity.certificate)], authority, require_client_auth=True
    )
    port = server.add_secure_port(f"{LOOPBACK}:0", credentials)
    server.start()
    listener = RelayListener(access, Address(LOOPBACK, port))
    listener.start()
    assert listener.wait_registered(60)
    control.send(port)
    control.recv()
    listener.close()
    server.stop(None).wait(5)


class Stream:
    """Open stream to the far process."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials, proxy: str | None) -> None:
        route: list[tuple[str, int | str]] = (
            [("grpc.enable_http_proxy", 0)]
            if proxy is None
            else [("grpc.http_proxy", proxy), ("grpc.enable_http_proxy", 1)]
        )
        options = [*OPTIONS, *route, ("grpc.ssl_target_name_override", "node_1")]
        self._channel = grpc.secure_channel(target, credentials, options)
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._incoming = self._channel.stream_stream(METHOD)(iter(self._outgoing.get, None))
        self._large = bytes(LARGE_BYTES - 1)
        self._small = ECHO + bytes(SMALL_BYTES - 1)

    def rate(self) -> float:
        """Return the bytes per second of a series of large messages."""
        take, last = TAKE + self._large, LAST + self._large
        begin = time.perf_counter()
        for _ in range(LARGE_MESSAGES - 1):
            self._outgoing.put(take)
        self._outgoing.put(last)
        next(self._incoming)
        return LARGE_MESSAGES * LARGE_BYTES / (time.perf_counter() - begin)

    def round_trip(self) -> float:
        """Return the median of the round trips of small messages, in seconds."""
        taken = []
        for _ in range(SMALL_MESSAGES):
            begin = time.perf_counter()
            self._outgoing.put(self._small)
            next(self._incoming)
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken)

    def close(self) -> None:
        self._outgoing.put(None)
        self._channel.close()


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
    near, far = (authority.issue(f"node_{number}", [LOOPBACK]) for number in (0, 1))
    key = Ed25519PrivateKey.generate()
    ends = time.time() + 3600
    tickets = [sign_ticket(RelayTicket(JOB, node, (1 - node,), ends), key) for node in (0, 1)]
    relay = RelayProcess(Address(LOOPBACK, 0), key.public_key(), RelayLimits(), frozenset({JOB}))
    relay.start()
    access = RelayAccess(((relay.address,),), Endpoint(JOB, 1), tickets[1])
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, authority.certificate, far, access))
    process.start()
    try:
        port = here.recv()
        credentials = grpc.ssl_channel_credentials(authority.certificate, near.key, near.certificate)
        proxy = f"http://ticket:{tickets[0]}@{relay.address}"
        direct = Stream(f"{LOOPBACK}:{port}", credentials, None)
        relayed = Stream(f"{Endpoint(JOB, 1)}:1", credentials, proxy)
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
