"""Policy of a worker's network: addresses that it may dial, and the port at which it listens. Pure."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from ravnest.transport.tls import dial_address
from ravnest.types import Address

_IPV4_SIZE, _IPV6_SIZE = 16, 28


@dataclass(frozen=True)
class SocketPlace:
    """Address of a socket, as the kernel has it."""

    family: int
    host: str
    port: int
    flow: int = 0
    scope: int = 0

    @property
    def address(self) -> Address:
        """Host and port; an IPv4 address within IPv6 is an IPv4 address."""
        return Address(canonical(self.host), self.port)

    @property
    def arguments(self) -> tuple[object, ...]:
        """The address as the socket module takes it."""
        own = (self.host, self.port)
        return own if self.family == socket.AF_INET else (*own, self.flow, self.scope)


def canonical(host: str) -> str:
    """Return one spelling of an IP address, without a scope."""
    found = ipaddress.ip_address(host.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def parse_place(raw: bytes) -> SocketPlace | None:
    """Return the address of a ``struct sockaddr``; ``None`` if it is not one of TCP."""
    family = struct.unpack_from("=H", raw)[0] if len(raw) >= _IPV4_SIZE else None
    if family == socket.AF_INET:
        port, host = struct.unpack_from("!H4s", raw, 2)
        return SocketPlace(family, str(ipaddress.IPv4Address(host)), port)
    if family == socket.AF_INET6 and len(raw) >= _IPV6_SIZE:
        port, flow, host = struct.unpack_from("!HI16s", raw, 2)
        (scope,) = struct.unpack_from("=I", raw, 24)
        return SocketPlace(family, str(ipaddress.IPv6Address(host)), port, flow, scope)
    return None


@dataclass(frozen=True)
class NetworkPolicy:
    """Connections that a worker may have."""

    peers: frozenset[Address] = frozenset()
    """Addresses that it may dial; hosts are IP addresses in one spelling."""
    port: int | None = None
    """Port at which it may listen."""

    def connect_error(self, place: SocketPlace | None) -> int:
        """Return 0 if the address may be dialled, otherwise the error number."""
        if place is None:
            return errno.EAFNOSUPPORT
        return 0 if place.address in self.peers else errno.EACCES

    def bind_error(self, place: SocketPlace | None) -> int:
        """Return 0 if a socket may have the address, otherwise the error number.

        Port 0 is harmless: ``listen_error`` says where others may connect to.
        """
        if place is None:
            return errno.EAFNOSUPPORT
        return 0 if place.port in (0, self.port) else errno.EACCES

    def listen_error(self, port: int) -> int:
        """Return 0 if a socket at this port may listen, otherwise the error number."""
        return 0 if port == self.port else errno.EACCES

    def joined_by(self, addresses: Iterable[Address]) -> NetworkPolicy:
        """Return the policy with further peers."""
        return NetworkPolicy(self.peers | dialled(addresses), self.port)


def dialled(addresses: Iterable[Address]) -> frozenset[Address]:
    """Return the IP addresses among ``addresses`` as a worker dials them; names are left out."""
    found = set()
    for address in map(dial_address, addresses):
        try:
            found.add(Address(canonical(address.host), address.port))
        except ValueError:
            continue
    return frozenset(found)
