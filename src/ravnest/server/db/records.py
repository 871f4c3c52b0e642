"""Rows of the database as values."""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobState
from ravnest.schemas.link_tests import LinkRoute
from ravnest.schemas.providers import ProviderOffer, ProviderState, TlsRejections
from ravnest.schemas.reachability import AddressCheck

LOST = "lost"
"""Phase of an assignment whose provider is gone, while another one may take its place."""
ENDED = ("finished", "failed", "stopped", LOST)
"""Phases of an assignment that its provider does not work on any more."""


@dataclass(frozen=True)
class MemberRecord:
    """A member: somebody who joined with a token and holds a credential."""

    id: str
    role: ApiRole
    name: str


@dataclass(frozen=True)
class ProviderRecord:
    """A provider and its state."""

    id: str
    offer: ProviderOffer
    state: ProviderState
    reason: str
    job: str | None
    changed: float
    left: bool
    """True if it left by itself; it comes back with a new offer, not with a late heartbeat."""
    checks: tuple[AddressCheck, ...] = ()
    """Results of dialling its addresses back; empty if that was never done."""


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
class LinkRecord:
    """Newest figures of the link between two providers."""

    one: str
    """Provider with the lower id."""
    other: str
    addresses: str
    """Addresses of both, when it was measured."""
    time: float
    failure: str = ""
    """Why they could not connect; empty if they could."""
    route: LinkRoute = "direct"
    forward: float = 0.0
    """Mbit/s from ``one`` to ``other``."""
    back: float = 0.0
    round_trip: float = 0.0
    """Seconds."""


@dataclass(frozen=True)
class AssignmentRecord:
    """An assignment without its body, which can be long."""

    id: str
    job: str
    provider: str
    node: int
    cluster: int
    role: str
    phase: str
    reason: str
    records: int
    """Number of telemetry records received, including those no longer stored."""
    losses: int
    """Number of stored losses."""
    has_result: bool
    tls_rejections: TlsRejections
    """Rejections reported so far."""
    generation: int = 0
    """Number of assignments of the same node before this one."""
    cause: str = ""
    """Cause of its failure or loss, a ``FailureCause``; empty while it works."""
    phase_before: str = ""
    """Phase before it was lost."""
    refills: int = 0
    """Number of times that the place of its node was filled since ``checkpoint``, with this one."""
    checkpoint: int = 0
    """Updates of the newest checkpoint of its cluster when it got its place."""

    @property
    def has_ended(self) -> bool:
        """Return whether its provider does not work on it any more."""
        return self.phase in ENDED
