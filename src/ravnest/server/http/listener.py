"""Where a server listens, by which names it is reached, and whether it needs TLS there."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable

import psutil

from ravnest.errors import ServerError
from ravnest.transport.tls import is_loopback
from ravnest.types import Address

_BACKLOG = 2048
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  # what a user writes for "this machine, for all"


def needs_tls(host: str) -> bool:
    """Whether others can reach a listener at this host."""
    return not is_loopback(Address(host, 1))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; ``ServerError`` says why not. Port 0: any that is free."""
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
        raise ServerError(f"{host}:{port} {reason}; choose another with --port (0: any)") from error
    return listener


def host_to_show(host: str, public_names: Iterable[str]) -> str:
    """How others reach the server: as it was told, or as the machine itself believes."""
    names = list(public_names)
    if names:
        return names[0]
    return _own_address() if host in _EVERYWHERE else host


def names_of(host: str, public_names: Iterable[str]) -> list[str]:
    """All names and addresses that the server's certificate should be good for."""
    names = [*public_names, "127.0.0.1", "::1"]
    if host not in _EVERYWHERE:
        return [*names, host]
    addresses = [
        entry.address.partition("%")[0] for each in psutil.net_if_addrs().values() for entry in each
    ]
    return [*names, socket.gethostname(), *filter(_is_address, addresses)]


def url_of(host: str, port: int, *, tls: bool) -> str:
    """The address for browsers and commands."""
    return f"{'https' if tls else 'http'}://{Address(host, port)}"


def _own_address() -> str:
    """The address by which this machine talks to the world; nothing is sent to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address that nobody has
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
