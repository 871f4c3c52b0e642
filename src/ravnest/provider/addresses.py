"""Where others reach this provider's node, and where it listens."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from ravnest.errors import ServerUnreachableError, SettingsError
from ravnest.types import Address

_EVERYWHERE = "0.0.0.0"  # noqa: S104 - behind a router, nobody knows by which interface they come
_PORTS = range(20_000, 32_768)
"""Below those that systems give to outgoing connections."""
_TRIES = 100


@dataclass(frozen=True)
class Addresses:
    """Both are ``host:port``."""

    known: str
    """Where others reach the node."""
    listen: str | None
    """Where it listens, if that is not the same."""


@contextmanager
def addresses(server: str, listen: str | None = None, address: str | None = None) -> Iterator[Addresses]:
    """Addresses that are this provider's while inside: its port is kept free for its nodes.

    ``listen`` and ``address`` are the owner's: ``host:port``, ``host`` or ``:port``.
    """
    listen_host, listen_port = _parts(listen, "--listen")
    host, port = _parts(address, "--address")
    known_host = host or listen_host or local_host(server)
    bound_host = listen_host or (known_host if _is_own(known_host) else _EVERYWHERE)
    with _kept(bound_host, listen_port or port) as kept:
        known = Address.parse(str(Address(known_host, port or kept)))
        bound = Address(bound_host, kept)
        yield Addresses(str(known), None if bound == known else str(bound))


def local_host(server: str) -> str:
    """The address of this machine from which the server is reached."""
    parts = urlsplit(server if "://" in server else f"http://{server}")
    try:
        family, kind, _, _, target = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as asking:
            asking.connect(target)  # of a datagram socket: nothing is sent
            return str(asking.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ServerUnreachableError(f"there is no way from here to {server}: {error}") from error


def _parts(text: str | None, option: str) -> tuple[str | None, int | None]:
    """Host and port of an option, each where it is given."""
    if text is None:
        return None, None
    try:
        if text.startswith(":"):
            return None, Address.parse(f"localhost{text}").port
        if text.endswith("]") or ":" not in text:
            return Address.parse(f"{text}:1").host, None
        found = Address.parse(text)
    except ValueError as error:
        raise SettingsError(f"{option} {error}; or only the host, or only :port") from error
    return found.host, found.port


def _is_own(host: str) -> bool:
    """Whether a node can listen there."""
    try:
        with _bound(host, 0):
            return True
    except OSError:
        return False


@contextmanager
def _kept(host: str, port: int | None) -> Iterator[int]:
    """A port that no other program gets while inside, and that a node of ours can listen at."""
    holder = _given(host, port) if port is not None else _free(host)
    with holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that the node gets it
        yield int(holder.getsockname()[1])


def _given(host: str, port: int) -> socket.socket:
    try:
        return _bound(host, port)
    except OSError as error:
        raise SettingsError(
            f"a node cannot listen at {Address(host, port)}: {error.strerror}; give another --listen"
        ) from error


def _free(host: str) -> socket.socket:
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
