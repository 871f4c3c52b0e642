"""Differences between two states of the page, so that a browser gets only what changed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Protocol


class _Item(Protocol):
    """A frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass(frozen=True)
class ItemChanges:
    """Changes of a set of items."""

    changed: dict[str, dict[str, Any]]
    """New fields by id; all fields of an item that is new."""
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changed or self.removed)


def item_changes(
    before: Mapping[str, _Item], after: Mapping[str, _Item], only_new: Iterable[str] = ()
) -> ItemChanges:
    """Return the changes from ``before`` to ``after``.

    The fields in ``only_new`` are part of new items and never of changed ones: a browser continues them
    by itself.
    """
    silent = frozenset(only_new)
    changed: dict[str, dict[str, Any]] = {}
    for key, item in after.items():
        known = before.get(key)
        if known is item:  # items that did not change are the same objects
            continue
        new = {field.name: getattr(item, field.name) for field in fields(item)}
        if known is not None:
            new = {
                name: value
                for name, value in new.items()
                if name not in silent and getattr(known, name) != value
            }
        if new:
            changed[key] = new
    return ItemChanges(changed, tuple(key for key in before if key not in after))
