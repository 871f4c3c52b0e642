"""Pairs of linked nodes over each transport."""

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from queue import SimpleQueue
from typing import Any

import pytest

from ravnest.transport.base import Link, Transport
from ravnest.transport.certificates import Authority, certificate_name
from ravnest.transport.memory import MemoryNetwork
from ravnest.transport.socket_transport import SocketTransport
from ravnest.transport.tls import Credentials
from ravnest.types import Address
from ravnest.wire.messages import PROTOCOL, Hello, HelloRefused, Message

SECONDS = 20.0
"""Maximum wait in a test; successful waits are far shorter."""
LOOPBACK = Address("127.0.0.1", 0)
EVERYWHERE = Address("0.0.0.0", 0)

Opener = Callable[[], Transport]


def hello(node: int, codec: str = "raw") -> Hello:
    return Hello(PROTOCOL, "plan", node, 0, node, codec=codec)


@dataclass
class Inbox:
    """Handler that keeps messages and losses."""

    messages: SimpleQueue[Message] = field(default_factory=SimpleQueue)
    lost: SimpleQueue[str] = field(default_factory=SimpleQueue)
    reply: Callable[[Link, Message], None] | None = None

    def on_message(self, link: Link, message: Message) -> None:
        if self.reply is not None:
            self.reply(link, message)
        self.messages.put(message)

    def on_lost(self, link: Link, reason: str) -> None:
        self.lost.put(reason)

    def next(self) -> Message:
        return self.messages.get(timeout=SECONDS)

    def loss(self) -> str:
        return self.lost.get(timeout=SECONDS)


@dataclass
class Pair:
    """Two linked nodes; node_0 has dialled node_1."""

    near: Link
    far: Link
    near_inbox: Inbox
    far_inbox: Inbox
    near_transport: Transport
    far_transport: Transport
    address: Address


class Encrypted(SocketTransport):
    """Transport that treats addresses of this machine as those of others: with TLS."""

    def __init__(self, authority: Authority) -> None:
        super().__init__(_issued(authority, 1))
        self._authority = authority

    def serve(self, address: Address, *args: Any, **settings: Any) -> Address:
        return super().serve(replace(address, host=EVERYWHERE.host), *args, **settings)

    def dial(self, address: Address, hello: Hello, *args: Any, **settings: Any) -> Link:
        self._credentials = _issued(self._authority, hello.node, hello.generation)
        return super().dial(replace(address, host=EVERYWHERE.host), hello, *args, **settings)


@pytest.fixture(params=["memory", "socket", "tls"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def transport(kind: str, network: MemoryNetwork, authority: Authority) -> Iterator[Opener]:
    """Factory of transports, which are closed at the end."""
    made: list[Transport] = []

    def make() -> Transport:
        match kind:
            case "memory":
                made.append(network.transport())
            case "socket":
                made.append(SocketTransport())  # loopback: without TLS
            case _:
                made.append(Encrypted(authority))
        return made[-1]

    yield make
    for each in made:
        each.close()


def connect(
    near: Transport,
    far: Transport,
    near_inbox: Inbox | None = None,
    far_inbox: Inbox | None = None,
    address: Address = LOOPBACK,
    expect: int | None = None,
    codecs: tuple[str, str] = ("raw", "raw"),
) -> Pair:
    near_inbox, far_inbox = near_inbox or Inbox(), far_inbox or Inbox()
    links: SimpleQueue[Link] = SimpleQueue()
    bound = far.serve(address, lambda peer: hello(1, codecs[1]), far_inbox, links.put)
    link = near.dial(bound, hello(0, codecs[0]), near_inbox, deadline=SECONDS, expect=expect)
    return Pair(link, links.get(timeout=SECONDS), near_inbox, far_inbox, near, far, bound)


@pytest.fixture
def pair(transport: Opener) -> Pair:
    return connect(transport(), transport())


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority("plan", datetime.datetime.now(datetime.UTC))


def credentials(
    authority: Authority, node: int, host: str = "0.0.0.0", generation: int = 0
) -> Credentials:
    identity = authority.issue(certificate_name(node, generation), [host])
    return Credentials(authority.certificate, identity.certificate, identity.key)


@cache
def _issued(authority: Authority, node: int, generation: int = 0) -> Credentials:
    return credentials(authority, node, generation=generation)


def refuse(peer: Hello) -> Hello | HelloRefused:
    return HelloRefused(f"plan {peer.plan!r} is not mine")
