"""Providers, and where each is in its life."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, func, insert, or_, select, update

from ravnest.schemas.providers import ProviderOffer, ProviderState
from ravnest.server.db.events import EventRepository, clipped
from ravnest.server.db.records import ProviderRecord
from ravnest.server.db.tables import providers
from ravnest.server.lifecycle import NEW, check


class ProviderRepository:
    """All that ever offered something."""

    def __init__(self, connection: Connection, events: EventRepository, now: float) -> None:
        self._connection = connection
        self._events = events
        self._now = now

    def add(self, provider: str, offer: ProviderOffer, reason: str) -> None:
        """A provider that was not known."""
        check("provider", NEW, ProviderState.OFFERED)
        self._connection.execute(
            insert(providers).values(
                id=provider,
                offer=offer.model_dump_json(),
                state=ProviderState.OFFERED,
                reason=clipped(reason),
                changed=self._now,
            )
        )
        self._events.add("provider", provider, reason, before=NEW, after=ProviderState.OFFERED)

    def update(self, provider: str, offer: ProviderOffer) -> None:
        """Another offer of a known provider; its state stays."""
        chosen = update(providers).where(providers.c.id == provider)
        self._connection.execute(chosen.values(offer=offer.model_dump_json()))

    def move(
        self,
        record: ProviderRecord,
        after: ProviderState,
        reason: str,
        *,
        job: str | None = None,
        left: bool = False,
    ) -> None:
        """Change a provider's state; ``TransitionError`` if that cannot be."""
        check("provider", record.state, after)
        self._connection.execute(
            update(providers)
            .where(providers.c.id == record.id)
            .values(state=after, reason=clipped(reason), job=job, changed=self._now, left=left)
        )
        about = job or record.job
        self._events.add("provider", record.id, reason, before=record.state, after=after, job=about)

    def get(self, provider: str) -> ProviderRecord | None:
        """A provider by id."""
        row = self._connection.execute(select(providers).where(providers.c.id == provider)).first()
        return None if row is None else _record(row)

    def present(self, lost_since: float = float("inf")) -> list[ProviderRecord]:
        """Those that are not lost, and those that were lost at that time or later, by id."""
        here = or_(providers.c.state != ProviderState.LOST, providers.c.changed >= lost_since)
        query = select(providers).where(here).order_by(providers.c.id)
        return [_record(row) for row in self._connection.execute(query)]

    def names(self, ids: Iterable[str]) -> dict[str, str]:
        """How providers call themselves."""
        name = func.json_extract(providers.c.offer, "$.name").label("name")
        query = select(providers.c.id, name).where(providers.c.id.in_(list(ids)))
        return {row.id: row.name for row in self._connection.execute(query)}

    def of_job(self, job: str) -> list[ProviderRecord]:
        """Those that are reserved for a job or train it."""
        query = select(providers).where(providers.c.job == job).order_by("id")
        return [_record(row) for row in self._connection.execute(query)]


def _record(row: Row[Any]) -> ProviderRecord:
    return ProviderRecord(
        id=row.id,
        offer=ProviderOffer.model_validate_json(row.offer),
        state=ProviderState(row.state),
        reason=row.reason,
        job=row.job,
        changed=row.changed,
        left=row.left,
    )
