"""Outcome of an assignment that is trained, kept on the disk until the server has acknowledged it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ravnest.schemas.base import Schema
from ravnest.schemas.providers import Count, Record

MOST_RECORDS_KEPT = 20_000
"""Records that are kept with an outcome; of more, the oldest are kept, as reports start with them."""


class Outcome(Schema):
    """An assignment that is trained to the end, and the records that the server does not have."""

    provider: str = ""
    """Id of the provider at its server, which tells servers apart."""
    is_root: bool
    """A Root has trained files to upload; other nodes only report the end."""
    title: str
    """Description of the node and its job, in messages to the owner."""
    first_record: Count = 0
    """Position of the first of ``records`` among all records of the assignment."""
    records: Annotated[tuple[Record, ...], Field(max_length=MOST_RECORDS_KEPT)] = ()
