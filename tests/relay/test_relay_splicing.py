"""Contract of circuits, for pipes of the kernel and for buffers."""

import contextlib
import errno
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from ravnest import host
from ravnest.deadlines import RELAY_HALF_CLOSED, RELAY_IDLE
from ravnest.relay.limits import TokenBucket
from ravnest.relay.loop import EventLoop
from ravnest.relay.pipes import BufferPipe, BytePipe, KernelPipe, MakePipe, PipePool
from ravnest.relay.splicing import SplicedCircuit, Splicer

SECONDS = 20.0
MB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return self.now


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), SECONDS)
        far, _ = listener.accept()
    far.settimeout(SECONDS)
    return near, far


class Bench:
    """A loop with circuits, whose outer sockets the test holds."""

    def __init__(self, make: MakePipe, rate: float | None = None) -> None:
        self.clock = Clock()
        self.loop = EventLoop("test", self.clock)
        self.pool = PipePool(make)
        bucket = None if rate is None else TokenBucket(rate, self.clock.now)
        self.splicer = Splicer(self.loop, self.pool, bucket)
        self.forwarded = 0
        self.forwarded_by: Counter[socket.socket] = Counter()
        self.moved = threading.Condition()
        self._sockets: list[socket.socket] = []
        self.loop.start()

    def run(self, action: Callable[[], object]) -> object:
        """Run an action in the loop and return its result."""
        result: Future[object] = Future()
        self.loop.call(lambda: result.set_result(action()))
        return result.result(SECONDS)

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.run(lambda: None)
        self.run(lambda: None)

    def circuit(
        self, to_near: bytes = b"", to_far: bytes = b"", buffer: int | None = None
    ) -> tuple[socket.socket, socket.socket, SplicedCircuit, threading.Event]:
        ended = threading.Event()
        near, inner_near = tcp_pair()
        far, inner_far = tcp_pair()
        self._sockets += [near, far]
        for each in (near, far, inner_near, inner_far):
            if buffer is not None:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        for each in (inner_near, inner_far):
            each.setblocking(False)

        def join() -> SplicedCircuit:
            return self.splicer.join(
                inner_near,
                inner_far,
                to_near=to_near,
                to_far=to_far,
                on_bytes=lambda count: self._count(near, count),
                on_end=ended.set,
            )

        joined = self.run(join)
        assert isinstance(joined, SplicedCircuit)
        return near, far, joined, ended

    def _count(self, near: socket.socket, count: int) -> None:
        with self.moved:
            self.forwarded_by[near] += count
            self.forwarded += count
            self.moved.notify_all()

    def close(self) -> None:
        self.run(self.splicer.close)
        assert self.loop.close(SECONDS)
        for each in self._sockets:
            each.close()


KINDS = [
    pytest.param(
        KernelPipe,
        marks=pytest.mark.skipif(not host.can_splice(), reason="this system cannot splice"),
        id="splice",
    ),
    pytest.param(BufferPipe, id="buffer"),
]


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    opened = Bench(request.param)
    yield opened
    opened.close()


@pytest.fixture(params=KINDS)
def limited(request: pytest.FixtureRequest) -> Iterator[Bench]:
    opened = Bench(request.param, rate=float(MB))
    yield opened
    opened.close()


def receive(source: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = source.recv(count - len(data))
        if not piece:
            break
        data += piece
    return bytes(data)


def in_thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def test_bytes_arrive_unchanged_both_ways_at_once(bench: Bench) -> None:
    near, far, _, _ = bench.circuit()
    one, other = random.Random(1).randbytes(9 * MB + 1), random.Random(2).randbytes(7 * MB + 3)
    in_thread(lambda: near.sendall(one))
    in_thread(lambda: far.sendall(other))
    got: list[bytes] = []
    reader = in_thread(lambda: got.append(receive(near, len(other))))
    assert receive(far, len(one)) == one
    reader.join(SECONDS)
    assert got == [other]
    assert bench.forwarded == len(one) + len(other)


def test_many_small_messages_go_back_and_forth(bench: Bench) -> None:
    near, far, _, _ = bench.circuit()
    for number in range(300):
        text = f"message {number}".encode()
        near.sendall(text)
        assert far.recv(100) == text
        far.sendall(text)
        assert near.recv(100) == text


def test_first_bytes_come_first(bench: Bench) -> None:
    near, far, _, _ = bench.circuit(to_near=b"hello near ", to_far=b"x" * 300_000)
    far.sendall(b"more")
    near.sendall(b"end")
    assert receive(near, 15) == b"hello near more"
    assert receive(far, 300_003) == b"x" * 300_000 + b"end"


def test_a_direction_can_end_alone(bench: Bench) -> None:
    near, far, _, ended = bench.circuit()
    near.sendall(b"request" * MB)
    near.shutdown(socket.SHUT_WR)
    assert receive(far, 8 * MB) == b"request" * MB
    assert far.recv(1) == b""
    far.sendall(b"answer")
    assert near.recv(100) == b"answer"
    assert not ended.is_set()
    far.close()
    assert near.recv(1) == b""
    assert ended.wait(SECONDS)


def test_a_reset_reaches_the_other_side(bench: Bench) -> None:
    near, far, _, ended = bench.circuit()
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    near.close()
    assert ended.wait(SECONDS)
    with pytest.raises(ConnectionError):
        far.recv(1)


def test_an_ended_circuit_closes_both_sides(bench: Bench) -> None:
    near, far, circuit, ended = bench.circuit()
    bench.run(lambda: bench.splicer.end(circuit))
    assert ended.is_set()
    for side in (near, far):
        with pytest.raises(ConnectionError):
            side.recv(1)


def fill(sender: socket.socket) -> int:
    """Send until nothing is taken any more; the circuit stops reading once its target is full."""
    sender.settimeout(0.2)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while True:
            sent += sender.send(b"x" * 65536)
    sender.settimeout(SECONDS)
    return sent


def test_a_side_that_does_not_read_stops_the_sender_and_nobody_else(bench: Bench) -> None:
    near, far, _, _ = bench.circuit(buffer=64 << 10)
    other_near, other_far, _, _ = bench.circuit()
    sent = fill(near)
    assert sent < 3 * MB
    far.sendall(b"back")
    assert near.recv(4) == b"back"
    other_near.sendall(b"others go on")
    assert other_far.recv(100) == b"others go on"
    assert receive(far, sent) == b"x" * sent


def test_idle_circuits_hold_no_pipes(bench: Bench) -> None:
    for _ in range(20):
        near, far, _, _ = bench.circuit()
        near.sendall(b"x")
        assert far.recv(1) == b"x"
    assert bench.run(lambda: bench.pool.taken) == 0


def test_a_buffer_replaces_a_pipe_for_which_no_descriptor_is_left() -> None:
    def fail(_: int) -> BytePipe:
        raise OSError(errno.EMFILE, "too many open files")

    assert isinstance(PipePool(fail).take(), BufferPipe)


def test_the_loop_sleeps_while_nothing_happens(bench: Bench) -> None:
    near, far, _, _ = bench.circuit()
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    bench.run(lambda: None)
    before = bench.clock.calls
    threading.Event().wait(0.2)
    assert bench.clock.calls - before < 10


def test_a_silent_circuit_ends(bench: Bench) -> None:
    near, far, _, ended = bench.circuit()
    bench.pass_time(RELAY_IDLE - 1)
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    bench.pass_time(RELAY_IDLE - 1)
    assert not ended.is_set()
    bench.pass_time(RELAY_IDLE)
    assert ended.wait(SECONDS)


def test_a_half_closed_circuit_ends_earlier(bench: Bench) -> None:
    near, far, _, ended = bench.circuit()
    near.shutdown(socket.SHUT_WR)
    assert far.recv(1) == b""
    bench.pass_time(RELAY_HALF_CLOSED + 5)
    assert ended.wait(SECONDS)


def ignoring_ends(action: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        with contextlib.suppress(OSError):
            action()

    return in_thread(run)


def test_the_rate_is_limited_and_shared_fairly(limited: Bench) -> None:
    circuits = [limited.circuit() for _ in range(3)]
    for near, far, _, _ in circuits:
        ignoring_ends(lambda near=near: near.sendall(b"x" * (4 * MB)))
        ignoring_ends(lambda far=far: receive(far, 4 * MB))
    share = TokenBucket(float(MB), 0.0).share
    begin: Counter[socket.socket] = Counter()
    for step in range(61):
        limited.pass_time(0.05 if step else 0.0)
        allowed = MB // 10 + step * MB // 20
        with limited.moved:
            assert limited.moved.wait_for(lambda: limited.forwarded > allowed - 2 * share, SECONDS)  # noqa: B023
            assert limited.forwarded <= allowed
            if step == 20:  # all senders have begun
                begin = limited.forwarded_by.copy()
    each = [limited.forwarded_by[near] - begin[near] for near, _, _, _ in circuits]
    assert max(each) - min(each) <= 4 * share


def test_tokens_grow_with_time_up_to_a_burst() -> None:
    bucket = TokenBucket(1e6, 0.0)
    full = bucket.available(0.0)
    assert full == 100_000
    assert bucket.available(1e9) == full
    bucket.take(full)
    assert bucket.available(1e9) == 0
    when = bucket.ready_at(bucket.share)
    assert bucket.available(when) >= bucket.share
    assert bucket.available(when - 1e6) >= bucket.share


def test_an_event_that_fails_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    loop = EventLoop("test")
    loop.start()
    after = threading.Event()
    loop.call(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    loop.call(after.set)
    assert after.wait(SECONDS)
    assert loop.close(SECONDS)
    assert "an event failed" in caplog.text
    assert not loop.call(after.set)
