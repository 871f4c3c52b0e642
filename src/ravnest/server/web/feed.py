"""State of the page that all browsers share: jobs as cards and providers as rows.

It is read from the database at most once per ``PAGE_PAUSE``, however many browsers watch, and not at all
while nobody does. Items that have not changed stay the same objects, so that comparing two states is
cheap.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ravnest.deadlines import PAGE_PAUSE
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobState, JobView
from ravnest.schemas.providers import ProviderState
from ravnest.schemas.reachability import Reachability, ReachabilityKind, RelayView
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import JobRecord, MemberRecord, PartOutcomes, ProviderRecord
from ravnest.server.reachability.status import reachability
from ravnest.server.server import Server
from ravnest.server.views import job_view
from ravnest.server.web.curves import loss_buckets
from ravnest.server.web.sparkline import MOST_POINTS, Point, extended

MOST_JOBS = 100
"""Newest jobs of all, and of each requester that watches; those that have not ended are always shown."""
_SILENT = 12.0
"""Seconds without a request after which the page says since when a provider is silent."""


@dataclass(frozen=True, slots=True)
class JobCard:
    """A job in the overview."""

    id: str
    name: str
    owner: str
    state: JobState
    reason: str
    created: float
    changed: float
    updates: int
    total: int | None
    epoch: int
    epochs: int
    loss: float | None
    diverged: bool
    validation: float | None
    metric: str
    rate: float | None
    """Samples per second."""
    left: float | None
    """Seconds until the end."""
    staleness: int
    recoveries: int
    clusters: int
    nodes: int
    phases: tuple[tuple[str, int], ...]
    """Number of nodes in each phase."""
    degraded: str
    curve: tuple[Point, ...]
    """Some losses, for a sparkline; sent once, browsers continue it."""


CONTINUED = ("curve",)
"""Fields of a card that browsers continue by themselves."""


@dataclass(frozen=True, slots=True)
class ProviderRow:
    """A provider in the overview."""

    id: str
    name: str
    state: ProviderState
    reason: str
    job: str | None
    ram: float
    cores: int
    compute: float
    bandwidth: float
    delay: float
    """Seconds to the server and back."""
    reach: ReachabilityKind
    reach_reason: str
    sandbox: str | None
    version: str
    torch: str
    changed: float
    silent: float | None
    """Time of the last request, if that is some time ago."""
    finished: int
    """Parts of jobs that it has trained to the end, and parts that failed or were lost."""
    failed: int


@dataclass(frozen=True)
class PageState:
    """Everything that the overview shows, at one time."""

    time: float
    jobs: Mapping[str, JobCard] = field(default_factory=dict)
    """Newest first."""
    providers: Mapping[str, ProviderRow] = field(default_factory=dict)
    discreet: Mapping[str, ProviderRow] = field(default_factory=dict)
    """The same providers without their work, for requesters that it does not concern."""
    used_memory: int = 0
    """Bytes that the workers of all jobs take."""

    def seen_by(self, member: MemberRecord) -> PageState:
        """Return the part of the state that a member may see."""
        if member.role in (ApiRole.VIEWER, ApiRole.ADMIN):
            return self
        if member.role is not ApiRole.REQUESTER:
            own = {key: row for key, row in self.providers.items() if key == member.id}
            return PageState(self.time, {}, own)
        jobs = {key: card for key, card in self.jobs.items() if card.owner == member.id}
        rows = {
            key: row if row.job is None or row.job in jobs else self.discreet[key]
            for key, row in self.providers.items()
        }
        return PageState(self.time, jobs, rows, used_memory=self.used_memory)


@dataclass(frozen=True)
class _KnownRow:
    record: ProviderRecord
    row: ProviderRow
    discreet: ProviderRow


class PageFeed:
    """Reads the state of the page, and keeps the last one."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._rows: dict[str, _KnownRow] = {}
        self._relays: Mapping[str, RelayView] = {}
        self._read = -math.inf
        self._state = PageState(0.0)
        self._owners: Counter[str] = Counter()
        """Requesters that watch, with the number of their pages."""

    @contextmanager
    def watched_by(self, member: MemberRecord) -> Iterator[None]:
        """Read the newest jobs of a requester too while the block runs, however old they are."""
        if member.role is not ApiRole.REQUESTER:
            yield
            return
        with self._lock:
            self._owners[member.id] += 1
            self._read = -math.inf
        try:
            yield
        finally:
            with self._lock:
                self._owners[member.id] -= 1
                self._owners += Counter()  # without those that are gone

    def rest(self) -> float:
        """Return the seconds until ``current`` reads a new state."""
        return max(0.0, self._read + PAGE_PAUSE - self._server.clock.steady())

    def current(self) -> PageState:
        """Return the state, at most ``PAGE_PAUSE`` seconds old."""
        with self._lock:
            now = self._server.clock.steady()
            if now - self._read >= PAGE_PAUSE:
                self._state = self._next()
                self._read = now
            return self._state

    def _next(self) -> PageState:
        server = self._server
        wall = server.clock.wall()
        with server.db.read() as db:
            jobs = db.jobs.shown(self._owners, MOST_JOBS)
            cards = {record.id: self._card(db, record) for record in jobs}
            used = db.assignments.used_memory()
            records = db.providers.present(wall - server.settings.shown_after_loss)
            outcomes = db.assignments.outcomes(each.id for each in records if not self._is_known(each))
        relays = server.relay_service.live()
        known = self._rows if relays == self._relays else {}
        self._relays = relays
        self._rows = {
            each.id: self._row(each, known.get(each.id), outcomes.get(each.id), wall) for each in records
        }
        rows = {key: known.row for key, known in self._rows.items()}
        discreet = {key: known.discreet for key, known in self._rows.items()}
        return PageState(wall, cards, rows, discreet, used)

    def _card(self, db: Transaction, record: JobRecord) -> JobCard:
        known = self._state.jobs.get(record.id)
        if known is not None and known.changed == record.changed:
            return known
        view = job_view(db, record, with_records=False)
        if known is None:
            buckets = loss_buckets(db, record.id, MOST_POINTS // 2).buckets
            curve = tuple((each.last, each.mean) for each in buckets if each.mean is not None)
        else:
            curve = known.curve
        return _card(view, extended(curve, max(view.progress.updates - 1, 0), view.progress.loss))

    def _is_known(self, record: ProviderRecord) -> bool:
        """Return ``True`` if a provider has not changed; its parts end with a change of its state."""
        known = self._rows.get(record.id)
        return known is not None and known.record == record

    def _row(
        self,
        record: ProviderRecord,
        known: _KnownRow | None,
        outcomes: PartOutcomes | None,
        now: float,
    ) -> _KnownRow:
        seen = self._server.provider_service.liveness.seen(record.id) or record.changed
        silent = round(seen) if now - seen > _SILENT else None
        if known is not None and (known.record, known.row.silent) == (record, silent):
            return known
        found = reachability(record.offer, record.checks, self._relays)
        before = self._rows.get(record.id)
        if outcomes is None and before is not None:
            outcomes = PartOutcomes(before.row.finished, before.row.failed)
        row = _provider_row(record, found, silent, outcomes or PartOutcomes())
        discreet = replace(row, job=None, reason="it works for another requester")
        return _KnownRow(record, row, discreet)


def _card(view: JobView, curve: tuple[Point, ...]) -> JobCard:
    progress, nodes = view.progress, view.assignments
    phases: dict[str, int] = {}
    for each in nodes:
        phases[each.phase] = phases.get(each.phase, 0) + 1
    return JobCard(
        id=view.id,
        name=view.name,
        owner=view.owner,
        state=view.state,
        reason=view.reason,
        created=view.created,
        changed=view.changed,
        updates=progress.updates,
        total=progress.total_updates,
        epoch=progress.epoch,
        epochs=progress.epochs,
        loss=progress.loss,
        diverged=progress.diverged,
        validation=progress.validation,
        metric=progress.metric,
        rate=progress.samples_per_second,
        left=progress.seconds_left,
        staleness=progress.staleness,
        recoveries=view.recoveries,
        clusters=len({each.cluster for each in nodes}),
        nodes=len(nodes),
        phases=tuple(sorted(phases.items())),
        degraded=view.degraded,
        curve=curve,
    )


def _provider_row(
    record: ProviderRecord, found: Reachability, silent: float | None, outcomes: PartOutcomes
) -> ProviderRow:
    offer = record.offer
    return ProviderRow(
        id=record.id,
        name=offer.name,
        state=record.state,
        reason=record.reason,
        job=record.job,
        ram=offer.ram,
        cores=offer.cores,
        compute=offer.compute,
        bandwidth=offer.bandwidth,
        delay=offer.round_trip,
        reach=found.kind,
        reach_reason=found.reason,
        sandbox=offer.sandbox,
        version=offer.version,
        torch=offer.torch,
        changed=record.changed,
        silent=silent,
        finished=outcomes.finished,
        failed=outcomes.failed,
    )
