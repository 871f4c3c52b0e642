"""Fixtures of the averaging tests."""

from collections.abc import Callable, Iterator

import pytest

from ravnest.transport.base import Transport
from ravnest.transport.memory import MemoryNetwork, MemoryTransport
from ravnest.transport.socket_transport import SocketTransport


class Closing(MemoryNetwork):
    """A network that closes its transports, so that no thread outlives its test.

    A cut connection is a lost link.
    """

    def __init__(self) -> None:
        super().__init__(outage=0)
        self._made: list[MemoryTransport] = []

    def transport(self) -> MemoryTransport:
        self._made.append(super().transport())
        return self._made[-1]

    def close(self) -> None:
        for each in self._made:
            each.close()


@pytest.fixture
def network() -> Iterator[MemoryNetwork]:
    made = Closing()
    yield made
    made.close()


@pytest.fixture(params=["memory", "socket"])
def opener(request: pytest.FixtureRequest, network: MemoryNetwork) -> Iterator[Callable[[], Transport]]:
    """Return a function that makes transports; they are closed after the test."""
    made: list[Transport] = []

    def make() -> Transport:
        made.append(network.transport() if request.param == "memory" else SocketTransport())
        return made[-1]

    yield make
    for each in made:
        each.close()
