"""Connections without TLS: both sides prove the secret of their job, and nobody else gets in."""

import secrets
import socket
from collections.abc import Iterator
from queue import Empty

import pytest
from msgspec import structs
from transport_nodes import LOOPBACK, SECONDS, Inbox, connect, hello

from ravnest.errors import RefusedError
from ravnest.transport.handshake import DialHandshake, Greeting, ListenHandshake, hello_frame
from ravnest.transport.link_secret import new_secret
from ravnest.transport.socket_transport import SocketTransport
from ravnest.types import Address
from ravnest.wire.envelope import split
from ravnest.wire.frames import encode
from ravnest.wire.messages import Goodbye, Hello, HelloChallenge, HelloProof, HelloRefused, Message

SECRET, OTHER = new_secret(), new_secret()


@pytest.fixture
def made() -> Iterator[list[SocketTransport]]:
    transports: list[SocketTransport] = []
    yield transports
    for each in transports:
        each.close()


def opened(made: list[SocketTransport], secret: str) -> SocketTransport:
    made.append(SocketTransport(secret=secret))
    return made[-1]


def serving(made: list[SocketTransport], secret: str) -> tuple[Address, Inbox, list[str]]:
    """Start node_1; return its address, its messages, and who was admitted."""
    inbox, admitted = Inbox(), []  # type: ignore[var-annotated]

    def admit(peer: Hello) -> Hello:
        admitted.append(peer.node)
        return hello(1)

    address = opened(made, secret).serve(LOOPBACK, admit, inbox, lambda _: None)
    return address, inbox, admitted


def test_nodes_with_the_same_secret_connect_and_connect_again(made: list[SocketTransport]) -> None:
    pair = connect(opened(made, SECRET), opened(made, SECRET), expect=1)
    pair.near.send(Message(Goodbye(0)))
    assert pair.far_inbox.next().head == Goodbye(0)
    assert (pair.far.peer.nonce, pair.near.peer.proof) == ("", "")


@pytest.mark.parametrize("secret", ["", OTHER], ids=["none", "another"])
def test_a_process_without_the_secret_is_refused(made: list[SocketTransport], secret: str) -> None:
    """On loopback, a process of another user joined a job as any node that it named."""
    address, inbox, admitted = serving(made, SECRET)
    with pytest.raises(RefusedError, match="secret"):
        opened(made, secret).dial(address, hello(0), Inbox(), deadline=SECONDS, expect=1)
    assert admitted == []
    with pytest.raises(Empty):
        inbox.messages.get_nowait()


@pytest.mark.parametrize("secret", ["", OTHER], ids=["none", "another"])
def test_a_listener_without_the_secret_gets_nothing(made: list[SocketTransport], secret: str) -> None:
    """A process of another user listened at the port of a node that had not started yet."""
    address, inbox, _ = serving(made, secret)
    with pytest.raises(RefusedError, match="secret"):
        opened(made, SECRET).dial(address, hello(0), Inbox(), deadline=SECONDS, expect=1)
    with pytest.raises(Empty):
        inbox.messages.get_nowait()


def test_messages_before_the_proof_are_not_obeyed(made: list[SocketTransport]) -> None:
    address, inbox, admitted = serving(made, SECRET)
    first = hello_frame(structs.replace(hello(0), nonce=secrets.token_hex(8)))
    (goodbye,) = encode(Message(Goodbye(0)))
    with socket.create_connection((address.host, address.port), SECONDS) as client:
        client.sendall(first + goodbye + goodbye)
        client.shutdown(socket.SHUT_WR)
        answers = list(split(b"".join(iter(lambda: client.recv(1000), b""))))
    assert len(answers) == 2, "a challenge, and the refusal"
    assert b"do not know the secret" in bytes(answers[1])
    assert admitted == []
    with pytest.raises(Empty):
        inbox.messages.get_nowait()


def listener(secret: str = SECRET) -> ListenHandshake:
    return ListenHandshake(lambda _: hello(1), lambda _: None, None, secret)


def dialer(secret: str = SECRET, expect: int = 1) -> DialHandshake:
    return DialHandshake(hello(0), secret, "there", expect)


def test_the_secret_is_not_sent() -> None:
    dial, listen = dialer(), listener()
    challenge = listen.next(dial.first)
    assert isinstance(challenge, HelloChallenge)
    proof = dial.next(hello_frame(challenge))
    assert isinstance(proof, HelloProof)
    greeting = listen.next(hello_frame(proof))
    assert isinstance(greeting, Greeting)
    assert isinstance(dial.next(greeting.frame), Hello)
    sent = b"".join((dial.first, hello_frame(challenge), hello_frame(proof), greeting.frame))
    assert SECRET.encode() not in sent
    assert bytes.fromhex(SECRET) not in sent


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    dial, listen = dialer(), listener()
    challenge = listen.next(dial.first)
    assert isinstance(challenge, HelloChallenge)
    proof = dial.next(hello_frame(challenge))
    assert isinstance(proof, HelloProof)
    again = listener()
    assert isinstance(again.next(dial.first), HelloChallenge)
    assert isinstance(again.next(hello_frame(proof)), HelloRefused)
    greeting = listen.next(hello_frame(proof))
    assert isinstance(greeting, Greeting)
    other = dialer()
    assert isinstance(other.next(hello_frame(challenge)), HelloProof)
    with pytest.raises(RefusedError, match="does not know the secret"):
        other.next(greeting.frame)


def test_a_proof_cannot_be_sent_back_to_the_one_who_made_it() -> None:
    """The listener has the dialer prove its own challenge, and returns the proof."""
    dial = dialer()
    mirrored = dial.next(hello_frame(HelloChallenge("mirror")))
    assert isinstance(mirrored, HelloProof)
    with pytest.raises(RefusedError, match="does not know the secret"):
        dial.next(hello_frame(structs.replace(hello(1), proof=mirrored.proof)))


def test_a_proof_is_for_one_hello() -> None:
    """A process between two nodes changes the Hello, for example the node."""
    dial, listen = dialer(), listener()
    changed = hello_frame(structs.replace(hello(7), nonce="n"))
    challenge = listen.next(changed)
    assert isinstance(challenge, HelloChallenge)
    proof = dial.next(hello_frame(challenge))
    assert isinstance(proof, HelloProof)
    assert isinstance(listen.next(hello_frame(proof)), HelloRefused)


def test_one_peer_cannot_take_all_links(made: list[SocketTransport]) -> None:
    address, inbox, _ = serving(made, SECRET)
    attacker = opened(made, SECRET)
    for _ in range(50):
        newest = attacker.dial(address, hello(0), Inbox(), deadline=SECONDS, expect=1)
    assert [inbox.loss() for _ in range(49)] == ["node_0 has opened another link"] * 49
    newest.send(Message(Goodbye(0)))
    assert inbox.next().head == Goodbye(0), "the newest link is open, and no other"
    other = opened(made, SECRET).dial(address, hello(2), Inbox(), deadline=SECONDS, expect=1)
    assert other.peer.node == 1, "others still connect"
