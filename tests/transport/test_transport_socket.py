"""Sockets on loopback: killed processes, clients that do not follow the protocol, full buffers."""

import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue

import pytest
import torch
from msgspec import structs
from transport_nodes import LOOPBACK, SECONDS, Inbox, Pair, connect, hello

from ravnest.errors import UnreachableError, WireError
from ravnest.transport import socket_server
from ravnest.transport.base import Link
from ravnest.transport.frame_socket import CLOSED_IN_CHILDREN, FrameSocket
from ravnest.transport.handshake import hello_frame
from ravnest.transport.socket_transport import SocketTransport
from ravnest.types import Address, MicrobatchId
from ravnest.wire import envelope
from ravnest.wire.envelope import Kind, seal
from ravnest.wire.frames import encode
from ravnest.wire.header import Limits
from ravnest.wire.messages import Forward, Goodbye, Message, SaveStage

LARGEST = 1 << 20


@pytest.fixture
def made() -> Iterator[list[SocketTransport]]:
    transports: list[SocketTransport] = []
    yield transports
    for transport in transports:
        transport.close()


def open_transport(made: list[SocketTransport]) -> SocketTransport:
    made.append(SocketTransport())
    return made[-1]


def message(index: int = 0, count: int = 10) -> Message:
    return Message(Forward("run", MicrobatchId(0, index), 1), {"x": torch.randn(count)})


def assert_works(pair: Pair) -> None:
    pair.near.send(message(1, 300_000))
    pair.far.send(message(2))
    assert isinstance(pair.far_inbox.next().head, Forward)
    assert isinstance(pair.near_inbox.next().head, Forward)


def frame_of(size: int) -> bytes:
    return b"".join(seal(Kind.CHUNK, 0, [bytes(size)]))


# Listeners


def test_a_listener_outlives_a_burst_of_strangers(
    made: list[SocketTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors and threads were used up for a moment, and nobody could connect any more."""
    monkeypatch.setattr(socket_server, "_ACCEPT_PAUSE", 0.01)
    near, far = open_transport(made), open_transport(made)
    failures = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ENFILE, "x")]
    accept, start = socket.socket.accept, threading.Thread.start
    full = threading.Event()

    def failing(self: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(self)

    def without_room(self: threading.Thread) -> None:
        if self.name == "ravnest link reader" and not full.is_set():
            full.set()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    address = far.serve(LOOPBACK, lambda peer: hello(1), Inbox(), lambda link: None)
    monkeypatch.setattr(threading.Thread, "start", without_room)
    stranger = socket.create_connection((address.host, address.port), SECONDS)
    stranger.settimeout(SECONDS)
    assert stranger.recv(1) == b"", "no thread for it"
    stranger.close()
    near.dial(address, hello(0), Inbox(), deadline=SECONDS)
    assert failures == []


def test_a_stopped_listener_does_not_accept_again(made: list[SocketTransport]) -> None:
    far = open_transport(made)
    address = far.serve(LOOPBACK, lambda peer: hello(1), Inbox(), lambda link: None)
    (listener,) = [each for each in threading.enumerate() if each.name == "ravnest listener"]
    far.close()
    listener.join(SECONDS)
    assert not listener.is_alive()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((address.host, address.port), SECONDS)


# Streams of frames


@pytest.fixture
def streams() -> Iterator[tuple[socket.socket, FrameSocket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    far = FrameSocket(accepted)
    yield near, far
    near.close()
    far.close()


def sent_by(near: socket.socket, data: bytes, piece: int) -> threading.Thread:
    def send() -> None:
        for start in range(0, len(data), piece):
            near.sendall(data[start : start + piece])
        near.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("piece", [1, 23, 25, 1000, 1 << 24])
def test_frames_are_whole_however_they_arrive(
    streams: tuple[socket.socket, FrameSocket], piece: int
) -> None:
    near, far = streams
    sizes = [1, 0, 70, 3, 2000] if piece == 1 else [1, 0, 5000, 600_000, 3, 900_000, 900_000, 10]
    data = b"".join(map(frame_of, sizes))
    thread = sent_by(near, data, piece)
    found = []
    while (batch := far.read(LARGEST)) is not None:
        found += [len(frame) - envelope.SIZE for frame in envelope.split(bytes(batch))]
    assert found == sizes
    thread.join(SECONDS)


def test_valid_frames_are_returned_before_invalid_data_is_refused(
    streams: tuple[socket.socket, FrameSocket],
) -> None:
    near, far = streams
    near.sendall(frame_of(10) + bytes(100))
    assert len(far.read(LARGEST) or b"") == envelope.SIZE + 10
    with pytest.raises(WireError, match="not a Ravnest frame"):
        far.read(LARGEST)


def test_an_announced_size_takes_no_memory(streams: tuple[socket.socket, FrameSocket]) -> None:
    near, far = streams
    near.sendall(frame_of(LARGEST)[:1000])
    near.shutdown(socket.SHUT_WR)
    assert far.read(1 << 40) is None
    assert len(far._view) < LARGEST


def test_a_frame_over_the_limit_is_refused(streams: tuple[socket.socket, FrameSocket]) -> None:
    near, far = streams
    near.sendall(frame_of(LARGEST)[: envelope.SIZE])
    with pytest.raises(WireError, match="larger than the limit"):
        far.read(LARGEST)


def test_what_the_system_does_not_take_at_once_is_left(
    streams: tuple[socket.socket, FrameSocket],
) -> None:
    near, far = streams
    data = bytes(range(256)) * (1 << 17)
    left = far.send([data[:10], memoryview(data)[10:]], wait=False)
    assert 0 < sum(map(len, left)) < len(data)
    received: list[bytes] = []
    reader = threading.Thread(
        target=lambda: received.extend(iter(lambda: near.recv(1 << 20), b"")), daemon=True
    )
    reader.start()
    assert far.send(left, wait=True) == []
    far.end_writing()
    reader.join(SECONDS)
    assert b"".join(received) == data


# Clients that do not follow the protocol


@pytest.fixture
def plain(made: list[SocketTransport]) -> Iterator[tuple[Address, Inbox]]:
    """node_1 on loopback; at the end it must still accept nodes of its plan."""
    inbox = Inbox()
    address = open_transport(made).serve(LOOPBACK, lambda peer: hello(1), inbox, lambda link: None)
    yield address, inbox
    assert inbox.messages.empty()
    open_transport(made).dial(address, hello(0), Inbox(), deadline=SECONDS).send(message())
    inbox.next()


def raw(address: Address, data: bytes = b"") -> socket.socket:
    client = socket.create_connection((address.host, address.port), SECONDS)
    client.sendall(data)
    return client


def answer(client: socket.socket) -> bytes:
    with client:
        return b"".join(iter(lambda: client.recv(1000), b""))


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "not a Ravnest frame"),
        (hello_frame(hello(0))[:-1] + b"?", "checksum"),
        (frame_of(LARGEST)[: envelope.SIZE], "larger than the limit"),
        (next(iter(encode(Message(Goodbye(0))))), "begins with a Hello, not with Goodbye"),
        (next(iter(encode(message()))), "exceed the limit"),
    ],
)
def test_a_first_frame_other_than_hello_is_refused(
    plain: tuple[Address, Inbox], first: bytes, reason: str
) -> None:
    found = answer(raw(plain[0], first))
    assert reason.encode() in found
    assert b"Refused" in found


def test_a_client_without_a_hello_is_refused(
    plain: tuple[Address, Inbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_server, "LINK_HELLO", 0.1)
    found = answer(raw(plain[0], hello_frame(hello(0))[:-1]))
    monkeypatch.undo()
    assert b"no Hello arrived" in found


def test_invalid_data_loses_the_link_with_the_reason(plain: tuple[Address, Inbox]) -> None:
    address, inbox = plain
    for garbage, reason in [
        (bytes(1000), "node_5 sent an invalid frame: the data is not a Ravnest frame"),
        (next(iter(encode(message())))[:-3] + b"abc", "checksum"),
        (frame_of(1 << 30)[: envelope.SIZE], "larger than the limit"),
    ]:
        with raw(address, hello_frame(hello(5))) as client:
            client.sendall(garbage)
            assert reason in inbox.loss()


def test_strangers_who_say_nothing_do_not_keep_peers_out(
    plain: tuple[Address, Inbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_server, "MAX_LINKS", 2)
    silent = [raw(plain[0]) for _ in range(5)]
    assert [answer(client) for client in silent[:3]] == [b"", b"", b""]
    with raw(plain[0], hello_frame(hello(5))) as peer:
        assert b"Refused" not in peer.recv(1000)
    for client in silent:
        client.close()
    monkeypatch.undo()


def test_connections_are_bounded(plain: tuple[Address, Inbox], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_server, "MAX_LINKS", 2)
    peers = [raw(plain[0], hello_frame(hello(node))) for node in (5, 6)]
    for peer in peers:
        assert b"Refused" not in peer.recv(1000)
    with raw(plain[0], hello_frame(hello(7))) as one_more:
        assert b"2 connections already" in answer(one_more)
    for peer in peers:
        peer.close()
    monkeypatch.undo()


def test_a_message_over_the_limits_loses_the_link() -> None:
    near, far = SocketTransport(), SocketTransport(limits=Limits(max_message_bytes=1000))
    pair = connect(near, far)
    pair.near.send(message(0, 1000))
    assert "4000 bytes of tensors exceed the limit of 1000" in pair.far_inbox.loss()
    assert pair.near_inbox.loss()
    near.close()
    far.close()


def test_another_service_is_not_a_node(made: list[SocketTransport]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            while True:
                try:
                    client, _ = other.accept()
                except OSError:
                    return
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        address = Address("127.0.0.1", other.getsockname()[1])
        with pytest.raises(UnreachableError, match="not a Ravnest node"):
            open_transport(made).dial(address, hello(0), Inbox(), deadline=0.3)
        other.shutdown(socket.SHUT_RDWR)


def test_a_listener_that_never_answers_is_unreachable(made: list[SocketTransport]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(UnreachableError, match="no answer within"):
            open_transport(made).dial(address, hello(0), Inbox(), deadline=0.5)


def test_closing_ends_a_dial(made: list[SocketTransport]) -> None:
    transport = open_transport(made)
    failed = threading.Event()
    waiting = threading.Event()

    def dial() -> None:
        with pytest.raises(UnreachableError):
            transport.dial(
                Address("127.0.0.1", 1),
                hello(0),
                Inbox(),
                deadline=600,
                waiting=lambda reason: waiting.set(),
            )
        failed.set()

    threading.Thread(target=dial, daemon=True).start()
    assert waiting.wait(SECONDS)
    transport.close()
    assert failed.wait(SECONDS)


# Killed processes


def _child(control: Connection, port: int | None) -> None:
    """Serve or dial, and send endlessly, so that the process is killed during a message."""
    transport = SocketTransport()
    if port is None:
        links: SimpleQueue[Link] = SimpleQueue()
        control.send(transport.serve(LOOPBACK, lambda peer: hello(1), Inbox(), links.put).port)
        link = links.get(timeout=SECONDS)
    else:
        own = transport.serve(LOOPBACK, lambda peer: hello(1), Inbox(), lambda link: None)
        named = structs.replace(hello(1), addresses=(str(own),))
        link = transport.dial(Address("127.0.0.1", port), named, Inbox(), deadline=SECONDS)
    tensor = torch.randn(1_000_000)
    while True:
        link.send(Message(SaveStage("run"), {"x": tensor}))
        link.flush(SECONDS)


@pytest.mark.parametrize("dials", [False, True], ids=["server killed", "client killed"])
def test_a_killed_peer_is_detected(made: list[SocketTransport], dials: bool) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    inbox, transport = Inbox(), open_transport(made)
    port = None
    if dials:
        port = transport.serve(LOOPBACK, lambda peer: hello(0), inbox, lambda link: None).port
    child = context.Process(target=_child, args=(there, port), daemon=True)
    child.start()
    if not dials:
        transport.dial(Address("127.0.0.1", here.recv()), hello(0), inbox, deadline=60)
    inbox.messages.get(timeout=60)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    lost = inbox.lost.get(timeout=SECONDS)  # not after an outage of 60 s: nothing listens there
    assert "lost node_1: " in lost
    assert "nothing listens there" in lost
    child.join(SECONDS)


NEVER_CLOSES = """
from ravnest.transport.socket_transport import SocketTransport
from ravnest.wire.messages import Message, SaveStage
from transport_nodes import connect
pair = connect(SocketTransport(), SocketTransport())
pair.near.send(Message(SaveStage("run")))
pair.far_inbox.next()
"""


def test_a_program_ends_without_closing_its_links() -> None:
    folder = os.path.dirname(__file__)  # noqa: PTH120
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([folder, *sys.path])}
    subprocess.run([sys.executable, "-c", NEVER_CLOSES], env=environment, timeout=60, check=True)


def test_a_forked_child_does_not_disturb_the_link(made: list[SocketTransport]) -> None:
    """Data loaders fork workers while links are open."""
    pair = connect(open_transport(made), open_transport(made))
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(SECONDS)
    assert child.exitcode == 0
    assert_works(pair)


# Full buffers, and messages that cannot be sent


def test_send_does_not_wait_for_a_peer_that_does_not_read(made: list[SocketTransport]) -> None:
    go_on = threading.Event()
    slow = Inbox(reply=lambda link, message: go_on.wait(SECONDS))
    pair = connect(open_transport(made), open_transport(made), far_inbox=slow)
    tensor = torch.randn(4_000_000)
    for index in range(4):
        pair.near.send(Message(Forward("run", MicrobatchId(0, index), 1), {"x": tensor}))
    assert not pair.near.wait_written(0), "64 MB fit into no buffer"
    go_on.set()
    for _ in range(4):
        assert torch.equal(torch.as_tensor(pair.far_inbox.next().values["x"]), tensor)


def test_a_message_that_cannot_be_sent_is_reported_by_another_thread(
    made: list[SocketTransport],
) -> None:
    """The caller of ``send`` may hold a lock that the handler needs."""
    lost_in: SimpleQueue[int] = SimpleQueue()

    class Handler(Inbox):
        def on_lost(self, link: Link, reason: str) -> None:
            lost_in.put(threading.get_ident())
            super().on_lost(link, reason)

    handler = Handler()
    pair = connect(open_transport(made), open_transport(made), near_inbox=handler)
    assert_works(pair)
    pair.near.send(Message(SaveStage("run"), {"x": torch.zeros(3).to_sparse()}))
    assert "cannot be sent" in handler.loss()
    assert lost_in.get(timeout=SECONDS) != threading.get_ident()
    assert pair.far_inbox.loss()


def test_a_forked_child_does_not_keep_connections_open(made: list[SocketTransport]) -> None:
    """Workers of data loaders may outlive a process that was killed."""
    pair = connect(open_transport(made), open_transport(made))
    own = [each.fileno() for each in CLOSED_IN_CHILDREN]
    assert len([each for each in own if each >= 0]) >= 3, "a listener and two ends"
    child = os.fork()
    if not child:
        os._exit(sum(each.fileno() >= 0 for each in CLOSED_IN_CHILDREN))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert_works(pair)
