"""Joining: a token is exchanged once for a credential."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ravnest.schemas.base import Name, Schema

_PREFIX = "rvn"


class ApiRole(StrEnum):
    """Who may do what; ``admin`` is whoever can read the server's folder."""

    ADMIN = "admin"
    PROVIDER = "provider"
    REQUESTER = "requester"
    VIEWER = "viewer"


@dataclass(frozen=True)
class JoinToken:
    """A secret, and by which certificate to know the server: ``rvn.<fingerprint>.<secret>``."""

    secret: str
    fingerprint: str = ""
    """sha256 of the server's authority (DER); empty where it speaks plain HTTP on loopback."""

    def __str__(self) -> str:
        return f"{_PREFIX}.{self.fingerprint}.{self.secret}"

    @classmethod
    def new(cls, fingerprint: str) -> JoinToken:
        """A token that nobody can guess."""
        return cls(secrets.token_urlsafe(32), fingerprint)

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """The token in a text; ``ValueError`` if it is none."""
        parts = text.strip().split(".")
        if len(parts) != 3 or parts[0] != _PREFIX or not parts[2]:
            raise ValueError(
                "a join token looks like rvn.<fingerprint>.<secret>; copy all of what "
                "`ravnest token create` printed"
            )
        return cls(parts[2], parts[1])


def hashed(secret: str) -> str:
    """How secrets of full entropy are stored."""
    return hashlib.sha256(secret.encode()).hexdigest()


class JoinRequest(Schema):
    """Who holds this secret wants to join."""

    secret: Annotated[str, Field(max_length=200)]
    name: Name


class JoinReply(Schema):
    """Who joined is known by this from now on."""

    id: str
    role: ApiRole
    credential: str
    """For the header ``Authorization: Bearer``."""
