"""Providers and their states."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Connection, Row, bindparam, func, insert, or_, select, update

from ravnest.schemas.base import clipped
from ravnest.schemas.providers import ProviderOffer, ProviderState
from ravnest.schemas.reachability import AddressCheck
from ravnest.server.db.events import EventRepository
from ravnest.server.db.records import ProviderPresence, ProviderRecord
from ravnest.server.db.tables import provider_rates, providers
from ravnest.server.lifecycle import NEW, check_transition

_CHECKS = TypeAdapter(tuple[AddressCheck, ...])
_PRESENCE = select(*(providers.c[name] for name in ("id", "state", "reason", "job", "left"))).where(
    providers.c.id.in_(bindparam("ids", expanding=True))
)
_NAMES = select(providers.c.id, func.json_extract(providers.c.offer, "$.name").label("name")).where(
    providers.c.id.in_(bindparam("ids", expanding=True))
)
_ALL = select(providers, provider_rates.c.rate).join(provider_rates, isouter=True)
_BY_ID = _ALL.where(providers.c.id == bindparam("provider"))


class ProviderRepository:
    """All providers, including lost ones."""

    def __init__(self, connection: Connection, events: EventRepository, now: float) -> None:
        self._connection = connection
        self._events = events
        self._now = now

    def add(self, provider: str, offer: ProviderOffer, reason: str) -> None:
        """Add a new provider."""
        check_transition("provider", NEW, ProviderState.OFFERED)
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
        """Replace the offer of a provider; its state stays."""
        chosen = update(providers).where(providers.c.id == provider)
        self._connection.execute(chosen.values(offer=offer.model_dump_json()))

    def set_checks(self, provider: str, checks: Sequence[AddressCheck]) -> None:
        """Store the results of dialling a provider back."""
        chosen = update(providers).where(providers.c.id == provider)
        self._connection.execute(chosen.values(checks=_CHECKS.dump_json(tuple(checks)).decode()))

    def set_rate(self, provider: str, rate: float, job: str) -> None:
        """Store the GFLOP/s that the work of a provider in a job has shown; it replaces earlier ones."""
        values = {"provider": provider, "rate": rate, "job": job, "time": self._now}
        self._connection.execute(insert(provider_rates).prefix_with("OR REPLACE").values(**values))

    def move(
        self,
        record: ProviderRecord,
        after: ProviderState,
        reason: str,
        *,
        job: str | None = None,
        left: bool = False,
    ) -> None:
        """Set a provider's state; raise ``TransitionError`` if the transition is not allowed."""
        check_transition("provider", record.state, after)
        self._connection.execute(
            update(providers)
            .where(providers.c.id == record.id)
            .values(state=after, reason=clipped(reason), job=job, changed=self._now, left=left)
        )
        self._events.add(
            "provider", record.id, reason, before=record.state, after=after, job=job or record.job
        )

    def get(self, provider: str) -> ProviderRecord | None:
        """Return a provider by id."""
        row = self._connection.execute(_BY_ID, {"provider": provider}).first()
        return None if row is None else _record(row)

    def presence(self, provider: str) -> ProviderPresence | None:
        """Return the state of a provider by id."""
        return self.presences([provider]).get(provider)

    def presences(self, ids: Sequence[str]) -> dict[str, ProviderPresence]:
        """Return the states of providers by id."""
        return {
            name: ProviderPresence(name, ProviderState(state), reason, job, left)
            for name, state, reason, job, left in self._connection.execute(_PRESENCE, {"ids": ids})
        }

    def chosen(self, ids: Iterable[str]) -> list[ProviderRecord]:
        """Return providers by their ids, in the order of the ids."""
        query = _ALL.where(providers.c.id.in_(list(ids))).order_by(providers.c.id)
        return [_record(row) for row in self._connection.execute(query)]

    def present(self, lost_since: float = float("inf")) -> list[ProviderRecord]:
        """Return providers that are not lost, or were lost at ``lost_since`` or later, ordered by id."""
        listed = or_(providers.c.state != ProviderState.LOST, providers.c.changed >= lost_since)
        query = _ALL.where(listed).order_by(providers.c.id)
        return [_record(row) for row in self._connection.execute(query)]

    def has_idle(self) -> bool:
        """Return whether a provider waits for work."""
        query = select(providers.c.id).where(providers.c.state == ProviderState.OFFERED).limit(1)
        return self._connection.execute(query).first() is not None

    def names(self, ids: Iterable[str]) -> dict[str, str]:
        """Return the names of providers by id."""
        found = self._connection.execute(_NAMES, {"ids": list(ids)}).all()
        return {row.id: row.name for row in found}

    def of_job(self, job: str) -> list[ProviderRecord]:
        """Return the providers that are reserved for a job or train it."""
        query = _ALL.where(providers.c.job == job).order_by(providers.c.id)
        return [_record(row) for row in self._connection.execute(query)]


@functools.lru_cache(maxsize=4096)
def _parsed_offer(text: str) -> ProviderOffer:
    return ProviderOffer.model_validate_json(text)


@functools.lru_cache(maxsize=4096)
def _parsed_checks(text: str) -> tuple[AddressCheck, ...]:
    return _CHECKS.validate_json(text)


def _record(row: Row[Any]) -> ProviderRecord:
    offer = _parsed_offer(row.offer)
    stated = offer.compute
    if row.rate is not None and row.rate < stated:
        offer = offer.model_copy(update={"compute": row.rate})
    return ProviderRecord(
        id=row.id,
        offer=offer,
        stated=stated,
        state=ProviderState(row.state),
        reason=row.reason,
        job=row.job,
        changed=row.changed,
        left=row.left,
        checks=_parsed_checks(row.checks),
    )
