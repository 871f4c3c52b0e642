"""Addresses of a provider's node: where it listens, and where others reach it."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from ravnest.errors import ServerUnreachableError, SettingsError
from ravnest.types import Address

_ALL_INTERFACES = "0.0.0.0"  # noqa: S104 - behind a router, the incoming interface is unknown
_PORTS = range(20_000, 32_768)
"""Below the ports that systems use for outgoing connections."""
_TRIES = 100


@dataclass(frozen=True)
class Addresses:
    """Addresses of a node, each as ``host:port``."""

    known: str
    """Address at which others reach the node."""
    listen: str | None
    """Address at which it listens, if that is another."""


@contextmanager
def addresses(server: str, listen: str | None = None, address: str | None = None) -> Iterator[Addresses]:
    """Choose the addresses of this provider and reserve its port while the block runs.

    ``listen`` and ``address`` are options of the owner: ``host:port``, ``host`` or ``:port``.
    """
    listen_host, listen_port = _host_and_port(listen, "--listen")
    host, port = _host_and_port(address, "--address")
    known_host = host or listen_host or local_host(server)
    bound_host = listen_host or (known_host if _is_own(known_host) else _ALL_INTERFACES)
    with _reserved(bound_host, listen_port or port) as reserved:
        known = Address.parse(str(Address(known_host, port or reserved)))
        bound = Address(bound_host, reserved)
        yield Addresses(str(known), None if bound == known else str(bound))


def local_host(server: str) -> str:
    """Return the address of this machine that connections to the server come from."""
    parts = urlsplit(server if "://" in server else f"http://{server}")
    try:
        family, kind, _, _, target = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket sends nothing here
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ServerUnreachableError(
            f"there is no route from this machine to {server}: {error}"
        ) from error


def _host_and_port(text: str | None, option: str) -> tuple[str | None, int | None]:
    """Return the host and the port of an option; ``None`` for what is not given."""
    if text is None:
        return None, None
    try:
        if text.startswith(":"):
            return None, Address.parse(f"localhost{text}").port
        if text.endswith("]") or ":" not in text:
            return Address.parse(f"{text}:1").host, None
        found = Address.parse(text)
    except ValueError as error:
        raise SettingsError(f"{option} {error}; only the host or only :port is allowed too") from error
    return found.host, found.port


def _is_own(host: str) -> bool:
    """Return ``True`` if this machine can listen at ``host``."""
    try:
        with _bound(host, 0):
            return True
    except OSError:
        return False


@contextmanager
def _reserved(host: str, port: int | None) -> Iterator[int]:
    """Reserve a port while the block runs: other programs cannot bind it, a node of ours can."""
    holder = _bound_to(host, port) if port is not None else _bound_to_free(host)
    with holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets the node bind it
        yield int(holder.getsockname()[1])


def _bound_to(host: str, port: int) -> socket.socket:
    try:
        return _bound(host, port)
    except OSError as error:
        raise SettingsError(
            f"a node cannot listen at {Address(host, port)}: {error.strerror}; give another --listen"
        ) from error


def _bound_to_free(host: str) -> socket.socket:
    for port in random.sample(_PORTS, _TRIES):
        try:
            return _bound(host, port)
        except OSError as error:
            last = error
    raise SettingsError(f"a node cannot listen at {host}: {last.strerror}; give --listen host:port")


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.bind((host, port))
    except BaseException:
        found.close()
        raise
    return found
