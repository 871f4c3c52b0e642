"""Measured links between providers: the newest figures of each pair."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Row, and_, delete, insert, or_, select

from ravnest.server.db.records import LinkRecord
from ravnest.server.db.tables import links


class LinkRepository:
    """Figures of pairs of providers, whose ids are in ascending order."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, record: LinkRecord) -> None:
        """Store the figures of a pair instead of earlier ones."""
        pair = and_(links.c.one == record.one, links.c.other == record.other)
        self._connection.execute(delete(links).where(pair))
        self._connection.execute(insert(links).values(**vars(record)))

    def between(self, providers: Collection[str]) -> list[LinkRecord]:
        """Return the figures of all pairs of these providers, ordered by pair."""
        query = select(links).where(links.c.one.in_(providers), links.c.other.in_(providers))
        found = self._connection.execute(query.order_by(links.c.one, links.c.other))
        return [_record(row) for row in found]

    def all(self) -> list[LinkRecord]:
        """Return the figures of all pairs, ordered by pair."""
        query = select(links).order_by(links.c.one, links.c.other)
        return [_record(row) for row in self._connection.execute(query)]

    def forget_older(self, *, measured: float, failed: float) -> bool:
        """Delete figures from before ``measured`` and failures from before ``failed``.

        Return whether a failure was deleted, so that the pair may be used again.
        """
        old = and_(links.c.failure != "", links.c.time < failed)
        is_failure = self._connection.execute(delete(links).where(old)).rowcount > 0
        self._connection.execute(delete(links).where(links.c.time < measured))
        return is_failure

    def forget_failures(self, provider: str) -> bool:
        """Delete the failures of a provider that has joined again; return whether there were any."""
        own = or_(links.c.one == provider, links.c.other == provider)
        return self._connection.execute(delete(links).where(own, links.c.failure != "")).rowcount > 0


def _record(row: Row[Any]) -> LinkRecord:
    return LinkRecord(**row._mapping)
