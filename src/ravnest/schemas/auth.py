"""Health of a server, and joining it: a token is exchanged for a credential."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from ravnest.schemas.base import Name, Schema, TolerantSchema

_PREFIX = "rvn"


class ApiRole(StrEnum):
    """Roles of members; ``admin`` is anybody who can read the server's folder."""

    ADMIN = "admin"
    PROVIDER = "provider"
    RELAY = "relay"
    REQUESTER = "requester"
    VIEWER = "viewer"


@dataclass(frozen=True)
class JoinToken:
    """A secret and the fingerprint of the server's certificate: ``rvn.<fingerprint>.<secret>``."""

    secret: str
    fingerprint: str = ""
    """SHA-256 of the server's authority (DER); empty for a server with plain HTTP on loopback."""

    def __str__(self) -> str:
        return f"{_PREFIX}.{self.fingerprint}.{self.secret}"

    @classmethod
    def new(cls, fingerprint: str) -> JoinToken:
        """Return a token with a random secret."""
        return cls(secrets.token_urlsafe(32), fingerprint)

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Return the token that ``text`` holds; raise ``ValueError`` if it holds none."""
        parts = text.strip().split(".")
        if len(parts) != 3 or parts[0] != _PREFIX or not parts[2]:
            raise ValueError(
                "a join token looks like rvn.<fingerprint>.<secret>; copy everything that "
                "`ravnest token create --role ROLE` printed"
            )
        return cls(parts[2], parts[1])


def hashed(secret: str) -> str:
    """Return the hash under which a secret is stored; it needs no salt, as secrets are random."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Health(TolerantSchema):
    """State of a server, for everybody."""

    status: Literal["ok", "trouble"]
    problems: tuple[str, ...] = ()
    """Sentences that say what is wrong."""
    version: str


class PageLink(TolerantSchema):
    """Link that logs a browser in as the member that asked for it, once."""

    path: str
    """Path and query at the server."""


class MemberView(TolerantSchema):
    """A member, as the admin sees it."""

    id: str
    role: ApiRole
    name: str
    created: float
    expires: float | None
    """Time at which its credential ends, or has ended; ``None``: never."""
    active: bool


class JoinRequest(Schema):
    """Request to join with the secret of a token."""

    secret: Annotated[str, Field(max_length=200)]
    name: Name


class JoinReply(TolerantSchema):
    """Identity of the new member."""

    id: str
    role: ApiRole
    credential: str
    """Value for the header ``Authorization: Bearer``."""
