"""Dial-back: the server connects to the addresses that a provider announces."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence

import psutil

from ravnest.deadlines import DIAL_BACK, DIAL_BACK_EACH, DIAL_BACK_GAP
from ravnest.errors import ServerRefusedError
from ravnest.schemas.reachability import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    AddressCheck,
    DialBackRequest,
    dial_back_proof,
)
from ravnest.server.reachability.policy import Ip, dial_refusal, parse_ip
from ravnest.types import Address

_MOST_AT_ONCE = 32
"""Providers that are checked at the same time."""
_MOST_RESOLVED = 4
"""IP addresses of one name that are dialled."""
_LATE = "no answer within {:g} s; a firewall or a router drops connections to this port"
_REFUSED = "connection refused; a firewall or a router rejects connections to this port"
_NO_ROUTE = "the server has no route to it"
_OTHER = "another program answers there"


class DialBackService:
    """Dials providers back; keeps the results until their offers arrive."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` is monotonic."""
        self._clock = clock
        self._begun: dict[str, float] = {}
        self._in_progress: set[str] = set()
        self._results: dict[str, tuple[AddressCheck, ...]] = {}

    async def check(self, member: str, request: DialBackRequest, source: str) -> Sequence[AddressCheck]:
        """Dial all addresses at once; refuse (429) if this provider was checked just now."""
        self._begin(member)
        try:
            self._results[member] = await check_addresses(request, parse_ip(source), own_addresses())
        finally:
            self._in_progress.discard(member)
        return self._results[member]

    def take(self, member: str) -> tuple[AddressCheck, ...] | None:
        """Return the results that a provider has got since its last offer, once."""
        return self._results.pop(member, None)

    def _begin(self, member: str) -> None:
        now = self._clock()
        if member in self._in_progress or self._begun.get(member, -DIAL_BACK_GAP) + DIAL_BACK_GAP > now:
            raise ServerRefusedError("the addresses of this provider were checked just now", 429)
        if len(self._in_progress) >= _MOST_AT_ONCE:
            raise ServerRefusedError("the server checks too many providers now; try again soon", 503)
        self._begun[member] = now
        self._in_progress.add(member)


def own_addresses() -> frozenset[Ip]:
    """Return the addresses of this machine."""
    entries = (entry for each in psutil.net_if_addrs().values() for entry in each)
    found = (parse_ip(e.address) for e in entries if e.family in (socket.AF_INET, socket.AF_INET6))
    return frozenset(ip for ip in found if ip is not None)


async def check_addresses(
    request: DialBackRequest, source: Ip | None, own: frozenset[Ip]
) -> tuple[AddressCheck, ...]:
    """Dial the addresses of a request, and its source at the same port, all at once."""
    texts = list(dict.fromkeys(request.addresses))
    if source is not None and not source.is_link_local:
        texts = list(dict.fromkeys([*texts, str(Address(str(source), request.port))]))
    reasons = await asyncio.gather(*(_problem(text, request, source, own) for text in texts))
    return tuple(
        AddressCheck(address=text, reachable=reason is None, reason=reason or "")
        for text, reason in zip(texts, reasons, strict=True)
    )


async def _problem(
    text: str, request: DialBackRequest, source: Ip | None, own: frozenset[Ip]
) -> str | None:
    """Return why an address cannot be reached; ``None`` if it can."""
    try:
        address = Address.parse(text)
    except ValueError as error:
        return f"the address {error}"
    try:
        async with asyncio.timeout(DIAL_BACK):
            found = await _resolved(address.host)
            if not found:
                return f"the server cannot resolve the name {address.host}"
            tries = (_dialled(ip, address.port, request, source, own) for ip in found)
            reasons = await asyncio.gather(*tries)
    except TimeoutError:
        return _LATE.format(DIAL_BACK)
    return None if None in reasons else reasons[0]


async def _resolved(host: str) -> list[Ip]:
    """Return the IP addresses of a host; the server dials these, so that names cannot change later."""
    ip = parse_ip(host)
    if ip is not None:
        return [ip]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    parsed = (parse_ip(str(info[4][0])) for info in found)
    return list(dict.fromkeys(ip for ip in parsed if ip is not None))[:_MOST_RESOLVED]


async def _dialled(
    ip: Ip, port: int, request: DialBackRequest, source: Ip | None, own: frozenset[Ip]
) -> str | None:
    refusal = dial_refusal(ip, source, own)
    if refusal is not None:
        return refusal
    try:
        async with asyncio.timeout(DIAL_BACK_EACH):
            return await _proved(ip, port, request)
    except TimeoutError:
        return _LATE.format(DIAL_BACK_EACH)
    except ConnectionRefusedError:
        return _REFUSED
    except (ssl.SSLError, EOFError, ConnectionError):
        return _OTHER
    except OSError as error:
        is_routing = error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
        return _NO_ROUTE if is_routing else f"it cannot be dialled: {error.strerror or error}"


async def _proved(ip: Ip, port: int, request: DialBackRequest) -> str | None:
    """Connect and compare certificate and proof with the request."""
    reader, writer = await asyncio.open_connection(str(ip), port, ssl=_context(), limit=PROOF_BYTES)
    try:
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        found = hashlib.sha256(certificate or b"").hexdigest()
        if not hmac.compare_digest(found, request.fingerprint):
            return _OTHER
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        writer.write(challenge)
        answer = await reader.readexactly(PROOF_BYTES)
    finally:
        writer.transport.abort()  # an orderly end would wait for the peer
    expected = dial_back_proof(request.nonce, challenge)
    return None if hmac.compare_digest(answer, expected) else _OTHER


def _context() -> ssl.SSLContext:
    """Return a TLS context without authorities: the certificate's fingerprint is compared instead."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
