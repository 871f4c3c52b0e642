"""Fixtures of the averaging tests."""

from collections.abc import Callable, Iterator

import pytest

from ravnest.transport.base import Transport
from ravnest.transport.grpc_transport import GrpcTransport
from ravnest.transport.memory import MemoryNetwork


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture(params=["memory", "grpc"])
def opener(request: pytest.FixtureRequest, network: MemoryNetwork) -> Iterator[Callable[[], Transport]]:
    """Makes transports, and closes them."""
    made: list[Transport] = []

    def make() -> Transport:
        made.append(network.transport() if request.param == "memory" else GrpcTransport())
        return made[-1]

    yield make
    for each in made:
        each.close()
