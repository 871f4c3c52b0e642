"""Checkpoints that a job starts from, as the database has them."""

from __future__ import annotations

from ravnest.schemas.jobs import JobSpec
from ravnest.server.complete_checkpoints import CompleteCheckpoint, complete_checkpoints
from ravnest.server.db.database import Transaction
from ravnest.server.scheduling.data_shares import rows_of, slices
from ravnest.server.scheduling.job_start import JobStart, Rows, job_starts
from ravnest.server.scheduling.planning import PlannedJob

_LONGEST_CHAIN = 100
"""Jobs that continue each other, of which the first one's data is found."""


def newest_checkpoint(db: Transaction, job: str) -> CompleteCheckpoint | None:
    """Return the newest complete checkpoint of a job at the server."""
    return next(iter(complete_checkpoints(db.checkpoints.of_job(job))), None)


def starts_of(db: Transaction, job: str, planned: PlannedJob) -> list[JobStart]:
    """Return the states that a planned job can start from, best first; empty: from the beginning."""
    complete = complete_checkpoints(db.checkpoints.of_job(job))
    if not complete:
        return []
    origin, old = _old_shares(db, job, complete[0].stages[0].plan)
    spec = planned.spec
    count = range(len(planned.plan.clusters))
    new = {
        cluster: tuple(slices(spec.train.inputs, rows_of(spec, planned.plan, cluster)))
        for cluster in count
    }
    before = spec if origin is None else db.jobs.spec(origin)
    same = origin is not None and same_loader(spec, before)
    # Checkpoints of this job's own plans have its parameters already.
    changed = origin != job and spec.training.optimizer != before.training.optimizer
    optimizer = spec.training.optimizer if changed else None
    return job_starts(complete, old, new, same_loader=same, optimizer=optimizer)


def same_loader(one: JobSpec, other: JobSpec) -> bool:
    """Return whether two jobs form the same batches in the same order from the same shares."""
    names = ("batch_size", "shuffle", "drop_last", "seed", "update_frequency")
    return one.train == other.train and all(
        getattr(one.training, name) == getattr(other.training, name) for name in names
    )


def _old_shares(db: Transaction, job: str, plan: str) -> tuple[str | None, dict[int, Rows]]:
    """Return the job in which a plan was trained, and the training rows of its clusters."""
    current: str | None = job
    for _ in range(_LONGEST_CHAIN):
        if current is None or db.jobs.get(current) is None:
            break
        shares: dict[int, Rows] = {}
        for each in (*db.assignments.of_earlier_plans(current), *db.assignments.of_job(current)):
            if each.role == "Root":
                body = db.assignments.body(each.id)
                if body.node_spec.plan == plan:
                    shares[each.cluster] = body.train.inputs
        if shares:
            return current, shares
        current = db.jobs.spec(current).resume_from
    return None, {}
