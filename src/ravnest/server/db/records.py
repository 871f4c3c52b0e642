"""Rows of the database as values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ravnest.schemas.auth import ApiRole
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import JobState
from ravnest.schemas.link_tests import LinkRoute
from ravnest.schemas.providers import (
    FailureCause,
    ProviderOffer,
    ProviderState,
    TlsRejections,
    UsedMemory,
)
from ravnest.schemas.reachability import AddressCheck
from ravnest.types import CheckpointId

LossCause = FailureCause | Literal["unconfirmed", "check", "revoked"]
"""Cause of the loss of a provider. ``unconfirmed``: it says that the job fails on any machine, and no
other provider has said so. ``check``: a spot check has found wrong values, and the provider gets no
place in the job again. ``revoked``: its credential was revoked, and it may not return."""
FAILURES: tuple[LossCause, ...] = ("machine", "unconfirmed", "check")
"""Causes that count as a failure of the provider."""
EXCLUDED: tuple[LossCause, ...] = ("check", "revoked")
"""Causes after which the other nodes of the job close their links to the provider."""
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
class ProviderPresence:
    """State of a provider without its offer, which takes longer to read."""

    id: str
    state: ProviderState
    reason: str
    job: str | None
    left: bool
    """True if it left by itself; it comes back with a new offer, not with a late heartbeat."""


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
    stated: float = 0.0
    """Its GFLOP/s by its own words; ``offer`` has less if its work has shown less."""


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
    attempt: int = 0
    """Number of plans that were given up: providers were lost, or another plan was faster."""
    replans: int = 0
    """Number of them without a new checkpoint."""
    resumed: int = -1
    """Updates of the checkpoint at the last new plan; -1: there was none."""


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
class StageCheckpointRecord:
    """Uploaded checkpoint of one stage."""

    job: str
    plan: str
    """Digest of the plan."""
    run: str
    taken: str
    """Attempt of the run in which it was taken."""
    id: CheckpointId
    cluster: int
    stage: int
    stages: int
    """Number of stages of the cluster."""
    attempt: int
    """Number of plans of the job before this one."""
    time: float
    tensors: Artifact
    manifest: Artifact


@dataclass(frozen=True)
class StageTimesRecord:
    """Seconds of a stage for all micro-batches of an update, at first and now; 0: not known yet."""

    job: str
    attempt: int
    """Number of plans of the job before the one that the stage belongs to."""
    cluster: int
    stage: int
    provider: str
    since: float
    """Time from which on this provider has the stage."""
    baseline: float = 0.0
    """Median at first."""
    recent: float = 0.0
    """Median now."""
    recent_least: float = 0.0
    """Lower quartile now."""
    link_baseline: float = 0.0
    """Median at first on the link to the next stage and back."""
    link_recent_least: float = 0.0
    """Lower quartile of the same now."""


@dataclass(frozen=True)
class PartOutcomes:
    """How the parts of a provider in all jobs ended."""

    finished: int = 0
    failed: int = 0
    """Parts that the provider could not do, or during which it was lost; not those whose job failed."""


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
    """Cause of its failure or loss, a ``LossCause``; empty while it works."""
    phase_before: str = ""
    """Phase before it was lost."""
    refills: int = 0
    """Number of times that the place of its node was filled since ``checkpoint``, with this one."""
    checkpoint: int = 0
    """Updates of the newest checkpoint of its cluster when it got its place."""
    attempt: int = 0
    """Number of plans of its job before the one that it belongs to."""
    used_memory: int | None = None
    """Bytes that its worker takes, newest figure; ``None``: not known."""
    peak_memory: int | None = None
    """Largest of these figures."""

    def with_memory(self, memory: UsedMemory | None) -> AssignmentRecord:
        """Return the record with the figures of a report; the peak of an earlier worker stays."""
        if memory is None:
            return self
        peak = max(memory.now, memory.peak, self.peak_memory or 0)
        return replace(self, used_memory=memory.now, peak_memory=peak)

    @property
    def has_ended(self) -> bool:
        """Return whether its provider does not work on it any more."""
        return self.phase in ENDED
