"""What the store holds, as values."""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import ProviderOffer, ProviderState, TlsRejections

ENDED = ("finished", "failed", "stopped")
"""Phases after which nothing more is expected of a part."""


@dataclass(frozen=True)
class MemberRecord:
    """Who joined; known by a credential."""

    id: str
    role: ApiRole
    name: str


@dataclass(frozen=True)
class ProviderRecord:
    """A provider and where it is in its life."""

    id: str
    offer: ProviderOffer
    state: ProviderState
    reason: str
    job: str | None
    changed: float
    left: bool
    """It went by itself: it comes back with an offer, not with a late heartbeat."""


@dataclass(frozen=True)
class JobRecord:
    """A job without its specification, which can be long."""

    id: str
    name: str
    owner: str
    epochs: int
    min_providers: int
    max_providers: int | None
    state: JobState
    reason: str
    created: float
    changed: float
    plan: str
    passed_over: int


@dataclass(frozen=True)
class AssignmentRecord:
    """A provider's part in a job, without the assignment itself."""

    id: str
    job: str
    provider: str
    node: int
    cluster: int
    role: str
    phase: str
    reason: str
    figures: tuple[float | None, ...]
    losses: int
    """So many are known."""
    has_result: bool
    strangers: TlsRejections
    """So many are known of."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is expected of it."""
        return self.phase in ENDED
