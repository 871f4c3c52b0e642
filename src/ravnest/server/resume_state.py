"""Checkpoints that a job starts from, as the database has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ravnest.schemas.jobs import JobSpec
from ravnest.schemas.providers import Assignment
from ravnest.server.complete_checkpoints import (
    CompleteCheckpoint,
    complete_checkpoints,
    newest_by_cluster,
)
from ravnest.server.db.database import Transaction
from ravnest.server.scheduling.data_shares import rows_of, slices
from ravnest.server.scheduling.job_start import JobStart, OldCluster, job_starts
from ravnest.server.scheduling.planning import PlannedJob
from ravnest.telemetry import RoundRecord

_LONGEST_CHAIN = 100
"""Jobs that continue each other, of which the first one's data is found."""
_ROUNDS_READ = 20
"""Newest rounds of averaging of a Root among which one that was committed is looked for."""


def newest_checkpoint(db: Transaction, job: str) -> CompleteCheckpoint | None:
    """Return the newest complete checkpoint of a job at the server."""
    return next(iter(complete_checkpoints(db.checkpoints.of_job(job))), None)


def starts_of(db: Transaction, job: str, planned: PlannedJob) -> list[JobStart]:
    """Return the states that a planned job can start from, best first; empty: from the beginning."""
    complete = complete_checkpoints(db.checkpoints.of_job(job))
    if not complete:
        return []
    roots = _old_roots(db, job, complete[0].stages[0].plan)
    old = {cluster: body.train.inputs for cluster, body in roots.bodies.items()}
    spec = planned.spec
    count = range(len(planned.plan.clusters))
    new = {
        cluster: tuple(slices(spec.train.inputs, rows_of(spec, planned.plan, cluster)))
        for cluster in count
    }
    earlier = spec if roots.job is None else db.jobs.spec(roots.job)
    same = roots.job is not None and same_loader(spec, earlier)
    # Checkpoints of this job's own plans have its parameters already.
    changed = roots.job != job and spec.training.optimizer != earlier.training.optimizer
    optimizer = spec.training.optimizer if changed else None
    before = _old_clusters(db, complete, roots)
    return job_starts(complete, old, new, same_loader=same, optimizer=optimizer, before=before)


def same_loader(one: JobSpec, other: JobSpec) -> bool:
    """Return whether two jobs form the same batches in the same order from the same shares."""
    names = ("batch_size", "shuffle", "drop_last", "seed", "update_frequency")
    return one.train == other.train and all(
        getattr(one.training, name) == getattr(other.training, name) for name in names
    )


@dataclass(frozen=True)
class _OldRoots:
    """Roots of the plan of a checkpoint."""

    job: str | None = None
    """Job in which the plan was trained; None: it is not known."""
    bodies: Mapping[int, Assignment] = field(default_factory=dict)
    """By cluster."""
    ids: tuple[str, ...] = ()
    """All assignments of Roots, also of those that were lost."""


def _old_roots(db: Transaction, job: str, plan: str) -> _OldRoots:
    """Return the Roots of a plan, which an earlier job may have had that this one continues."""
    current: str | None = job
    for _ in range(_LONGEST_CHAIN):
        if current is None or db.jobs.get(current) is None:
            break
        assignments = (*db.assignments.of_earlier_plans(current), *db.assignments.of_job(current))
        roots = [(each, db.assignments.body(each.id)) for each in assignments if each.role == "Root"]
        found = [(each, body) for each, body in roots if body.node_spec.plan == plan]
        if found:
            bodies = {each.cluster: body for each, body in found}
            return _OldRoots(current, bodies, tuple(each.id for each, _ in found))
        current = db.jobs.spec(current).resume_from
    return _OldRoots()


def _old_clusters(
    db: Transaction, complete: Sequence[CompleteCheckpoint], roots: _OldRoots
) -> list[OldCluster]:
    """Return the clusters of a plan with their newest checkpoints; empty if one of them is unknown."""
    newest = newest_by_cluster(complete)
    if set(newest) != set(roots.bodies):
        return []
    averaged = _last_averaged(db, roots.ids) & set(newest) or set(newest)
    found = []
    for cluster, body in sorted(roots.bodies.items()):
        data = body.train
        if data.first is None:
            return []
        rows = range(data.first, data.first + data.samples)
        found.append(OldCluster(newest[cluster], rows, cluster in averaged, data.remainder))
    return found


def averaged_clusters(db: Transaction, job: str, complete: Sequence[CompleteCheckpoint]) -> set[int]:
    """Return the clusters whose newest checkpoints make up the mean: those of the last round.

    If no round is known, these are all that have a checkpoint.
    """
    newest = set(newest_by_cluster(complete))
    roots = _old_roots(db, job, complete[0].stages[0].plan)
    return _last_averaged(db, roots.ids) & newest or newest


def _last_averaged(db: Transaction, roots: Sequence[str]) -> set[int]:
    """Return the clusters that took part in the newest round of averaging; empty: there was none."""
    records = (
        record for each in roots for record in db.telemetry.newest(each, RoundRecord, _ROUNDS_READ)
    )
    committed = [record for record in records if record.committed]
    last = max(committed, key=lambda record: record.round, default=None)
    return set() if last is None else set(last.clusters)
