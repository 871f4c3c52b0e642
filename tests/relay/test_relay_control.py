"""Control connection of a node against a relay that the test plays, in virtual time."""

import contextlib
import socket
from collections.abc import Iterator

import pytest
from relay_keys import access
from test_relay_splicing import Bench, receive, tcp_pair

from ravnest.deadlines import RELAY_ANSWER, RELAY_PING, RELAY_SILENCE
from ravnest.relay.control import ControlConnection
from ravnest.relay.heads import HeadReader, RelayMethod, RequestHead, answer, parse_request
from ravnest.relay.pipes import BufferPipe

ACCESS = access(1, (0,))


class Registration(Bench):
    """A control connection, and the relay's end of it."""

    def __init__(self) -> None:
        super().__init__(BufferPipe)
        self.relay, connection = tcp_pair()
        connection.setblocking(False)
        self.registered = 0
        self.incoming: list[str] = []
        self.ends: list[str] = []
        self.control = ControlConnection(
            self.loop, connection, ACCESS, self._on_registered, self.incoming.append, self.ends.append
        )
        self.run(self.control.begin)

    def _on_registered(self) -> None:
        self.registered += 1

    def says(self, data: bytes) -> None:
        """Send from the relay's side."""
        self.relay.sendall(data)

    def ended(self) -> str:
        """Wait for the end of the connection and return the reason."""
        with contextlib.suppress(ConnectionError):
            while self.relay.recv(4096):
                pass
        self.run(lambda: None)
        (reason,) = self.ends
        return reason

    def register(self) -> None:
        self._read_head()
        self.says(answer(200, "Registered", stays=True) + b"PING\n")
        self.pong()

    def pong(self) -> None:
        assert receive(self.relay, 5) == b"PONG\n"

    def _read_head(self) -> None:
        reader = HeadReader()
        found = None
        while found is None:
            found = reader.feed(self.relay.recv(1))
        head = parse_request(found[0])
        assert head == RequestHead(RelayMethod.REGISTER, "node-1.job-a", ACCESS.ticket)

    def close(self) -> None:
        self.run(lambda: self.control.end("closed"))
        self.relay.close()
        super().close()


@pytest.fixture
def node() -> Iterator[Registration]:
    opened = Registration()
    yield opened
    opened.close()


def test_a_node_registers_and_answers_pings(node: Registration) -> None:
    node.register()
    assert node.registered == 1
    for _ in range(10):
        node.pass_time(RELAY_PING)
        node.says(b"PING\n")
        node.pong()
    node.says(b"INCOMING a1\nINCOMING b2\nPING\n")
    node.pong()
    assert node.incoming == ["a1", "b2"]
    assert not node.ends


def test_a_silent_relay_is_given_up(node: Registration) -> None:
    node.register()
    node.pass_time(RELAY_SILENCE - 1)
    assert not node.ends
    node.pass_time(RELAY_SILENCE)
    assert node.ended() == "the relay is silent"


def test_a_relay_that_does_not_answer_is_given_up(node: Registration) -> None:
    node.pass_time(RELAY_ANSWER)
    assert node.ended() == "the relay is silent"
    assert node.registered == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (answer(403, "the ticket has expired", stays=False), "refused: 403 the ticket has expired"),
        (b"SSH-2.0\r\n\r\n", "not that of a relay"),
        (b"x" * 30_000, "more than"),
        (answer(200, "ok", stays=True) + b"EXEC ls\n", "not known"),
        (answer(200, "ok", stays=True) + b"INCOMING \n", "not known"),
        (answer(200, "ok", stays=True) + b"x" * 300, "more than"),
        (answer(200, "ok", stays=True) + b"\xff\n", "not ASCII"),
    ],
)
def test_a_hostile_relay_is_left(node: Registration, data: bytes, reason: str) -> None:
    node.says(data)
    assert reason in node.ended()


def test_a_relay_that_leaves_is_noticed(node: Registration) -> None:
    node.register()
    node.relay.shutdown(socket.SHUT_WR)
    assert node.ended() == "the relay closed the connection"
