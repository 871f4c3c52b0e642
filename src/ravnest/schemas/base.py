"""Base class of all messages, and the string types that they share."""

from __future__ import annotations

import unicodedata
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 digest in hexadecimal digits."""
LARGEST_NUMBER = 2**53
"""Bound of numbers in messages: a database and JSON of every language can hold them."""
REASON_LIMIT = 4000
"""Characters of a reason or a warning."""
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that steer a terminal or a browser instead of being shown."""


def plain(text: str, kept: str = "") -> str:
    """Return ``text`` without control characters and changes of direction, except those in ``kept``.

    Others chose the text: it must not move the cursor of a terminal, or look like another text.
    """
    if text.isprintable():
        return text
    return "".join(c for c in text if c in kept or unicodedata.category(c) not in _HIDDEN)


def plain_lines(text: str) -> str:
    """Return ``text`` as ``plain`` does, with its line breaks and tabs."""
    return plain(text, "\n\t")


def _plain_name(text: str) -> str:
    name = plain(text).strip()
    if not name:
        raise ValueError("must have characters that can be shown")
    return name


Name = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_plain_name)]
Reason = Annotated[str, Field(max_length=REASON_LIMIT), AfterValidator(plain_lines)]


def clipped(text: str) -> str:
    """Return ``text`` without control characters, cut to the length that a reason may have."""
    text = plain_lines(text)
    return text if len(text) <= REASON_LIMIT else f"{text[: REASON_LIMIT - 2]} …"


class Schema(BaseModel):
    """Immutable message; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TolerantSchema(Schema):
    """Immutable message that describes a machine or a state; unknown fields are ignored.

    Its sender may have a later version of Ravnest. Orders, such as jobs and assignments, refuse unknown
    fields: without them, something else would be done than was asked for.
    """

    model_config = ConfigDict(extra="ignore")


class ErrorReply(Schema):
    """Answer to a request that the server refuses."""

    detail: str
    """Reason of the refusal, as a sentence."""


class Artifact(Schema):
    """A file in the server's content-addressed folder."""

    sha256: Digest
    size: Annotated[int, Field(ge=0, lt=LARGEST_NUMBER)]
    """Bytes."""
