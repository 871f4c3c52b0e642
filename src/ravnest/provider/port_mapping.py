"""Port of this machine at its router: mapped while a provider is a member of a server."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from ravnest.deadlines import PORT_ANSWER, PORT_LEASE, PORT_RENEWAL
from ravnest.types import Address

CONFLICT = 718
"""UPnP's error code for a port that the router has given to another machine."""
ONLY_PERMANENT = 725
"""UPnP's error code of a router that supports no leases that end."""
_PORT_TRIES = 10
_PERMANENT = 0.0
_SHARED = ipaddress.ip_network("100.64.0.0/10")
"""Addresses that internet providers give to routers behind a NAT of their own."""
_PRIVATE = tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))


class GatewayError(Exception):
    """A router that was not found, or refused a request."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.code = code


class Gateway(Protocol):
    """Router that maps ports; all methods raise ``GatewayError``."""

    def external_host(self) -> str:
        """Return the router's public address."""

    def add(self, external_port: int, internal: Address, lease: float) -> None:
        """Forward a port to ``internal`` for ``lease`` seconds (0: for ever), or renew that."""

    def remove(self, external_port: int) -> None:
        """Forward the port no longer."""


@dataclass(frozen=True)
class PortMapping:
    """Answer to the request for a port at the router."""

    address: Address | None
    """Public address that leads to this machine; ``None`` if there is none."""
    reason: str
    """Explanation for the owner."""


@contextmanager
def mapped_port(
    internal: Address,
    say: Callable[[str], None],
    find: Callable[[Address], Gateway] | None = None,
) -> Iterator[PortMapping]:
    """Map a port of the router to ``internal`` while the block runs; failures are told, not raised.

    ``find`` returns the router of the network in which ``internal`` is; UPnP by default. ``say`` is
    called with a line if the mapping is lost later.
    """
    try:
        gateway = (find or _find_with_upnp)(internal)
        lease = _add(gateway, internal)
        mapping = _describe(gateway, lease)
    except GatewayError as error:
        yield PortMapping(None, f"the router maps no port: {error}")
        return
    ended = threading.Event()
    renewal = threading.Thread(
        target=_renew, args=(gateway, internal, lease, ended, say), name="ravnest-port", daemon=True
    )
    renewal.start()
    try:
        yield mapping
    finally:
        ended.set()
        renewal.join(2 * PORT_ANSWER)
        with suppress(GatewayError):  # the lease ends by itself
            gateway.remove(lease.port)


@dataclass(frozen=True)
class _Lease:
    port: int
    seconds: float


def _add(gateway: Gateway, internal: Address) -> _Lease:
    """Map the same port if it is free, else one of the next."""
    seconds = PORT_LEASE
    for port in range(internal.port, min(internal.port + _PORT_TRIES, 65_536)):
        try:
            try:
                gateway.add(port, internal, seconds)
            except GatewayError as error:
                if error.code != ONLY_PERMANENT:
                    raise
                seconds = _PERMANENT
                gateway.add(port, internal, seconds)
        except GatewayError as error:
            if error.code != CONFLICT:
                raise
        else:
            return _Lease(port, seconds)
    raise GatewayError(f"its ports from {internal.port} on are given to other machines")


def _describe(gateway: Gateway, lease: _Lease) -> PortMapping:
    host = gateway.external_host()
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        found = None
    if found is None or found.is_unspecified:
        return PortMapping(None, f"the router mapped port {lease.port}, but has no public address")
    if found.version == 4 and any(found in network for network in (*_PRIVATE, _SHARED)):
        return PortMapping(
            None,
            f"the router mapped port {lease.port}, but its own address {host} is private: there is "
            "another router before it, which maps nothing",
        )
    address = Address(str(found), lease.port)
    return PortMapping(address, f"the router forwards {address} to this machine while it provides")


def _renew(
    gateway: Gateway,
    internal: Address,
    lease: _Lease,
    ended: threading.Event,
    say: Callable[[str], None],
) -> None:
    """Renew the mapping until ``ended``; say it if that fails, and if it works again."""
    works = True
    while not ended.wait(PORT_RENEWAL):
        try:
            gateway.add(lease.port, internal, lease.seconds)
        except GatewayError as error:
            if works:
                say(f"the router did not renew the mapping of port {lease.port}: {error}")
            works = False
        else:
            if not works:
                say(f"the router has renewed the mapping of port {lease.port}")
            works = True


def _find_with_upnp(internal: Address) -> Gateway:
    try:
        from ravnest.provider.upnp import find_gateway  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise GatewayError(
            f"UPnP needs the package {error.name}: pip install 'ravnest[upnp]'"
        ) from error
    return find_gateway(internal)
