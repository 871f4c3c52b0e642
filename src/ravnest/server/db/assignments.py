"""Assignments: provider, phase and result of each."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    bindparam,
    case,
    func,
    insert,
    literal_column,
    select,
    update,
)

from ravnest.schemas.base import clipped
from ravnest.schemas.jobs import JobState, ResultFile
from ravnest.schemas.providers import Assignment, TlsRejections
from ravnest.server.db.records import (
    ENDED,
    FAILURES,
    LOST,
    AssignmentRecord,
    LossCause,
    PartOutcomes,
)
from ravnest.server.db.tables import assignments, jobs

_PLAIN = (
    *("id", "job", "provider", "node", "cluster", "role", "phase", "reason", "records", "losses"),
    *("generation", "cause", "phase_before", "refills", "checkpoint", "attempt"),
    *("used_memory", "peak_memory"),
)
"""Columns that are fields of a record as they are."""
_SHORT = [
    *(assignments.c[name] for name in _PLAIN),
    assignments.c.result.is_not(None).label("has_result"),
    assignments.c.tls_rejections,
]
_FILES = TypeAdapter(tuple[ResultFile, ...])
_SHIPPED = (JobState.SHIPPING, JobState.TRAINING)

# Statements of each heartbeat: building one takes as long as executing it.
_BY_ID = select(*_SHORT).where(assignments.c.id == bindparam("assignment"))
_CURRENT = select(*_SHORT).where(
    assignments.c.provider.in_(bindparam("providers", expanding=True)),
    assignments.c.phase.not_in(ENDED),
)
_CURRENT_PLAN = select(jobs.c.attempt).where(jobs.c.id == bindparam("job")).scalar_subquery()
_OF_JOB = (
    select(*_SHORT)
    .where(assignments.c.job == bindparam("job"), assignments.c.attempt == _CURRENT_PLAN)
    .order_by(assignments.c.attempt, assignments.c.node, assignments.c.generation)
)
_STAGES_OF_JOB = select(
    assignments.c.id,
    func.json_extract(assignments.c.body, "$.node_spec.stage").label("stage"),
    func.coalesce(func.json_extract(assignments.c.body, "$.needs.work"), 0.0).label("work"),
    func.coalesce(func.json_extract(assignments.c.body, "$.needs.ram"), 0).label("ram"),
).where(assignments.c.job == bindparam("job"), assignments.c.attempt == _CURRENT_PLAN)
_RUNNING = select(jobs.c.id).where(jobs.c.state.in_(_SHIPPED))
# The plus keeps SQLite from reading all assignments of running jobs, to find those of few providers.
_LEFT_BY = (
    select(*_SHORT)
    .where(assignments.c.provider.in_(bindparam("providers", expanding=True)))
    .where(assignments.c.phase.in_((LOST, "finished")), literal_column("+assignments.job").in_(_RUNNING))
    .order_by("job", "node")
)


@dataclass(frozen=True)
class AssignedStage:
    """Stage of an assignment."""

    number: int
    work: float
    """GFLOP per batch; 0: not known."""
    ram: int = 0
    """Bytes that the plan needs; 0: not known."""


class AssignmentRepository:
    """All assignments, including those of jobs that have ended."""

    def __init__(
        self, connection: Connection, changed_jobs: set[str], *, only_reads: bool = False
    ) -> None:
        """``only_reads``: nothing changes within the transaction, so that a job is read once."""
        self._connection = connection
        self._changed_jobs = changed_jobs
        self._jobs: dict[str, list[AssignmentRecord]] | None = {} if only_reads else None

    def add(
        self, assignment: Assignment, provider: str, *, refills: int = 0, checkpoint: int = 0
    ) -> None:
        """Add an assignment that its provider has yet to fetch."""
        self._changed_jobs.add(assignment.job)
        self._connection.execute(
            insert(assignments).values(
                id=assignment.id,
                job=assignment.job,
                provider=provider,
                node=assignment.node,
                cluster=assignment.node_spec.cluster,
                role=assignment.node_spec.role,
                body=assignment.model_dump_json(),
                phase="waiting",
                generation=assignment.node_spec.generation,
                refills=refills,
                checkpoint=checkpoint,
                attempt=assignment.attempt,
            )
        )

    def get(self, assignment: str) -> AssignmentRecord | None:
        """Return an assignment's record by id."""
        row = self._connection.execute(_BY_ID, {"assignment": assignment}).first()
        return None if row is None else _record(row)

    def body(self, assignment: str) -> Assignment:
        """Return the assignment itself."""
        query = select(assignments.c.body).where(assignments.c.id == assignment)
        return Assignment.model_validate_json(self._connection.execute(query).scalar_one())

    def of_job(self, job: str) -> list[AssignmentRecord]:
        """Return the assignments of a job's current plan, ordered by node and generation."""
        known = None if self._jobs is None else self._jobs.get(job)
        if known is None:
            known = [_record(row) for row in self._connection.execute(_OF_JOB, {"job": job}).all()]
            if self._jobs is not None:
                self._jobs[job] = known
        return list(known)

    def stages(self, job: str) -> dict[str, AssignedStage]:
        """Return the stages of a job's current plan, by assignment.

        SQLite reads them from the bodies, which takes a fraction of the time that ``body`` takes.
        """
        found = self._connection.execute(_STAGES_OF_JOB, {"job": job})
        return {row.id: AssignedStage(row.stage, row.work, row.ram) for row in found}

    def of_earlier_plans(self, job: str) -> list[AssignmentRecord]:
        """Return the assignments of a job's plans that were given up, by plan, node and generation."""
        order = (assignments.c.attempt, assignments.c.node, assignments.c.generation)
        earlier = assignments.c.attempt < _CURRENT_PLAN
        query = select(*_SHORT).where(assignments.c.job == job, earlier).order_by(*order)
        return [_record(row) for row in self._connection.execute(query, {"job": job})]

    def used_memory(self) -> int:
        """Return the bytes that the workers of all running jobs take, as far as they report it."""
        own = assignments.c.job.in_(_RUNNING) & assignments.c.phase.not_in(ENDED)
        query = select(func.coalesce(func.sum(assignments.c.used_memory), 0)).where(own)
        return int(self._connection.execute(query).scalar_one())

    def current(self, provider: str) -> AssignmentRecord | None:
        """Return the assignment that a provider should work on."""
        return self.all_current([provider]).get(provider)

    def all_current(self, providers: Sequence[str]) -> dict[str, AssignmentRecord]:
        """Return the assignments that providers should work on, by provider."""
        found = [_record(row) for row in self._connection.execute(_CURRENT, {"providers": providers})]
        return {each.provider: each for each in found}

    def move(self, assignment: AssignmentRecord, phase: str, reason: str = "") -> None:
        """Set the phase of an assignment."""
        self._update(assignment, phase=phase, reason=clipped(reason))

    def lose(self, assignment: AssignmentRecord, reason: str, cause: LossCause | None) -> None:
        """Store that the provider of an assignment is gone, while another one may take its place.

        ``cause``: None if nothing is wrong with the provider, whose node must repeat its end.
        """
        values = {"reason": clipped(reason), "cause": cause or "", "phase_before": assignment.phase}
        self._update(assignment, phase=LOST, **values)

    def reopen(self, assignment: AssignmentRecord) -> None:
        """Store that the provider of a lost assignment is back and goes on with it."""
        before = assignment.phase_before
        self._update(assignment, phase=before, reason="", cause="", phase_before="")

    def lost(self, provider: str | None = None) -> list[AssignmentRecord]:
        """Return the lost assignments of running jobs, or those of one provider, by job and node."""
        query = select(*_SHORT).where(assignments.c.phase == LOST, assignments.c.job.in_(_RUNNING))
        if provider is not None:
            query = query.where(assignments.c.provider == provider)
        return [_record(row) for row in self._connection.execute(query.order_by("job", "node"))]

    def of_provider(self, provider: str) -> list[AssignmentRecord]:
        """Return all assignments that a provider has or had, newest first."""
        query = select(*_SHORT).where(assignments.c.provider == provider)
        order: ColumnElement[int] = literal_column("assignments.rowid").desc()
        return [_record(row) for row in self._connection.execute(query.order_by(order))]

    def outcomes(self, providers: Iterable[str]) -> dict[str, PartOutcomes]:
        """Return how the parts of some providers ended; providers without such parts are left out."""
        finished = func.sum(assignments.c.phase == "finished")
        of_provider = assignments.c.cause.in_(FAILURES) | (assignments.c.phase == LOST)
        failed = func.sum(of_provider)
        query = (
            select(assignments.c.provider, finished, failed)
            .where(assignments.c.provider.in_(list(providers)))
            .group_by(assignments.c.provider)
        )
        return {row[0]: PartOutcomes(row[1], row[2]) for row in self._connection.execute(query)}

    def left_by(self, providers: Sequence[str]) -> list[AssignmentRecord]:
        """Return the finished and lost assignments of providers in running jobs, by job and node."""
        return [_record(row) for row in self._connection.execute(_LEFT_BY, {"providers": providers})]

    def unreliable(self, providers: Iterable[str]) -> frozenset[str]:
        """Return those providers that failed in more places than they have finished.

        A place failed if its provider could not do the work; one that was only lost does not count.
        """
        failed = case((assignments.c.cause.in_(FAILURES), 1), else_=0)
        finished = case((assignments.c.phase == "finished", 1), else_=0)
        own = assignments.c.provider.in_(tuple(providers))
        query = select(assignments.c.provider).where(own).group_by(assignments.c.provider)
        query = query.having(func.sum(failed) > func.sum(finished))
        return frozenset(self._connection.execute(query).scalars())

    def barred(self, job: str) -> frozenset[str]:
        """Return the providers that spot checks have excluded from a job, under any of its plans."""
        query = select(assignments.c.provider)
        query = query.where(assignments.c.job == job, assignments.c.cause == "check")
        return frozenset(self._connection.execute(query).scalars())

    def confirm_failure(self, job: str) -> None:
        """Store that a job fails on any machine, as the providers that were not believed have said."""
        self._changed_jobs.add(job)
        own = (assignments.c.job == job) & (assignments.c.cause == "unconfirmed")
        self._connection.execute(update(assignments).where(own).values(cause="job"))

    def set_cause(self, assignment: AssignmentRecord, cause: LossCause) -> None:
        """Store why an assignment failed."""
        self._update(assignment, cause=cause)

    def set_resume(self, assignment: AssignmentRecord) -> None:
        """Have the next worker of an assignment join a cluster that may be training already."""
        body = self.body(assignment.id).model_copy(update={"resume": True})
        self._update(assignment, body=body.model_dump_json())

    def set_result(self, assignment: AssignmentRecord, files: tuple[ResultFile, ...]) -> None:
        """Store the list of trained files that a Root uploaded."""
        self._update(assignment, result=_FILES.dump_json(files).decode())

    def result(self, assignment: AssignmentRecord) -> Sequence[ResultFile]:
        """Return the trained files that a Root uploaded."""
        query = select(assignments.c.result).where(assignments.c.id == assignment.id)
        return _FILES.validate_json(self._connection.execute(query).scalar_one() or "[]")

    def set_tls_rejections(self, assignment: AssignmentRecord, rejections: TlsRejections) -> None:
        """Store the number of connections that the node has rejected so far."""
        self._update(assignment, tls_rejections=rejections.model_dump_json())

    def set_memory(self, assignment: AssignmentRecord) -> None:
        """Store the memory of an assignment's worker."""
        memory = {"used_memory": assignment.used_memory, "peak_memory": assignment.peak_memory}
        self._update(assignment, **memory)

    def _update(self, assignment: AssignmentRecord, **columns: Any) -> None:
        self._changed_jobs.add(assignment.job)
        self._connection.execute(
            update(assignments).where(assignments.c.id == assignment.id).values(**columns)
        )


def _record(row: Row[Any]) -> AssignmentRecord:
    values = tuple(row)
    fields = dict(zip(_PLAIN, values, strict=False))
    return AssignmentRecord(has_result=values[-2], tls_rejections=_tls_rejections(values[-1]), **fields)


@functools.lru_cache(maxsize=1000)
def _tls_rejections(text: str) -> TlsRejections:
    return TlsRejections.model_validate_json(text)
