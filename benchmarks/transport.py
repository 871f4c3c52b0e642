"""Cost of a link, compared with a bare socket and unary calls, and when idle.

Two processes on loopback, with one torch thread each. The numbers of the link include encoding,
checksums, assembly and delivery to the handler. The measurements alternate, so that other load on the
machine affects all of them; the numbers are medians. Run as a script to print the report.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import SimpleQueue

import grpc
import torch

from ravnest.transport.base import Link
from ravnest.transport.socket_transport import SocketTransport
from ravnest.types import Address, MicrobatchId
from ravnest.wire.messages import PROTOCOL, Forward, Goodbye, Hello, Message, SaveStage

ROUNDS = 9
TENSOR_BYTES = 4 << 20
TENSORS = 64
SMALL_BYTES = 64 << 10
SMALL_MESSAGES = 300
IDLE_SECONDS = 5.0
LOOPBACK = Address("127.0.0.1", 0)
SERVICE = "ravnest.Benchmark"
OPTIONS = [
    ("grpc.max_send_message_length", TENSOR_BYTES),
    ("grpc.max_receive_message_length", TENSOR_BYTES),
]


def _hello(node: int) -> Hello:
    return Hello(PROTOCOL, "benchmark", node, 0, node)


def _message(run: str, tensor: torch.Tensor) -> Message:
    return Message(Forward(run, MicrobatchId(0, 0), 1), {"x": tensor})


class _Far:
    """Handler of the other process: echoes on request, and answers the last message of a series."""

    def on_message(self, link: Link, message: Message) -> None:
        match message.head:
            case Forward(run="echo"):
                link.send(message)
            case Forward(run="last"):
                link.send(Message(SaveStage("benchmark")))

    def on_lost(self, link: Link, reason: str) -> None:
        raise AssertionError(reason)


class _Near:
    """Handler of the measuring process, which waits for an answer."""

    def __init__(self) -> None:
        self.answered = threading.Semaphore(0)

    def on_message(self, link: Link, message: Message) -> None:
        self.answered.release()

    def on_lost(self, link: Link, reason: str) -> None:
        raise AssertionError(reason)


def _serve(control: Connection) -> None:
    """Run the other process: a node, a bare socket and a unary method."""
    torch.set_num_threads(1)
    transport = SocketTransport()
    address = transport.serve(LOOPBACK, lambda hello: _hello(1), _Far(), lambda link: None)
    listener = socket.create_server((LOOPBACK.host, 0))
    threading.Thread(target=_drain, args=(listener,), daemon=True).start()
    unary, unary_port = _unary_server()
    control.send((address.port, listener.getsockname()[1], unary_port))
    while control.recv():
        begin = time.process_time()
        control.recv()
        control.send(time.process_time() - begin)
    transport.close()
    unary.stop(None).wait(5)


def _drain(listener: socket.socket) -> None:
    peer, _ = listener.accept()
    buffer = memoryview(bytearray(TENSOR_BYTES))
    while True:
        for _ in range(TENSORS):
            got = 0
            while got < TENSOR_BYTES:
                count = peer.recv_into(buffer[got:])
                if not count:
                    return
                got += count
        peer.sendall(b"!")


def _unary_server() -> tuple[grpc.Server, int]:
    server = grpc.server(futures.ThreadPoolExecutor(4), options=OPTIONS)
    methods = {
        "Take": grpc.unary_unary_rpc_method_handler(lambda request, context: b""),
        "Echo": grpc.unary_unary_rpc_method_handler(lambda request, context: request),
        "EchoAll": grpc.stream_stream_rpc_method_handler(lambda requests, context: requests),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port(str(LOOPBACK))
    server.start()
    return server, port


class Bench:
    """Open connections to the other process."""

    def __init__(self, control: Connection, ports: tuple[int, int, int]) -> None:
        self._control = control
        self._near = _Near()
        self._transport = SocketTransport()
        address = Address(LOOPBACK.host, ports[0])
        self._link = self._transport.dial(address, _hello(0), self._near, deadline=10)
        self._socket = socket.create_connection((LOOPBACK.host, ports[1]))
        self._channel = grpc.insecure_channel(f"{LOOPBACK.host}:{ports[2]}", OPTIONS)
        self._take = self._channel.unary_unary(f"/{SERVICE}/Take")
        self._echo = self._channel.unary_unary(f"/{SERVICE}/Echo")
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._incoming = self._channel.stream_stream(f"/{SERVICE}/EchoAll")(
            iter(self._outgoing.get, None)
        )
        self._large = torch.randn(TENSOR_BYTES // 4)
        self._small = torch.randn(SMALL_BYTES // 4)
        self._small_bytes = self._small.numpy().tobytes()

    def close(self) -> None:
        self._outgoing.put(None)
        self._link.send(Message(Goodbye(0)))
        self._transport.close()
        self._channel.close()
        self._socket.close()
        self._control.send(False)

    def _row(self, tensor: torch.Tensor, count: int) -> float:
        """Return the seconds for a series of messages, until the peer has handled the last."""
        begin = time.perf_counter()
        for _ in range(count - 1):
            self._link.send(_message("row", tensor))
        self._link.send(_message("last", tensor))
        assert self._near.answered.acquire(timeout=60)
        return time.perf_counter() - begin

    def stream(self) -> float:
        """Return the bytes per second of large tensors over the link."""
        return TENSORS * TENSOR_BYTES / self._row(self._large, TENSORS)

    def message(self) -> float:
        """Return the seconds per small tensor over the link, in a series."""
        return self._row(self._small, SMALL_MESSAGES) / SMALL_MESSAGES

    def call(self) -> float:
        """Return the seconds of a call with the same bytes."""
        begin = time.perf_counter()
        for _ in range(SMALL_MESSAGES):
            self._take(self._small_bytes, timeout=60)
        return (time.perf_counter() - begin) / SMALL_MESSAGES

    def bare(self) -> float:
        """Return the bytes per second over a socket."""
        data = self._large.numpy().data.cast("B")
        begin = time.perf_counter()
        for _ in range(TENSORS):
            self._socket.sendall(data)
        assert self._socket.recv(1)
        return TENSORS * TENSOR_BYTES / (time.perf_counter() - begin)

    def echo(self) -> float:
        """Return the round-trip seconds of a small tensor over the link, with nothing else in flight."""
        begin = time.perf_counter()
        for _ in range(SMALL_MESSAGES):
            self._link.send(_message("echo", self._small))
            assert self._near.answered.acquire(timeout=60)
        return (time.perf_counter() - begin) / SMALL_MESSAGES

    def echo_call(self) -> float:
        """Return the round-trip seconds of a call."""
        begin = time.perf_counter()
        for _ in range(SMALL_MESSAGES):
            self._echo(self._small_bytes, timeout=60)
        return (time.perf_counter() - begin) / SMALL_MESSAGES

    def echo_stream(self) -> float:
        """Return the round-trip seconds of a bare gRPC stream, with as few threads as possible."""
        begin = time.perf_counter()
        for _ in range(SMALL_MESSAGES):
            self._outgoing.put(self._small_bytes)
            next(self._incoming)
        return (time.perf_counter() - begin) / SMALL_MESSAGES

    def idle(self) -> float:
        """Return the share of a core that both processes use while nothing is sent."""
        self._control.send(True)
        begin = time.process_time()
        time.sleep(IDLE_SECONDS)
        mine = time.process_time() - begin
        self._control.send(True)
        return max(mine, float(self._control.recv())) / IDLE_SECONDS


@contextmanager
def bench() -> Iterator[Bench]:
    """Run the other process for the duration of the context."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,))
    process.start()
    try:
        opened = Bench(here, here.recv())
        yield opened
        opened.close()
        process.join(30)
    finally:
        process.kill()


def _medians(*measures: Callable[[], float]) -> list[float]:
    """Return the medians of alternating measurements, without the first of each."""
    rounds = [[measure() for measure in measures] for _ in range(ROUNDS + 1)][1:]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def measure() -> str:
    """Return the report as Markdown."""
    torch.set_num_threads(1)
    with bench() as opened:
        stream, bare = _medians(opened.stream, opened.bare)
        message, call = _medians(opened.message, opened.call)
        echo, echo_call, echo_stream = _medians(opened.echo, opened.echo_call, opened.echo_stream)
        idle = opened.idle()
    rows = [
        ("| | the link | compared with | link relative to it | required |"),
        ("|---|---|---|---|---|"),
        (
            f"| tensors of 4 MiB (below 1 is slower), MB/s | {stream / 1e6:.0f} |"
            f" bare socket: {bare / 1e6:.0f} | {stream / bare:.2f} | at least 0.35 |"
        ),
        (
            f"| one message of 64 KiB in a series (below 1 is faster), ms | {1e3 * message:.2f} |"
            f" unary call: {1e3 * call:.2f} | {message / call:.2f} | at most 0.35 |"
        ),
        (
            f"| round trip of 64 KiB, alone (above 1 is slower), ms | {1e3 * echo:.2f} |"
            f" unary call: {1e3 * echo_call:.2f} | {echo / echo_call:.2f} | |"
        ),
        (
            f"| the same | {1e3 * echo:.2f} |"
            f" bare gRPC stream: {1e3 * echo_stream:.2f} | {echo / echo_stream:.2f} | |"
        ),
        f"| idle for {IDLE_SECONDS:.0f} s, share of a core | {100 * idle:.2f}% | | | below 1% |",
    ]
    return "\n".join(rows) + "\n\n" + _NOTE


_NOTE = """\
Training sends series of messages: the sender does not wait for an answer, whereas a call does. A single
round trip is slower than a call: in Python even a bare gRPC stream is far from 0.35x of a call, and the
link adds two thread switches, encoding and assembly."""


if __name__ == "__main__":
    print(measure())
