"""Base class of all messages, and the string types that they share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 digest in hexadecimal digits."""
Name = Annotated[str, Field(min_length=1, max_length=100)]
LARGEST_NUMBER = 2**53
"""Bound of numbers in messages: a database and JSON of every language can hold them."""
REASON_LIMIT = 4000
"""Characters of a reason or a warning."""
Reason = Annotated[str, Field(max_length=REASON_LIMIT)]


def clipped(text: str) -> str:
    """Return ``text``, cut to the length that a reason may have."""
    return text if len(text) <= REASON_LIMIT else f"{text[: REASON_LIMIT - 2]} …"


class Schema(BaseModel):
    """Immutable message; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ErrorReply(Schema):
    """Answer to a request that the server refuses."""

    detail: str
    """Reason of the refusal, as a sentence."""


class Artifact(Schema):
    """A file in the server's content-addressed folder."""

    sha256: Digest
    size: Annotated[int, Field(ge=0, lt=LARGEST_NUMBER)]
    """Bytes."""
