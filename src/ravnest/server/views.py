"""Views of providers and jobs for members, built from the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import (
    AssignmentView,
    BestView,
    CheckpointView,
    ClusterProgress,
    JobProgress,
    JobState,
    JobView,
    LossHistory,
    MemoryView,
    NodeWarning,
)
from ravnest.schemas.link_tests import LinkView
from ravnest.schemas.providers import ProviderView
from ravnest.schemas.reachability import RelayView
from ravnest.server.complete_checkpoints import complete_checkpoints
from ravnest.server.db.assignments import AssignedStage
from ravnest.server.db.database import Transaction
from ravnest.server.db.new_records import NEWEST_KEPT
from ravnest.server.db.records import AssignmentRecord, JobRecord, MemberRecord, ProviderRecord
from ravnest.server.db.telemetry import Stored
from ravnest.server.job_status import (
    clusters_at_work,
    degraded,
    holders,
    leading_root,
    lineage,
    roots,
)
from ravnest.server.liveness import Liveness
from ravnest.server.reachability.status import reachability
from ravnest.telemetry import (
    LossRecord,
    PaceRecord,
    PhaseRecord,
    QueueRecord,
    RecoveryRecord,
    RoundRecord,
    ScheduleRecord,
    ValidationRecord,
)
from ravnest.types import Role

_SHOWN_WARNINGS = 20
_MOST_RECORDS = max(NEWEST_KEPT.values())


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
    db: Transaction,
    liveness: Liveness,
    lost_since: float,
    relays: Mapping[str, RelayView],
    member: MemberRecord,
) -> list[ProviderView]:
    """Return the providers that a member may see: connected, or lost at ``lost_since`` or later.

    Providers and relays see themselves. A requester does not see what providers do for others.
    """
    records = [each for each in db.providers.present(lost_since) if _may_see(member, each.id)]
    views = [provider_view(record, liveness, relays) for record in records]
    if member.role is not ApiRole.REQUESTER:
        return views
    own = {job.id for job in db.jobs.listed(member.id)}
    return [each if each.job is None or each.job in own else _discreet(each) for each in views]


def _may_see(member: MemberRecord, provider: str) -> bool:
    """Return whether a member may see a provider at all."""
    return member.role not in (ApiRole.PROVIDER, ApiRole.RELAY) or member.id == provider


def _discreet(view: ProviderView) -> ProviderView:
    """Return the view of a provider that works for another requester."""
    offer = view.offer.model_copy(update={"trained": ()})
    update = {"job": None, "offer": offer, "reason": "it works for another requester"}
    return view.model_copy(update=update)


def link_views(db: Transaction, member: MemberRecord) -> list[LinkView]:
    """Return the newest figures of all measured links that a member may see."""
    records = [
        each for each in db.links.all() if _may_see(member, each.one) or _may_see(member, each.other)
    ]
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
    root = leading_root(assignments)
    held = holders(assignments)
    stages = db.assignments.stages(record.id) if with_records else {}
    memory = _memory(db, held, stages) if with_records else {}
    return JobView(
        id=record.id,
        name=record.name,
        owner=record.owner,
        state=record.state,
        reason=record.reason,
        created=record.created,
        changed=record.changed,
        progress=_progress(db, record, assignments),
        assignments=tuple(
            _assignment_view(db, each, names, memory.get(each.id), stages.get(each.id)) for each in held
        ),
        clusters=_clusters(db, assignments) if with_records else (),
        warnings=_warnings(db, assignments) if with_records else (),
        plan=record.plan,
        recoveries=db.telemetry.count((each.id for each in assignments), RecoveryRecord),
        checkpoint=_checkpoint(db, assignments, root) if with_records else None,
        saved_update=_saved_update(db, record.id) if with_records else None,
        best=_best(db, record.id) if with_records else None,
        degraded=degraded(assignments, names) if record.state is JobState.DONE else "",
    )


def job_losses(db: Transaction, job: str, first: int, since: float = 0.0) -> LossHistory:
    """Return a job's losses from update ``first`` on, and its validations and rounds since a time.

    Updates and validations that a later Root repeats replace those of an earlier one.
    """
    assignments = db.assignments.of_job(job)
    oldest_first = history(db, job, assignments)[::-1]
    known = {
        loss.update: (time, loss)
        for each in oldest_first
        for time, loss in db.telemetry.timed_losses(each.id, first)
    }
    found = [known[update] for update in sorted(known)]
    results = {
        test.number: (time, test)
        for each in oldest_first
        for time, test in reversed(_timed(db, each, ValidationRecord, since))
    }
    tests = [results[number] for number in sorted(results)]
    every = (*assignments, *db.assignments.of_earlier_plans(job))
    roots_of_plans = (each for each in every if each.role == Role.ROOT)
    rounds = sorted(
        (pair for each in roots_of_plans for pair in reversed(_timed(db, each, RoundRecord, since))),
        key=itemgetter(0),
    )
    return LossHistory(
        first=first,
        updates=tuple(loss.update for _, loss in found),
        losses=tuple(loss.loss for _, loss in found),
        validations=tuple(test for _, test in tests),
        learning_rates=tuple(loss.learning_rate for _, loss in found),
        epochs=tuple(loss.epoch for _, loss in found),
        staleness=tuple(loss.staleness for _, loss in found),
        times=tuple(time for time, _ in found),
        validation_times=tuple(time for time, _ in tests),
        rounds=tuple(each for _, each in rounds),
        round_times=tuple(time for time, _ in rounds),
    )


def _timed(
    db: Transaction, assignment: AssignmentRecord, kind: type[Stored], since: float
) -> list[tuple[float, Stored]]:
    """Return the stored records of one kind since a time, newest first."""
    return db.telemetry.timed(assignment.id, kind, _MOST_RECORDS, since)


def history(
    db: Transaction, job: str, assignments: Sequence[AssignmentRecord]
) -> list[AssignmentRecord]:
    """Return the assignments of the leading Root, newest first, then those of the plans before.

    Each holds the records of its own time.
    """
    roots_of_plans = [(plan, leading_root(plan)) for plan in plans(db, job, assignments)]
    return [
        each for plan, root in roots_of_plans if root is not None for each in lineage(plan, root.node)
    ]


def plans(
    db: Transaction, job: str, assignments: Sequence[AssignmentRecord]
) -> list[Sequence[AssignmentRecord]]:
    """Return the assignments of each plan that a job had, newest first."""
    earlier = db.assignments.of_earlier_plans(job)
    attempts = sorted({each.attempt for each in earlier}, reverse=True)
    return [assignments, *([e for e in earlier if e.attempt == attempt] for attempt in attempts)]


def _newest(db: Transaction, chain: Sequence[AssignmentRecord], kind: type[Stored]) -> Stored | None:
    found = (record for each in chain for record in db.telemetry.newest(each.id, kind))
    return next(found, None)


def _last_loss(db: Transaction, chain: Sequence[AssignmentRecord]) -> LossRecord | None:
    found = (db.telemetry.last_loss(each.id) for each in chain)
    return next((loss for loss in found if loss is not None), None)


def _checkpoint(
    db: Transaction, assignments: Sequence[AssignmentRecord], root: AssignmentRecord | None
) -> CheckpointView | None:
    """Return the newest checkpoint that all nodes of the leading cluster have."""
    own = [each for each in assignments if root is not None and each.cluster == root.cluster]
    found = db.telemetry.checkpoints(own)
    if root is None or set(found) != {each.node for each in own}:
        return None
    oldest = min(found.values(), key=lambda each: each.update)
    time = max(each.time for each in found.values() if each.update == oldest.update)
    return CheckpointView(cluster=root.cluster, update=oldest.update, time=time)


def _saved_update(db: Transaction, job: str) -> int | None:
    """Return the updates of the newest checkpoint that all stages of a cluster have uploaded."""
    complete = complete_checkpoints(db.checkpoints.of_job(job))
    return complete[0].id.update if complete else None


def _best(db: Transaction, job: str) -> BestView | None:
    """Return the best model of the lowest cluster that has one."""
    models = db.best_models.of_job(job)
    if not models:
        return None
    cluster = min(models)
    best = models[cluster]
    return BestView(cluster=cluster, epoch=best.epoch, metric=best.metric, value=best.value)


def _progress(
    db: Transaction, record: JobRecord, assignments: Sequence[AssignmentRecord]
) -> JobProgress:
    chain = history(db, record.id, assignments)
    last = _last_loss(db, chain)
    validation = _newest(db, chain, ValidationRecord)
    pace = _newest(db, chain, PaceRecord) or PaceRecord(0, None, None, None)
    updates = 0 if last is None else last.update + 1
    return JobProgress(
        updates=updates,
        # A prediction: a run of examples/digits made 440 updates of 438.
        total_updates=None if pace.updates is None else max(pace.updates, updates),
        epoch=0 if last is None else last.epoch + 1,
        samples_per_second=_rate(db, record, assignments),
        seconds_left=None if record.state.is_final else pace.seconds_left,
        metric="" if validation is None else validation.name,
        metrics={} if validation is None else validation.metrics,
        epochs=record.epochs,
        loss=None if last is None else last.loss,
        diverged=last is not None and last.loss is None,
        validation=None if validation is None else validation.value,
        schedule=_newest(db, chain, ScheduleRecord),
        staleness=0 if last is None else last.staleness,
    )


def _rate(db: Transaction, record: JobRecord, assignments: Sequence[AssignmentRecord]) -> float | None:
    """Return the samples per second of all clusters, while a job trains of those that are at work.

    ``None``: none is known.
    """
    at_work = clusters_at_work(assignments)
    paces = (
        _newest(db, lineage(assignments, root.node), PaceRecord)
        for root in roots(assignments)
        if record.state.is_final or root.cluster in at_work
    )
    rates = [pace.samples_per_second for pace in paces if pace is not None]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _memory(
    db: Transaction, held: Sequence[AssignmentRecord], stages: Mapping[str, AssignedStage]
) -> dict[str, MemoryView]:
    """Return the memory of nodes, by assignment."""
    offers = {each.id: each.offer.ram for each in db.providers.chosen({each.provider for each in held})}
    return {
        each.id: MemoryView(
            planned=stages[each.id].ram or None,
            offered=int(1e9 * offers[each.provider]) if each.provider in offers else None,
            used=each.used_memory,
            peak=each.peak_memory,
        )
        for each in held
    }


def _assignment_view(
    db: Transaction,
    assignment: AssignmentRecord,
    names: Mapping[str, str],
    memory: MemoryView | None,
    stage: AssignedStage | None,
) -> AssignmentView:
    """Return an assignment as its requester sees it; with ``stage``, also its newest records."""
    phases = db.telemetry.newest(assignment.id, PhaseRecord) if stage else []
    queues = db.telemetry.newest(assignment.id, QueueRecord) if stage else []
    return AssignmentView(
        provider=assignment.provider,
        provider_name=names.get(assignment.provider, assignment.provider),
        node=assignment.node,
        cluster=assignment.cluster,
        role=assignment.role,
        phase=assignment.phase,
        generation=assignment.generation,
        stage=None if stage is None else stage.number,
        worker_phase=phases[0] if phases else None,
        queue=queues[0] if queues else None,
        memory=memory,
    )


def _clusters(db: Transaction, assignments: Sequence[AssignmentRecord]) -> tuple[ClusterProgress, ...]:
    found = []
    for root in roots(assignments):
        chain = lineage(assignments, root.node)
        timings = (db.telemetry.timings(each.id) for each in chain)
        found.append(
            ClusterProgress(
                cluster=root.cluster,
                loss=_last_loss(db, chain),
                validation=_newest(db, chain, ValidationRecord),
                round=_newest(db, chain, RoundRecord),
                timings=next((each for each in timings if each), ()),
                pace=_newest(db, chain, PaceRecord),
            )
        )
    return tuple(found)


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
