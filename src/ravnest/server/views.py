"""Views of providers and jobs for members, built from the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ravnest.schemas.jobs import (
    AssignmentView,
    ClusterProgress,
    JobProgress,
    JobView,
    LossHistory,
    NodeWarning,
)
from ravnest.schemas.link_tests import LinkView
from ravnest.schemas.providers import ProviderView
from ravnest.schemas.reachability import RelayView
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import AssignmentRecord, JobRecord, ProviderRecord
from ravnest.server.job_status import leading_root, roots
from ravnest.server.liveness import Liveness
from ravnest.server.reachability.status import reachability
from ravnest.telemetry import (
    PhaseRecord,
    QueueRecord,
    RoundRecord,
    ScheduleRecord,
    ValidationRecord,
)

_SHOWN_WARNINGS = 20


def provider_view(
    record: ProviderRecord, liveness: Liveness, relays: Mapping[str, RelayView]
) -> ProviderView:
    """Return a provider as members see it; ``relays`` are those that work now."""
    found = reachability(record.offer, record.checks, relays)
    return ProviderView(
        id=record.id,
        offer=record.offer,
        state=record.state,
        reason=record.reason,
        job=record.job,
        seen=liveness.seen(record.id) or record.changed,
        reachability=found.kind,
        reachability_reason=found.reason,
    )


def provider_views(
    db: Transaction, liveness: Liveness, lost_since: float, relays: Mapping[str, RelayView]
) -> list[ProviderView]:
    """Return the connected providers and those lost at ``lost_since`` or later."""
    return [provider_view(record, liveness, relays) for record in db.providers.present(lost_since)]


def link_views(db: Transaction) -> list[LinkView]:
    """Return the newest figures of all measured links."""
    records = db.links.all()
    names = db.providers.names({name for record in records for name in (record.one, record.other)})
    return [
        LinkView(
            one=record.one,
            other=record.other,
            names=(names[record.one], names[record.other]),
            time=record.time,
            failure=record.failure,
            route=record.route,
            forward=record.forward,
            back=record.back,
            round_trip=record.round_trip,
        )
        for record in records
    ]


def job_view(db: Transaction, record: JobRecord, *, with_records: bool = True) -> JobView:
    """Return a job as its requester sees it; ``with_records`` adds the newest records of its nodes."""
    assignments = db.assignments.of_job(record.id)
    names = db.providers.names(each.provider for each in assignments)
    return JobView(
        id=record.id,
        name=record.name,
        owner=record.owner,
        state=record.state,
        reason=record.reason,
        created=record.created,
        changed=record.changed,
        progress=_progress(db, record, leading_root(assignments)),
        assignments=tuple(
            _assignment_view(db, each, names, with_records=with_records) for each in assignments
        ),
        clusters=tuple(_cluster(db, root) for root in roots(assignments)) if with_records else (),
        warnings=_warnings(db, assignments) if with_records else (),
        plan=record.plan,
    )


def job_losses(db: Transaction, job: str, first: int) -> LossHistory:
    """Return a job's losses from update ``first`` on, and all its validations."""
    root = leading_root(db.assignments.of_job(job))
    found = [] if root is None else db.telemetry.losses(root.id, first)
    return LossHistory(
        first=first,
        updates=tuple(record.update for record in found),
        losses=tuple(record.loss for record in found),
        validations=() if root is None else db.telemetry.validations(root.id),
    )


def _progress(db: Transaction, record: JobRecord, root: AssignmentRecord | None) -> JobProgress:
    last = None if root is None else db.telemetry.last_loss(root.id)
    validations = [] if root is None else db.telemetry.newest(root.id, ValidationRecord)
    schedules = [] if root is None else db.telemetry.newest(root.id, ScheduleRecord)
    return JobProgress(
        updates=0 if last is None else last.update + 1,
        epochs=record.epochs,
        loss=None if last is None else last.loss,
        diverged=last is not None and last.loss is None,
        validation=validations[0].value if validations else None,
        schedule=schedules[0] if schedules else None,
        staleness=0 if last is None else last.staleness,
    )


def _assignment_view(
    db: Transaction, assignment: AssignmentRecord, names: Mapping[str, str], *, with_records: bool
) -> AssignmentView:
    phases = db.telemetry.newest(assignment.id, PhaseRecord) if with_records else []
    queues = db.telemetry.newest(assignment.id, QueueRecord) if with_records else []
    return AssignmentView(
        provider=assignment.provider,
        provider_name=names.get(assignment.provider, assignment.provider),
        node=assignment.node,
        cluster=assignment.cluster,
        role=assignment.role,
        phase=assignment.phase,
        worker_phase=phases[0] if phases else None,
        queue=queues[0] if queues else None,
    )


def _cluster(db: Transaction, root: AssignmentRecord) -> ClusterProgress:
    validations = db.telemetry.newest(root.id, ValidationRecord)
    rounds = db.telemetry.newest(root.id, RoundRecord)
    return ClusterProgress(
        cluster=root.cluster,
        loss=db.telemetry.last_loss(root.id),
        validation=validations[0] if validations else None,
        round=rounds[0] if rounds else None,
        timings=db.telemetry.timings(root.id),
    )


def _warnings(db: Transaction, assignments: Sequence[AssignmentRecord]) -> tuple[NodeWarning, ...]:
    known = {each.id: each for each in assignments}
    return tuple(
        NodeWarning(
            time=warning.time,
            node=known[warning.assignment].node,
            provider=known[warning.assignment].provider,
            message=warning.message,
        )
        for warning in db.telemetry.warnings(known, _SHOWN_WARNINGS)
    )
