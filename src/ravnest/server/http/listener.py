"""Listening socket of a server, the names by which it is reached, and the need for TLS."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable
from contextlib import suppress

import psutil

from ravnest.errors import ServerError
from ravnest.provider.interfaces import candidate_hosts, interface_hosts
from ravnest.transport.tls import is_loopback
from ravnest.types import Address

_BACKLOG = 2048
_MOST_RELAY_HOSTS = 8
_DOCUMENTATION = ((socket.AF_INET, ("192.0.2.1", 9)), (socket.AF_INET6, ("2001:db8::1", 9)))
"""Addresses reserved for documentation, of IPv4 and IPv6."""
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104  # wildcard addresses


def needs_tls(host: str) -> bool:
    """Return whether other machines can reach a listener at this host."""
    return not is_loopback(Address(host, 1))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 means any free port. Raise ``ServerError`` if it fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServerError(f"{host} is not an address of this machine: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise ServerError(
            f"{host}:{port} {reason}; choose another with --port (0: any free port)"
        ) from error
    return listener


def public_host(host: str, public_names: Iterable[str]) -> str:
    """Return the host for the server's URL: the first public name, or this machine's own address."""
    names = list(public_names)
    if names:
        return names[0]
    return _own_address() if host in _WILDCARDS else host


def certificate_names(host: str, public_names: Iterable[str]) -> list[str]:
    """Return all names and addresses for the server's certificate."""
    names = [*public_names, "127.0.0.1", "::1"]
    if host not in _WILDCARDS:
        return [*names, host]
    addresses = [
        entry.address.partition("%")[0] for each in psutil.net_if_addrs().values() for entry in each
    ]
    return [*names, socket.gethostname(), *filter(_is_address, addresses)]


def url_of(host: str, port: int, *, tls: bool) -> str:
    """Return the URL for browsers and commands."""
    return f"{'https' if tls else 'http'}://{Address(host, port)}"


def relay_hosts(host: str, public_names: Iterable[str]) -> list[str]:
    """Return the hosts at which other machines reach a relay that listens beside the server."""
    own = [host] if host not in _WILDCARDS else _interface_hosts()
    return list(dict.fromkeys([*public_names, *own]))[:_MOST_RELAY_HOSTS]


def _interface_hosts() -> list[str]:
    first = _own_address()
    return list(candidate_hosts(interface_hosts(), first)) if _is_address(first) else [first]


def _own_address() -> str:
    """Return the address of this machine's default route; no packet is sent."""
    for family, target in _DOCUMENTATION:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return socket.gethostname()


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
