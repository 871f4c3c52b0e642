"""Addresses of a provider's node: where it listens, and where others reach it."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ravnest.errors import SettingsError
from ravnest.provider.interfaces import candidate_hosts, interface_hosts, local_host
from ravnest.transport.tls import is_loopback
from ravnest.types import Address

MOST_ADDRESSES = 8
"""Addresses that a provider announces at most; all are tried at once."""
_IPV4 = "0.0.0.0"  # noqa: S104 - behind a router, the incoming interface is unknown
_IPV4_AND_IPV6 = "::"
_PORTS = range(20_000, 32_768)
"""Below the ports that systems use for outgoing connections."""
_TRIES = 100
_RANGE = re.compile(r"(.*):([0-9]+)-([0-9]+)")


@dataclass(frozen=True)
class Addresses:
    """Addresses of a node, each as ``host:port``."""

    known: tuple[str, ...]
    """Addresses at which others may reach the node, the most promising first."""
    listen: str
    """Address at which it listens."""

    @property
    def port(self) -> int:
        """Port at which it listens."""
        return Address.parse(self.listen).port


@contextmanager
def addresses(
    server: str, listen: str | None = None, announced: Sequence[str] = ()
) -> Iterator[Addresses]:
    """Choose the addresses of this provider and reserve its port while the block runs.

    ``listen`` and ``announced`` are options of the owner, ``--listen`` and ``--address``: ``host:port``,
    ``host`` or ``:port``; ``listen`` can have a range of ports, such as ``:20000-20010``.
    """
    host, ports = _host_and_ports(listen)
    given = [_host_and_port(text) for text in announced]
    own = local_host(server)
    elsewhere = [each for each, _ in given if each is not None]
    hosts = _own_hosts(own, host, is_elsewhere=not all(map(_is_loopback, elsewhere)))
    bound_host = host or (own if all(map(_is_loopback, [*elsewhere, *hosts])) else _everywhere())
    first_port = next((port for _, port in given if port is not None), None)
    if ports is None and first_port is not None:
        ports = range(first_port, first_port + 1)
    with _reserved(bound_host, ports) as reserved:
        ours = [Address(each or (*hosts, own)[0], port or reserved) for each, port in given]
        found = [*ours, *(Address(each, reserved) for each in hosts)]
        known = tuple(dict.fromkeys(str(Address.parse(str(each))) for each in found))
        yield Addresses(known[:MOST_ADDRESSES], str(Address(bound_host, reserved)))


def _own_hosts(own: str, listen: str | None, *, is_elsewhere: bool) -> list[str]:
    """Return the hosts of this machine at which others may reach the node; ``own`` reaches the server.

    If the owner has said that others reach it at another machine, they do not reach it on loopback.
    """
    if listen in (None, _IPV4, _IPV4_AND_IPV6):
        candidates = candidate_hosts(interface_hosts(), own)
        hosts = [host for host in candidates if listen != _IPV4 or ":" not in host]
    else:
        assert listen is not None
        hosts = [listen]
    return [host for host in hosts if not (is_elsewhere and _is_loopback(host))]


def _is_loopback(host: str) -> bool:
    return is_loopback(Address(host, 1))


def _everywhere() -> str:
    """Return the address of all interfaces, for IPv6 and IPv4 if this machine has both."""
    if not socket.has_dualstack_ipv6():
        return _IPV4
    try:
        with _bound(_IPV4_AND_IPV6, 0):
            return _IPV4_AND_IPV6
    except OSError:
        return _IPV4


def _host_and_ports(text: str | None) -> tuple[str | None, range | None]:
    """Return the host and the ports of ``--listen``; ``None`` for what is not given."""
    if text is None:
        return None, None
    found = _RANGE.fullmatch(text)
    if found is None:
        host, port = _host_and_port(text, "--listen")
        return host, None if port is None else range(port, port + 1)
    head, *ends = found.groups()
    (host, first), (_, last) = (_host_and_port(f"{head}:{end}", "--listen") for end in ends)
    assert first is not None
    assert last is not None
    if first > last:
        raise SettingsError(f"--listen {text}: the first port of a range must not exceed the last")
    return host, range(first, last + 1)


def _host_and_port(text: str, option: str = "--address") -> tuple[str | None, int | None]:
    """Return the host and the port of an option; ``None`` for what is not given."""
    try:
        if text.startswith(":"):
            return None, Address.parse(f"localhost{text}").port
        if text.endswith("]") or ":" not in text:
            return Address.parse(f"{text}:1").host, None
        found = Address.parse(text)
    except ValueError as error:
        raise SettingsError(f"{option} {error}; only the host or only :port is allowed too") from error
    return found.host, found.port


@contextmanager
def _reserved(host: str, ports: range | None) -> Iterator[int]:
    """Reserve a port while the block runs: other programs cannot bind it, a node of ours can."""
    tries = random.sample(_PORTS, _TRIES) if ports is None else ports
    with _bound_to_first(host, tries, is_chosen=ports is not None) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets the node bind it
        yield int(holder.getsockname()[1])


def _bound_to_first(host: str, ports: Sequence[int], *, is_chosen: bool) -> socket.socket:
    for port in ports:
        try:
            return _bound(host, port)
        except OSError as error:
            last = error
    where = str(Address(host, ports[0])) if is_chosen else host
    if is_chosen and len(ports) > 1:
        where = f"{where} to {ports[-1]}"
    raise SettingsError(
        f"a node cannot listen at {where}: {last.strerror}; give another --listen"
    ) from last


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        if host == _IPV4_AND_IPV6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found.bind((host, port))
    except BaseException:
        found.close()
        raise
    return found
