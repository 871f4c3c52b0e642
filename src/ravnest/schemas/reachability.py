"""Reachability of providers: addresses that the server dials back, and relays.

Before a provider sends its offer, it listens at the port of its node and asks the server to dial its
addresses back. The server connects with TLS, compares the fingerprint of the certificate, and sends a
challenge; the provider answers with ``dial_back_proof``. So only the process that asked can answer.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Literal

from pydantic import Field

from ravnest.schemas.base import Digest, Name, Reason, Schema, TolerantSchema

CHALLENGE_BYTES = 32
PROOF_BYTES = 32
MOST_DIALLED = 16
"""Addresses in one request to be dialled back."""
_MOST_RELAY_ADDRESSES = 8
_CONTEXT = b"ravnest dial-back "

ReachabilityKind = Literal["direct", "relayed", "unreachable"]
HostAndPort = Annotated[str, Field(max_length=300)]
Port = Annotated[int, Field(ge=1, le=65535)]


def dial_back_proof(nonce: str, challenge: bytes) -> bytes:
    """Return the answer to a challenge; both sides know the nonce."""
    return hmac.digest(bytes.fromhex(nonce), _CONTEXT + challenge, hashlib.sha256)


class DialBackRequest(TolerantSchema):
    """Request of a provider, which listens already, to be dialled back."""

    addresses: Annotated[tuple[HostAndPort, ...], Field(max_length=MOST_DIALLED)]
    port: Port
    """Port at which it listens; the server tries it at the address that the request comes from."""
    fingerprint: Digest
    """SHA-256 of its certificate (DER)."""
    nonce: Digest
    """Random secret of this request."""


class AddressCheck(TolerantSchema):
    """Result of dialling one address."""

    address: HostAndPort
    reachable: bool
    reason: Reason = ""
    """Why it was not reached."""


class RelayView(TolerantSchema):
    """A relay that providers may use."""

    id: str
    name: str
    addresses: tuple[HostAndPort, ...]
    capacity: float | None = None
    """Mbit/s that it forwards in total; ``None``: not limited."""
    circuits: int = 0
    """Connections that it forwards now."""
    forwarded: int = 0
    """Bytes that it has forwarded."""


class DialBackReply(TolerantSchema):
    """Results of all addresses, and the relays to measure."""

    checks: tuple[AddressCheck, ...]
    """One per address of the request, then that of ``observed`` if it is another."""
    observed: str
    """Address that the request came from, as the server sees it; behind a router it is the router's."""
    relays: tuple[RelayView, ...]


class RelayTrip(TolerantSchema):
    """Round trip of a provider to a relay."""

    relay: Annotated[str, Field(max_length=100)]
    seconds: Annotated[float, Field(ge=0)]


class RelayHeartbeat(TolerantSchema):
    """Registration of a relay, and its sign of life; the reply may be delayed until there is news."""

    name: Name
    addresses: Annotated[tuple[HostAndPort, ...], Field(min_length=1, max_length=_MOST_RELAY_ADDRESSES)]
    capacity: Annotated[float, Field(gt=0)] | None = None
    """Mbit/s in total; ``None``: not limited."""
    circuits: Annotated[int, Field(ge=0)] = 0
    forwarded: Annotated[int, Field(ge=0)] = 0
    known: tuple[str, ...] | None = None
    """Running jobs of the last reply; a reply with others is sent at once."""
    wait: Annotated[float, Field(ge=0, le=60)] = 0.0
    """Seconds that the server may delay the reply."""


class RelayReply(TolerantSchema):
    """Knowledge of the server that a relay needs."""

    public_key: str
    """Ed25519 key that tickets are signed with: 32 bytes, hexadecimal."""
    running_jobs: tuple[str, ...]
    """Jobs whose nodes may use the relay, sorted."""


class Reachability(Schema):
    """How other providers reach a provider, and why it is not better."""

    kind: ReachabilityKind
    reason: Reason
