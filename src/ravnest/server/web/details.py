"""Details of one job or provider for the page, built from the database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ravnest.schemas.jobs import (
    EventView,
    GraphLoss,
    JobSpec,
    JobView,
    MemoryView,
    NamedComponent,
)
from ravnest.schemas.providers import Assignment
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import FAILURES, AssignmentRecord, JobRecord, LinkRecord
from ravnest.server.job_status import holders, lineage, roots
from ravnest.server.views import history, job_view
from ravnest.server.web.curves import MicrobatchSizes, current_rate, microbatch_sizes
from ravnest.server.web.layers import StageLayers, stage_layers
from ravnest.telemetry import RecoveryRecord, RoundRecord, TimingRecord

_ROUNDS = 40
_MARKS = 200
_EVENTS = 200
_PARTS = 100


@dataclass(frozen=True)
class TimeShares:
    """Shares of time of a stage, between 0 and 1; sending overlaps with computing."""

    computing: float
    sending: float | None
    """Share in which the busier of its links to the neighbours sends; ``None``: not known."""


@dataclass(frozen=True)
class StageBox:
    """A node in the drawing of a job."""

    node: int
    cluster: int
    stage: int
    role: str
    provider: str
    name: str
    phase: str
    worker_phase: str
    generation: int
    memory: MemoryView
    layers: StageLayers | None
    computing: float | None
    """Shares of time, between 0 and 1; ``None``: not known yet."""
    sending: float | None
    in_flight: int | None
    window: int | None
    averaging: bool
    """The cluster of this Root takes part in a round now."""


@dataclass(frozen=True)
class StageLink:
    """A measured link between two neighbours of a pipeline."""

    node: int
    """The node nearer to the Root."""
    next: int
    route: str
    forward: float
    """Mbit/s towards the Leaf."""
    back: float
    delay: float
    """Seconds there and back."""
    failure: str


@dataclass(frozen=True)
class RoundEntry:
    """An averaging round, as the coordinating Root reported it."""

    time: float
    round: int
    mode: str
    committed: bool
    clusters: tuple[int, ...]
    seconds: float
    sent_bytes: int
    attempts: int
    reason: str


@dataclass(frozen=True)
class TimeMark:
    """A moment on the axis of updates."""

    kind: str
    """``checkpoint`` or ``takeover``."""
    update: int
    time: float
    words: str


@dataclass(frozen=True)
class JobDetail:
    """Everything about one job except its curves."""

    view: JobView
    nodes: tuple[StageBox, ...]
    links: tuple[StageLink, ...]
    rings: tuple[tuple[int, ...], ...]
    """Nodes that average tensors with each other, one of each cluster."""
    rounds: tuple[RoundEntry, ...]
    """Newest first."""
    marks: tuple[TimeMark, ...]
    events: tuple[EventView, ...]
    """Newest first."""
    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ProviderPart:
    """An assignment that a provider has or had."""

    job: str
    job_name: str
    submitted: float
    """Time at which the job was submitted."""
    node: int
    cluster: int
    role: str
    phase: str
    reason: str
    cause: str


@dataclass(frozen=True)
class ProviderDetail:
    """History of one provider."""

    id: str
    parts: tuple[ProviderPart, ...]
    """Newest first."""
    finished: int
    failed: int
    lost: int
    events: tuple[EventView, ...]
    """Newest first."""


def job_detail(db: Transaction, record: JobRecord, path_of: Callable[[str], Path]) -> JobDetail:
    """Return the details of a job; ``path_of`` gives the path of an artifact."""
    view = job_view(db, record)
    assignments = db.assignments.of_job(record.id)
    spec = db.jobs.spec(record.id)
    shares = _shares(view, spec)
    held = holders(assignments)
    bodies = {each.node: db.assignments.body(each.id) for each in held}
    nodes = _nodes(view, held, bodies, shares, path_of)
    chain = history(db, record.id, assignments)
    rounds = sorted(_rounds(db, assignments), key=lambda each: -each.time)[:_ROUNDS]
    return JobDetail(
        view=view,
        nodes=nodes,
        links=_links(db, nodes),
        rings=_rings(bodies.values()),
        rounds=tuple(rounds),
        marks=_marks(db, chain),
        events=tuple(db.events.newest(_EVENTS, job=record.id)),
        settings=_settings(spec),
    )


def provider_detail(
    db: Transaction, provider: str, may_see: Callable[[JobRecord], bool], *, with_events: bool
) -> ProviderDetail:
    """Return the history of a provider, as far as the jobs may be seen."""
    own = db.assignments.of_provider(provider)
    jobs = {each.job: db.jobs.get(each.job) for each in own}
    seen = {key: job for key, job in jobs.items() if job is not None and may_see(job)}
    parts = [
        ProviderPart(
            job=each.job,
            job_name=seen[each.job].name,
            submitted=seen[each.job].created,
            node=each.node,
            cluster=each.cluster,
            role=each.role,
            phase=each.phase,
            reason=each.reason,
            cause=each.cause,
        )
        for each in own
        if each.job in seen
    ]
    events = db.events.newest(_EVENTS, subject=provider) if with_events else []
    return ProviderDetail(
        id=provider,
        parts=tuple(parts[:_PARTS]),
        finished=sum(each.phase == "finished" for each in parts),
        failed=sum(each.phase == "failed" or each.cause in FAILURES for each in parts),
        lost=sum(each.phase == "lost" for each in parts),
        events=tuple(events),
    )


def time_shares(timing: TimingRecord, samples_per_second: float, parts: MicrobatchSizes) -> TimeShares:
    """Return the shares of time of a stage at the rate of its cluster."""
    rate = samples_per_second / parts.samples
    links = [each for each in (timing.to_next_busy, timing.to_previous_busy) if each is not None]
    return TimeShares(
        computing=min(1.0, parts.computing(timing) * rate),
        sending=min(1.0, max(links) * rate) if links else None,
    )


def _shares(view: JobView, spec: JobSpec) -> Mapping[tuple[int, int], TimeShares]:
    """Return the shares of time by cluster and stage, as far as rates and timings are known."""
    if view.progress.schedule is None:
        return {}
    parts = microbatch_sizes(spec.training, view.progress.schedule)
    return {
        (each.cluster, timing.stage): time_shares(timing, rate, parts)
        for each in view.clusters
        if each.pace is not None and (rate := current_rate(each.pace))
        for timing in each.timings
    }


def _nodes(
    view: JobView,
    held: Sequence[AssignmentRecord],
    bodies: Mapping[int, Assignment],
    shares: Mapping[tuple[int, int], TimeShares],
    path_of: Callable[[str], Path],
) -> tuple[StageBox, ...]:
    seen = {each.node: each for each in view.assignments}
    found = []
    for each in held:
        body = bodies[each.node]
        known, share = seen[each.node], shares.get((each.cluster, body.node_spec.stage))
        found.append(
            StageBox(
                node=each.node,
                cluster=each.cluster,
                stage=body.node_spec.stage,
                role=each.role,
                provider=each.provider,
                name=known.provider_name,
                phase=each.phase,
                worker_phase="" if known.worker_phase is None else known.worker_phase.phase,
                generation=each.generation,
                memory=known.memory or MemoryView(),
                layers=stage_layers(path_of(body.weights.sha256)),
                computing=None if share is None else share.computing,
                sending=None if share is None else share.sending,
                in_flight=None if known.queue is None else known.queue.in_flight,
                window=None if known.queue is None else known.queue.window or None,
                averaging=known.queue is not None and known.queue.averaging,
            )
        )
    return tuple(found)


def _rings(bodies: Iterable[Assignment]) -> tuple[tuple[int, ...], ...]:
    """Return the rings of a plan; rings of the same nodes are one."""
    found = {
        tuple(member.node for member in ring.members) for body in bodies for ring in body.node_spec.rings
    }
    return tuple(sorted(each for each in found if len(each) > 1))


def _links(db: Transaction, nodes: Sequence[StageBox]) -> tuple[StageLink, ...]:
    measured = {
        (each.one, each.other): each for each in db.links.between({node.provider for node in nodes})
    }
    places = {(node.cluster, node.stage): node for node in nodes}
    pairs = [
        (node, places[node.cluster, node.stage + 1])
        for node in nodes
        if (node.cluster, node.stage + 1) in places
    ]
    found = []
    for one, other in pairs:
        low, high = sorted((one.provider, other.provider))
        record = measured.get((low, high))
        if record is not None:
            found.append(_link(one, other, record))
    return tuple(found)


def _link(one: StageBox, other: StageBox, record: LinkRecord) -> StageLink:
    is_same_way = record.one == one.provider
    return StageLink(
        node=one.node,
        next=other.node,
        route=record.route,
        forward=record.forward if is_same_way else record.back,
        back=record.back if is_same_way else record.forward,
        delay=record.round_trip,
        failure=record.failure,
    )


def _rounds(db: Transaction, assignments: Sequence[AssignmentRecord]) -> list[RoundEntry]:
    return [
        RoundEntry(
            time=time,
            round=each.round,
            mode=each.mode,
            committed=each.committed,
            clusters=each.clusters,
            seconds=each.seconds,
            sent_bytes=each.sent_bytes,
            attempts=each.attempts,
            reason=each.reason,
        )
        for root in roots(assignments)
        for held in lineage(assignments, root.node)
        for time, each in db.telemetry.timed(held.id, RoundRecord, _ROUNDS)
    ]


def _marks(db: Transaction, chain: Sequence[AssignmentRecord]) -> tuple[TimeMark, ...]:
    found = []
    for each in chain:
        for mark in db.telemetry.checkpoint_times(each.id):
            words = f"checkpoint of update {mark.update}"
            found.append(TimeMark("checkpoint", mark.update, mark.time, words))
        for time, record in db.telemetry.timed(each.id, RecoveryRecord, _MARKS):
            words = f"{record.lost}; {record.repeated} updates are repeated"
            found.append(TimeMark("takeover", record.update, time, words))
    return tuple(sorted(found, key=lambda each: each.time)[-_MARKS:])


def _settings(spec: JobSpec) -> tuple[tuple[str, str], ...]:
    training = spec.training
    loss = "of the requester" if isinstance(training.loss, GraphLoss) else _component(training.loss)
    named = {
        "optimizer": _component(training.optimizer),
        "scheduler": "none" if training.scheduler is None else _component(training.scheduler),
        "loss": loss,
        "samples": f"{spec.train.samples:,}",
        "epochs": f"{training.epochs:,}",
        "batch size": f"{training.batch_size:,}",
        "batches per update": f"{training.update_frequency:,}",
        "schedule": training.schedule,
        "compression": training.compression or "none",
        "clusters": "chosen by the plan" if spec.clusters is None else str(spec.clusters),
    }
    return tuple(named.items())


def _component(component: NamedComponent) -> str:
    params = ", ".join(f"{name}={value}" for name, value in component.params.items())
    return f"{component.name}({params})"
