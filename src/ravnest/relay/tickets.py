"""Tickets: a server's signed permission for one node to use relays, for the peers of its job only.

A relay needs only the server's public key to check a ticket. A ticket is not a secret that protects
data, since nodes authenticate each other with TLS through the relay; it protects the relay from others.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ravnest.errors import RelayError

_SIGNATURE_BYTES = 64
_LONGEST = 16_384


class RelayTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Permission of a node to register at relays and to be connected to its peers."""

    job: str
    node: int
    peers: tuple[int, ...]
    """Nodes of the job that it may be connected to."""
    expires: float
    """Time at which it ends, in seconds since 1970."""

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint that its owner may register."""
        return Endpoint(self.job, self.node)


@dataclass(frozen=True)
class Endpoint:
    """Name of a node at a relay."""

    job: str
    node: int

    def __str__(self) -> str:
        return f"node-{self.node}.{self.job}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse ``node-<number>.<job>``; the ``ValueError`` says what the text must be."""
        first, dot, job = text.partition(".")
        number = first.removeprefix("node-")
        if not dot or not job or number == first or not (number.isascii() and number.isdigit()):
            raise ValueError(f'must be "node-<number>.<job>", is {text[:100]!r}')
        return cls(job, int(number))


def sign_ticket(ticket: RelayTicket, key: Ed25519PrivateKey) -> str:
    """Return the ticket as text that fits into a URL."""
    body = msgspec.json.encode(ticket)
    return base64.urlsafe_b64encode(key.sign(body) + body).rstrip(b"=").decode()


def read_ticket(text: str, key: Ed25519PublicKey, now: float) -> RelayTicket:
    """Return the ticket; ``RelayError`` if it is forged, damaged or has expired at ``now``."""
    if len(text) > _LONGEST:
        raise RelayError("the ticket is too long")
    try:
        signed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        signature, body = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        key.verify(signature, body)
        ticket = msgspec.json.decode(body, type=RelayTicket)
    except (InvalidSignature, binascii.Error, ValueError, msgspec.DecodeError) as error:
        raise RelayError("the ticket was not signed by the server of this relay") from error
    if ticket.expires <= now:
        raise RelayError("the ticket has expired")
    return ticket
