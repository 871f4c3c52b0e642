"""The proxy that disturbs links of real processes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from link_proxy import LinkProxy
from workloads import free_ports

SECONDS = 20.0
SENT = bytes(8)


@pytest.fixture
def ends() -> Iterator[tuple[LinkProxy, socket.socket, socket.socket]]:
    """Return a proxy, a connection through it, and that connection at the listener."""
    ports = free_ports(2)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", ports[1])))
        proxy = stack.enter_context(LinkProxy(*ports))
        near = stack.enter_context(socket.create_connection(("127.0.0.1", ports[0])))
        far = stack.enter_context(listener.accept()[0])
        for each in (near, far):
            each.settimeout(SECONDS)
        yield proxy, near, far


def test_one_bit_is_changed_in_one_direction(
    ends: tuple[LinkProxy, socket.socket, socket.socket],
) -> None:
    proxy, near, far = ends
    proxy.corrupt(inward=True)
    far.sendall(SENT)
    assert near.recv(100) == SENT
    near.sendall(SENT)
    wrong = far.recv(100)
    assert sum((one ^ other).bit_count() for one, other in zip(SENT, wrong, strict=True)) == 1
    near.sendall(SENT)
    assert far.recv(100) == SENT


def test_what_is_late_keeps_its_order(ends: tuple[LinkProxy, socket.socket, socket.socket]) -> None:
    proxy, near, far = ends
    proxy.delay(SECONDS / 100, inward=False)
    far.sendall(b"first")
    proxy.delay(0.0, inward=False)
    far.sendall(b"second")
    far.shutdown(socket.SHUT_WR)
    found = b""
    while data := near.recv(100):
        found += data
    assert found == b"firstsecond"
