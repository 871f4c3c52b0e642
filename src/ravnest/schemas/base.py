"""The base of all messages, and the kinds of text that they hold."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A sha256 in hexadecimal digits."""
Name = Annotated[str, Field(min_length=1, max_length=100)]
Reason = Annotated[str, Field(max_length=4000)]


class Schema(BaseModel):
    """A value that never changes; fields that nobody knows are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Artifact(Schema):
    """A file in the server's content-addressed folder."""

    sha256: Digest
    size: Annotated[int, Field(ge=0)]
    """Bytes."""
