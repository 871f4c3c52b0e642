"""Sockets for relays: listening on both families, and dialling several addresses in parallel."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Sequence

from ravnest.deadlines import LINK_OUTAGE
from ravnest.errors import AddressInUseError, TransportError
from ravnest.host import tune_tcp
from ravnest.types import Address

SocketAddress = tuple[socket.AddressFamily, tuple[object, ...]]
"""Family and address as the socket module has them."""

_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104 - compared with, not listened at
_BACKLOG = 512


def listen(address: Address) -> socket.socket:
    """Return a listening non-blocking socket; a wildcard host listens at IPv4 and IPv6 where possible.

    ``AddressInUseError`` if the address is taken, ``TransportError`` if this machine does not have it.
    """
    try:
        if address.host in _WILDCARDS and socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # IPv6 is disabled, or the next try says why not
                return _listening(socket.AF_INET6, ("::", address.port), dual=True)
        host = "0.0.0.0" if address.host in _WILDCARDS else address.host  # noqa: S104 - the user asked
        found = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)
        family, _, _, _, where = found[0]
        return _listening(family, where, dual=False)
    except OSError as error:
        if isinstance(error, socket.gaierror):
            raise TransportError(f"cannot listen at {address}: {error}") from error
        raise AddressInUseError(f"cannot listen at {address}: {error}; choose another port") from error


def _listening(
    family: socket.AddressFamily | int, where: tuple[object, ...], *, dual: bool
) -> socket.socket:
    listener = socket.create_server(
        where[:2],
        family=family,
        backlog=_BACKLOG,
        dualstack_ipv6=dual,
    )
    listener.setblocking(False)
    return listener


def network_of(host: str) -> str:
    """Return the IPv4 address or IPv6 /64 network of a peer, whose owner is limited as one."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def resolve(addresses: Sequence[Address], timeout: float) -> list[SocketAddress]:
    """Return the socket addresses of all addresses in order; names that are not found are left out.

    IP addresses take no time; names are looked up in parallel, for at most ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    found: list[list[SocketAddress]] = [[] for _ in addresses]
    answers: queue.SimpleQueue[tuple[int, list[SocketAddress]]] = queue.SimpleQueue()
    asked = 0
    for number, address in enumerate(addresses):
        if _is_ip(address.host):
            found[number] = _look_up(address)
            continue
        asked += 1
        threading.Thread(
            target=lambda number=number, address=address: answers.put((number, _look_up(address))),
            name=f"look up {address.host}",
            daemon=True,
        ).start()
    with contextlib.suppress(queue.Empty):
        for _ in range(asked):
            number, places = answers.get(timeout=max(deadline - time.monotonic(), 0))
            found[number] = places
    return list(dict.fromkeys(place for places in found for place in places))


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _look_up(address: Address) -> list[SocketAddress]:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(family, where) for family, _, _, _, where in found]


def begin_connect(place: SocketAddress) -> socket.socket:
    """Return a non-blocking socket that connects; it is writable once it has, or has failed.

    ``OSError`` if it fails at once.
    """
    family, where = place
    connecting = socket.socket(family, socket.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        tune_tcp(connecting, LINK_OUTAGE)
        number = connecting.connect_ex(where)
        if number not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):  # no route, for example
            raise OSError(number, os.strerror(number))
    except OSError:
        connecting.close()
        raise
    return connecting


def connect_error(connecting: socket.socket) -> int:
    """Return 0 if a socket that became writable is connected."""
    return connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def dial_first(addresses: Sequence[Address], timeout: float) -> socket.socket | None:
    """Return a non-blocking connection to the address that answers first, ``None`` if none does."""
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        connecting: set[socket.socket] = set()
        try:
            for place in resolve(addresses, timeout):
                with contextlib.suppress(OSError):  # a family that this machine does not have
                    started = begin_connect(place)
                    connecting.add(started)
                    selector.register(started, selectors.EVENT_WRITE)
            while connecting and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    selector.unregister(ready)
                    connecting.discard(ready)
                    if not connect_error(ready):
                        return ready
                    ready.close()
        finally:
            for pending in connecting:
                pending.close()
    return None
