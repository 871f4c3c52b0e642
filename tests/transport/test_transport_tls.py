"""Connections with TLS: certificates, and clients that do not follow the protocol."""

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from msgspec import structs
from transport_nodes import EVERYWHERE, LOOPBACK, SECONDS, Inbox, Pair, connect, credentials, hello

from ravnest.errors import RefusedError, TransportError, UnreachableError
from ravnest.transport import socket_server
from ravnest.transport.certificates import Authority
from ravnest.transport.frame_socket import FrameSocket
from ravnest.transport.handshake import hello_frame
from ravnest.transport.socket_transport import SocketTransport
from ravnest.transport.tls import Credentials, dial_address, dialling_context, is_loopback
from ravnest.types import Address, MicrobatchId
from ravnest.wire.frames import encode
from ravnest.wire.messages import Forward, Goodbye, Hello, HelloRefused, Message


@pytest.fixture
def made() -> Iterator[list[SocketTransport]]:
    transports: list[SocketTransport] = []
    yield transports
    for transport in transports:
        transport.close()


def open_transport(made: list[SocketTransport], identity: Credentials | None = None) -> SocketTransport:
    made.append(SocketTransport(identity))
    return made[-1]


def message(index: int = 0, count: int = 10) -> Message:
    return Message(Forward("run", MicrobatchId(0, index), 1), {"x": torch.randn(count)})


def assert_works(pair: Pair) -> None:
    pair.near.send(message(1, 300_000))
    pair.far.send(message(2))
    assert isinstance(pair.far_inbox.next().head, Forward)
    assert isinstance(pair.near_inbox.next().head, Forward)


# TLS


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("192.168.1.5", False),
        ("gpu.example.org", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
    ],
)
def test_only_loopback_is_unencrypted(host: str, loopback: bool) -> None:
    assert is_loopback(Address(host, 1)) is loopback


def test_a_wildcard_address_is_dialled_by_loopback() -> None:
    assert dial_address(Address("0.0.0.0", 5)) == Address("127.0.0.1", 5)
    assert dial_address(Address("::", 5)) == Address("127.0.0.1", 5)
    assert dial_address(Address("10.0.0.1", 5)) == Address("10.0.0.1", 5)


@pytest.mark.parametrize("expect", [None, 1])
def test_nodes_of_a_plan_talk_over_tls(
    made: list[SocketTransport], authority: Authority, expect: int | None
) -> None:
    near = open_transport(made, credentials(authority, 0))
    far = open_transport(made, credentials(authority, 1))
    assert_works(connect(near, far, address=EVERYWHERE, expect=expect))


def test_without_certificates_only_loopback_is_possible(made: list[SocketTransport]) -> None:
    transport = open_transport(made)
    with pytest.raises(TransportError, match="needs certificates"):
        transport.serve(EVERYWHERE, lambda peer: hello(1), Inbox(), lambda link: None)
    with pytest.raises(TransportError, match="needs certificates"):
        transport.dial(Address("10.0.0.1", 80), hello(0), Inbox(), deadline=1)


def test_a_public_address_needs_certificates_even_if_the_node_listens_at_loopback(
    made: list[SocketTransport], authority: Authority
) -> None:
    public = Address("192.0.2.1", 8080)
    with pytest.raises(TransportError, match="needs certificates"):
        open_transport(made).serve(
            LOOPBACK, lambda peer: hello(1), Inbox(), lambda link: None, known_as=public
        )
    far, inbox = open_transport(made, credentials(authority, 1)), Inbox()
    port = far.serve(LOOPBACK, lambda peer: hello(1), inbox, lambda link: None, known_as=public).port
    own = open_transport(made, credentials(authority, 0))
    own.dial(replace(EVERYWHERE, port=port), hello(0), Inbox(), deadline=SECONDS).send(message())
    inbox.next()


@pytest.fixture
def guarded(made: list[SocketTransport], authority: Authority) -> Iterator[tuple[Address, Inbox]]:
    """node_1 with TLS; at the end it must still accept nodes of its plan."""
    far, inbox = open_transport(made, credentials(authority, 1)), Inbox()
    address = far.serve(EVERYWHERE, lambda peer: hello(1), inbox, lambda link: None)
    yield address, inbox
    assert inbox.messages.empty()
    own = open_transport(made, credentials(authority, 0))
    own.dial(address, hello(0), Inbox(), deadline=SECONDS, expect=1).send(message())
    inbox.next()


def test_a_certificate_of_another_authority_is_refused(
    made: list[SocketTransport], guarded: tuple[Address, Inbox], authority: Authority
) -> None:
    foreign = credentials(Authority("plan", authority._now), 0)
    pretender = replace(
        foreign, authority=authority.certificate
    )  # trusts the plan's authority, but is not signed by it
    for identity, error in [(foreign, RefusedError), (pretender, UnreachableError)]:
        with pytest.raises(error):
            open_transport(made, identity).dial(guarded[0], hello(0), Inbox(), deadline=0.5)


def test_no_certificate_is_refused(guarded: tuple[Address, Inbox], authority: Authority) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=authority.certificate.decode())
    with closing(opened(guarded[0], context)) as stream:
        stream.send_frame(hello_frame(hello(0)))
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            stream.read(1000)


def test_older_versions_of_tls_are_refused(guarded: tuple[Address, Inbox], authority: Authority) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=authority.certificate.decode())
    with pytest.raises(ssl.SSLError):
        opened(guarded[0], context)


def test_plaintext_is_refused(made: list[SocketTransport], guarded: tuple[Address, Inbox]) -> None:
    with pytest.raises(UnreachableError):
        open_transport(made).dial(dial_address(guarded[0]), hello(0), Inbox(), deadline=0.5)


def test_a_client_cannot_claim_to_be_another_node(
    made: list[SocketTransport], guarded: tuple[Address, Inbox], authority: Authority
) -> None:
    two = open_transport(made, credentials(authority, 2))
    with pytest.raises(
        RefusedError, match=r"claim to be node_0, but your certificate belongs to node_2"
    ):
        two.dial(guarded[0], hello(0), Inbox(), deadline=SECONDS)


def test_a_server_cannot_claim_to_be_another_node(
    made: list[SocketTransport], authority: Authority
) -> None:
    impostor = open_transport(made, credentials(authority, 2))
    address = impostor.serve(EVERYWHERE, lambda peer: hello(1), Inbox(), lambda link: None)
    caller = open_transport(made, credentials(authority, 0))
    with pytest.raises(RefusedError, match="no certificate of node_1 of this plan"):
        caller.dial(address, hello(0), Inbox(), deadline=SECONDS, expect=1)


@pytest.mark.parametrize(("certified", "claimed"), [(0, 1_000_000), (1, 2), (1, 0)])
def test_a_machine_cannot_claim_another_generation(
    made: list[SocketTransport], authority: Authority, certified: int, claimed: int
) -> None:
    """A revoked machine called itself the millionth one, and the one that took its place was refused."""
    machine = open_transport(made, credentials(authority, 1, generation=certified))
    other = open_transport(made, credentials(authority, 0))
    admitted: list[Hello] = []
    lie = structs.replace(hello(1), generation=claimed)

    def admit(peer: Hello) -> Hello:
        admitted.append(peer)
        return hello(0)

    address = other.serve(EVERYWHERE, admit, Inbox(), lambda link: None)
    with pytest.raises(RefusedError, match=r"claim to be node_1.*certificate belongs to node_1"):
        machine.dial(address, lie, Inbox(), deadline=SECONDS)
    assert admitted == []
    address = machine.serve(EVERYWHERE, lambda peer: lie, Inbox(), lambda link: None)
    with pytest.raises(RefusedError, match="claims to be node_1"):
        other.dial(address, hello(0), Inbox(), deadline=SECONDS, expect=1)


def test_the_machine_that_takes_a_place_has_a_certificate_of_its_generation(
    made: list[SocketTransport], authority: Authority
) -> None:
    second = open_transport(made, credentials(authority, 1, generation=2))
    other = open_transport(made, credentials(authority, 0))
    own = structs.replace(hello(1), generation=2)
    address = second.serve(EVERYWHERE, lambda peer: own, Inbox(), lambda link: None)
    link = other.dial(address, hello(0), Inbox(), deadline=SECONDS, expect=1)
    assert link.peer.generation == 2


def test_a_tls_client_cannot_use_an_unencrypted_port(
    made: list[SocketTransport], authority: Authority
) -> None:
    far = open_transport(made)
    port = far.serve(LOOPBACK, lambda peer: hello(1), Inbox(), lambda link: None).port
    caller = open_transport(made, credentials(authority, 0))
    with pytest.raises(UnreachableError):
        caller.dial(Address("0.0.0.0", port), hello(0), Inbox(), deadline=0.5)


# Clients that do not follow the protocol


def opened(address: Address, context: ssl.SSLContext) -> FrameSocket:
    target = dial_address(address)
    stream = FrameSocket(socket.create_connection((target.host, target.port), SECONDS))
    stream.secure(context, time.monotonic() + SECONDS, listens=False)
    return stream


def raw_stream(address: Address, authority: Authority, *frames: bytes) -> FrameSocket:
    stream = opened(address, dialling_context(credentials(authority, 5)))
    for frame in frames:
        stream.send_frame(frame)
    return stream


def answer(stream: FrameSocket) -> bytes:
    """Return everything that the listener sends before it ends the connection."""
    found = b""
    while (frames := stream.read(1 << 20)) is not None:
        found += bytes(frames)
    return found


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "not a Ravnest frame"),
        (hello_frame(hello(0))[:-1] + b"?", "checksum"),
        (next(iter(encode(Message(Goodbye(0))))), "begins with a Hello, not with Goodbye"),
        (next(iter(encode(message()))), "exceed the limit"),
    ],
)
def test_a_first_frame_other_than_hello_is_refused(
    guarded: tuple[Address, Inbox], authority: Authority, first: bytes, reason: str
) -> None:
    with closing(raw_stream(guarded[0], authority, first)) as stream:
        stream.end_writing()
        found = answer(stream)
    assert reason.encode() in found
    assert b"Refused" in found


def test_a_client_without_a_hello_is_refused(
    guarded: tuple[Address, Inbox], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_server, "LINK_HELLO", 0.5)
    with closing(raw_stream(guarded[0], authority)) as stream:
        assert b"no Hello arrived" in answer(stream)
    monkeypatch.undo()


def test_a_client_that_begins_no_handshake_is_hung_up(
    guarded: tuple[Address, Inbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_server, "LINK_HELLO", 0.1)
    target = dial_address(guarded[0])
    with socket.create_connection((target.host, target.port), SECONDS) as client:
        assert client.recv(1) == b""
    monkeypatch.undo()


def test_invalid_data_loses_the_link_with_the_reason(
    guarded: tuple[Address, Inbox], authority: Authority
) -> None:
    address, inbox = guarded
    for garbage, reason in [
        (bytes(1000), "node_5 sent an invalid frame: the data is not a Ravnest frame"),
        (next(iter(encode(message())))[:-3] + b"abc", "checksum"),
    ]:
        with closing(raw_stream(address, authority, hello_frame(hello(5)), garbage)):
            assert reason in inbox.loss()


def test_damaged_records_lose_the_connection_but_not_the_listener(
    guarded: tuple[Address, Inbox], authority: Authority
) -> None:
    with closing(raw_stream(guarded[0], authority)) as stream:
        sealed = b"".join(stream.sealed([hello_frame(hello(5))]))
        stream.send([sealed[:-1] + bytes([sealed[-1] ^ 1])], wait=True)
        assert answer(stream) == b""


def test_an_address_of_another_machine_cannot_be_served(
    made: list[SocketTransport], authority: Authority
) -> None:
    transport = open_transport(made, credentials(authority, 1))
    with pytest.raises(TransportError, match=r"cannot listen at 192\.0\.2\.1:8080"):
        transport.serve(Address("192.0.2.1", 8080), lambda peer: hello(1), Inbox(), lambda link: None)


def test_a_name_that_does_not_resolve(made: list[SocketTransport], authority: Authority) -> None:
    transport = open_transport(made, credentials(authority, 0))
    with pytest.raises(UnreachableError, match=r"no-such-host\.invalid:80 in 0.5 s"):
        transport.dial(Address("no-such-host.invalid", 80), hello(0), Inbox(), deadline=0.5)


def test_refusals_are_small() -> None:
    assert len(hello_frame(HelloRefused("x" * 1000))) < 1200
