"""Newest results of a Root, which its checkpoint has so that the next Root can report them again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ravnest.telemetry import LossRecord, ValidationRecord
from ravnest.types import convert_checked

RecentRecord = LossRecord | ValidationRecord

MOST_RECENT = 256
"""Records that are kept: more than a Root makes between two reports, as long as the server answers. Of
a Root that is killed while the server is away, older ones may be lost."""


def encoded_records(records: Iterable[RecentRecord]) -> str:
    """Return records for a checkpoint."""
    return msgspec.json.encode(list(records)).decode()


def decoded_records(text: object, updates: int, validations: int) -> list[RecentRecord]:
    """Return the records in a checkpoint that has this many updates and validations.

    None of them if they cannot be read: training does not need them.
    """
    if not isinstance(text, str):
        return []
    try:
        plain = convert_checked(msgspec.json.decode(text), list[dict[str, Any]])
        found = [_record(each) for each in plain[-MOST_RECENT:]]
    except (msgspec.DecodeError, ValueError, RecursionError):
        return []
    return [each for each in found if _is_part(each, updates, validations)]


def _record(plain: dict[str, Any]) -> RecentRecord:
    if plain.get("kind") == "loss":
        return convert_checked(plain, LossRecord)
    return convert_checked(plain, ValidationRecord)


def _is_part(record: RecentRecord, updates: int, validations: int) -> bool:
    if isinstance(record, LossRecord):
        return 0 <= record.update < updates
    return 0 <= record.number < validations
