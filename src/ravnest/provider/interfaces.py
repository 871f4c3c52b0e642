"""Addresses of this machine's network interfaces, in the order in which others should try them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

import psutil

from ravnest.errors import ServerUnreachableError

_HTTP_PORT = 80

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def local_host(server: str) -> str:
    """Return the address of this machine that connections to the server come from."""
    parts = urlsplit(server if "://" in server else f"http://{server}")
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or _HTTP_PORT, type=socket.SOCK_DGRAM)
    except (OSError, ValueError) as error:
        raise _no_route(server, error) from error
    last: OSError | None = None
    for family, kind, _, _, target in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # a datagram socket sends nothing here
                return str(probe.getsockname()[0])
        except OSError as error:  # a name can have an IPv6 address that this machine has no route to
            last = error
    raise _no_route(server, last) from last


def interface_hosts() -> list[str]:
    """Return the addresses of all interfaces that are up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family in families
    ]


def candidate_hosts(found: Iterable[str], first: str) -> tuple[str, ...]:
    """Return the addresses at which other machines may reach this one, the most promising first.

    ``first`` is the address that reaches the server. If it is loopback, the server and all its
    providers are on this machine, so that it is the only one. Link-local addresses are left out: they
    need an interface of the other machine.
    """
    leading = ipaddress.ip_address(first)
    if leading.is_loopback:
        return (str(leading),)
    usable = {ip for text in found if (ip := _usable(text)) is not None and ip != leading}
    return tuple(map(str, (leading, *sorted(usable, key=_preference))))


def _usable(text: str) -> _Ip | None:
    try:
        ip = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    is_local = ip.is_loopback or ip.is_link_local
    return None if is_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved else ip


def _preference(ip: _Ip) -> tuple[bool, int, int]:
    return not ip.is_global, ip.version, int(ip)


def _no_route(server: str, error: Exception | None) -> ServerUnreachableError:
    return ServerUnreachableError(f"there is no route from this machine to {server}: {error}")
