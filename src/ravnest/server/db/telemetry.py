"""Records of worker processes: losses in a table of their own, all other kinds in another.

Both are bounded per assignment. Losses are thinned out as they get old; of the other kinds the newest
are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from pydantic import TypeAdapter
from sqlalchemy import Connection, delete, func, select, text, tuple_

from ravnest.server.db.new_records import MOST_LOSSES, NEWEST_KEPT, NewRecords, add_records
from ravnest.server.db.records import AssignmentRecord
from ravnest.server.db.tables import assignments, losses, records
from ravnest.telemetry import (
    BestRecord,
    CheckpointRecord,
    CheckRecord,
    LossRecord,
    PaceRecord,
    PhaseRecord,
    QueueRecord,
    RecoveryRecord,
    RoundRecord,
    ScheduleRecord,
    SpansRecord,
    TimingRecord,
    ValidationRecord,
    WarningRecord,
    WorkerRecord,
    WorkRecord,
)

Stored = TypeVar(
    "Stored",
    ValidationRecord,
    BestRecord,
    RoundRecord,
    TimingRecord,
    QueueRecord,
    PaceRecord,
    ScheduleRecord,
    WarningRecord,
    PhaseRecord,
    CheckpointRecord,
    RecoveryRecord,
    CheckRecord,
    SpansRecord,
)

_KINDS = {
    ValidationRecord: "validation",
    BestRecord: "best",
    RoundRecord: "round",
    TimingRecord: "timing",
    QueueRecord: "queue",
    WorkRecord: "work",
    PaceRecord: "pace",
    ScheduleRecord: "schedule",
    WarningRecord: "warning",
    PhaseRecord: "phase",
    CheckpointRecord: "checkpoint",
    RecoveryRecord: "recovery",
    CheckRecord: "check",
    SpansRecord: "spans",
}

_TIMINGS_BETWEEN = text(
    "SELECT json_group_array(json_array(time, json(body))) FROM"
    " (SELECT time, body FROM records WHERE assignment = :assignment AND kind = 'timing'"
    " AND time >= :first AND time <= :last ORDER BY position)"
)
_TIMINGS = msgspec.json.Decoder(list[tuple[float, TimingRecord]])
"""Decoder of timings, which are read by the ten thousand; with Pydantic it takes 1.7 times as long."""
_ADAPTERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in _KINDS}


@dataclass(frozen=True)
class StoredWarning:
    """A warning, and when the server received it."""

    assignment: str
    time: float
    message: str


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint of one stage, and when the server learned of it."""

    update: int
    """Updates that it contains."""
    time: float


@dataclass(frozen=True, slots=True)
class LossBucket:
    """Losses of consecutive updates in one point of a curve."""

    first: int
    """First update."""
    last: int
    count: int
    """Number of stored losses."""
    mean: float | None
    """Mean, lowest and highest finite loss; ``None`` if there is none."""
    low: float | None
    high: float | None
    staleness: float
    """Mean staleness."""
    epoch: int
    """Epoch of the last update, from 0."""
    learning_rate: float | None = None
    """Mean learning rate, where it is known."""


class TelemetryRepository:
    """Records of all assignments."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._connection = connection
        self._now = now

    def add(
        self,
        assignment: AssignmentRecord,
        first: int,
        reported: Sequence[WorkerRecord],
        *,
        most_losses: int = MOST_LOSSES,
    ) -> Sequence[WorkerRecord]:
        """Store those of the reported records that are new, and return them.

        With them, the figures of the assignment's memory are stored: they cost no statement more.
        ``first`` is the position of the first of them among all records of the assignment. A report is
        sent again until it is acknowledged, so that its beginning may be known already.
        """
        report = NewRecords(assignment, first, reported)
        return add_records(self._connection, self._now, [report], most_losses)[0]

    def add_all(self, reports: Sequence[NewRecords]) -> list[Sequence[WorkerRecord]]:
        """Do the same for reports about different assignments, with few statements for all of them."""
        return add_records(self._connection, self._now, reports)

    def losses(self, assignment: str, first: int = 0) -> list[LossRecord]:
        """Return the stored losses of update ``first`` and later, in order."""
        return [record for _, record in self.timed_losses(assignment, first)]

    def timed_losses(self, assignment: str, first: int = 0) -> list[tuple[float | None, LossRecord]]:
        """Return these losses with the times of their arrival, where they are known."""
        query = (
            select(losses)
            .where(losses.c.assignment == assignment, losses.c.update_number >= first)
            .order_by(losses.c.update_number)
        )
        return [
            (
                row.time,
                LossRecord(
                    row.update_number,
                    row.epoch,
                    row.value,
                    row.microbatches,
                    row.staleness,
                    row.learning_rate,
                ),
            )
            for row in self._connection.execute(query)
        ]

    def last_loss(self, assignment: str) -> LossRecord | None:
        """Return the loss of the last update."""
        query = select(func.max(losses.c.update_number)).where(losses.c.assignment == assignment)
        last = self._connection.execute(query).scalar()
        return None if last is None else self.losses(assignment, last)[0]

    def loss_range(self, assignment: str) -> tuple[int, int] | None:
        """Return the first and the last update whose losses are stored."""
        own = losses.c.assignment == assignment
        ends = (func.min(losses.c.update_number), func.max(losses.c.update_number))
        # Two queries: SQLite finds one end in the index, and scans everything for both.
        first, last = (self._connection.execute(select(end).where(own)).scalar() for end in ends)
        return None if first is None or last is None else (first, last)

    def loss_buckets(self, assignment: str, first: int, last: int, step: int) -> list[LossBucket]:
        """Return the losses of updates ``first`` to ``last``, ``step`` updates in each bucket."""
        number, value = losses.c.update_number, losses.c.value
        bucket = (number - number % step).label("bucket")
        query = (
            select(
                func.min(number),
                func.max(number),
                func.count(),
                func.avg(value),
                func.min(value),
                func.max(value),
                func.avg(losses.c.staleness),
                func.max(losses.c.epoch),
                func.avg(losses.c.learning_rate),
            )
            .where(losses.c.assignment == assignment, number >= first, number <= last)
            .group_by(bucket)
            .order_by(bucket)
        )
        return [LossBucket(*row) for row in self._connection.execute(query)]

    def epoch_ends(self, assignment: str) -> dict[int, int]:
        """Return the last update of each epoch."""
        number, epoch = losses.c.update_number, losses.c.epoch
        query = select(epoch, func.max(number)).where(losses.c.assignment == assignment).group_by(epoch)
        return {row[0]: row[1] for row in self._connection.execute(query)}

    def timed(
        self, assignment: str, kind: type[Stored], limit: int, since: float = 0.0
    ) -> list[tuple[float, Stored]]:
        """Return the newest records of one kind with the times of their arrival, newest first.

        ``since``: only those that arrived then or later.
        """
        query = (
            select(records.c.time, records.c.body)
            .where(records.c.assignment == assignment, records.c.kind == _KINDS[kind])
            .where(records.c.time >= since)
            .order_by(records.c.position.desc())
            .limit(limit)
        )
        found = self._connection.execute(query)
        return [(row.time, self._parsed(kind, row.body)) for row in found]

    def rates(self, assignment: str) -> list[tuple[float, float]]:
        """Return the times and the samples per second of all stored paces, oldest first.

        The rate is that since the pace before, or, in records of an earlier version, the mean.
        """
        recent, mean = (
            func.json_extract(records.c.body, f"$.{name}") for name in ("recent", "samples_per_second")
        )
        rate = func.coalesce(recent, mean)
        query = (
            select(records.c.time, rate)
            .where(records.c.assignment == assignment, records.c.kind == "pace", rate.is_not(None))
            .order_by(records.c.position)
        )
        return [(time, found) for time, found in self._connection.execute(query)]

    def newest(self, assignment: str, kind: type[Stored], limit: int = 1) -> list[Stored]:
        """Return the newest records of one kind, newest first."""
        query = (
            select(records.c.body)
            .where(records.c.assignment == assignment, records.c.kind == _KINDS[kind])
            .order_by(records.c.position.desc())
            .limit(limit)
        )
        return [self._parsed(kind, body) for body in self._connection.execute(query).scalars()]

    def checkpoints(self, assignments: Sequence[AssignmentRecord]) -> dict[int, StoredCheckpoint]:
        """Return the newest checkpoint of each node, by node; a node can have several assignments."""
        nodes = {each.id: each.node for each in assignments}
        update_number = func.json_extract(records.c.body, "$.update").label("update_number")
        query = (
            select(records.c.assignment, records.c.time, update_number)
            .where(records.c.assignment.in_(list(nodes)), records.c.kind == "checkpoint")
            .order_by(records.c.time, update_number)
        )
        found: dict[int, StoredCheckpoint] = {}
        for row in self._connection.execute(query):
            known = found.get(nodes[row.assignment])
            if known is None or row.update_number > known.update:
                found[nodes[row.assignment]] = StoredCheckpoint(row.update_number, row.time)
        return found

    def common_checkpoint(self, assignments: Sequence[AssignmentRecord], cluster: int) -> int:
        """Return the updates of the newest checkpoint that all nodes of a cluster have; 0: none."""
        own = [each for each in assignments if each.cluster == cluster]
        found = self.checkpoints(own)
        return min((found[n].update if n in found else 0 for n in {a.node for a in own}), default=0)

    def count(self, assignment_ids: Iterable[str], kind: type[Stored]) -> int:
        """Return the number of stored records of one kind."""
        ids = list(assignment_ids)
        own = records.c.assignment.in_(ids) & (records.c.kind == _KINDS[kind])
        query = select(func.count()).select_from(records).where(own)
        return int(self._connection.execute(query).scalar_one())

    def validations(self, assignment: str) -> tuple[ValidationRecord, ...]:
        """Return all validations, oldest first."""
        return tuple(reversed(self.newest(assignment, ValidationRecord, NEWEST_KEPT["validation"])))

    def timings(self, assignment: str) -> tuple[TimingRecord, ...]:
        """Return the newest timing of each stage, by stage."""
        stage = func.json_extract(records.c.body, "$.stage")
        query = (
            select(records.c.body, func.max(records.c.position))  # SQLite: the body of that position
            .where(records.c.assignment == assignment, records.c.kind == "timing")
            .group_by(stage)
            .order_by(stage)
        )
        return tuple(self._parsed(TimingRecord, row.body) for row in self._connection.execute(query))

    def timings_between(
        self, assignment: str, first: float, last: float
    ) -> list[tuple[float, TimingRecord]]:
        """Return the timings of all stages that were received in a span of time, oldest first.

        SQLite returns all of them as one value: at each row, heartbeats and this thread would take
        Python's lock from each other.
        """
        chosen = {"assignment": assignment, "first": first, "last": last}
        found = self._connection.execute(_TIMINGS_BETWEEN, chosen).scalar_one()
        return sorted(_TIMINGS.decode(found), key=lambda timed: timed[0])

    def first_schedule(self, assignment: str) -> float | None:
        """Return the time at which a Root first reported its schedule: training began."""
        own = (records.c.assignment == assignment) & (records.c.kind == "schedule")
        return self._connection.execute(select(func.min(records.c.time)).where(own)).scalar()

    def checkpoint_times(self, assignment: str) -> list[StoredCheckpoint]:
        """Return the checkpoints that a node has reported, oldest first."""
        update_number = func.json_extract(records.c.body, "$.update").label("update_number")
        query = (
            select(records.c.time, update_number)
            .where(records.c.assignment == assignment, records.c.kind == "checkpoint")
            .order_by(records.c.position)
        )
        found = self._connection.execute(query)
        return [StoredCheckpoint(row.update_number, row.time) for row in found]

    def answered_order(self, assignment: str) -> int:
        """Return the number of the newest request for spans that a node has answered; 0: none."""
        order = func.max(func.json_extract(records.c.body, "$.order"))
        own = (records.c.assignment == assignment) & (records.c.kind == "spans")
        return int(self._connection.execute(select(order).where(own)).scalar() or 0)

    def warnings(self, assignment_ids: Iterable[str], limit: int) -> list[StoredWarning]:
        """Return the newest warnings of several assignments, newest first."""
        query = (
            select(records.c.assignment, records.c.time, records.c.body)
            .where(records.c.assignment.in_(list(assignment_ids)))
            .where(records.c.kind == "warning")
            .order_by(records.c.time.desc(), records.c.position.desc())
            .limit(limit)
        )
        return [
            StoredWarning(row.assignment, row.time, self._parsed(WarningRecord, row.body).message)
            for row in self._connection.execute(query)
        ]

    def remove(self, job: str, limit: int) -> int:
        """Remove some losses and records of a job that is removed too; return how many."""
        own = select(assignments.c.id).where(assignments.c.job == job)
        removed = 0
        for table in (losses, records):
            key = tuple_(*table.primary_key.columns)
            chosen = select(*table.primary_key.columns).where(table.c.assignment.in_(own)).limit(limit)
            removed += self._connection.execute(delete(table).where(key.in_(chosen))).rowcount
        return removed

    @staticmethod
    def _parsed(kind: type[Stored], body: str) -> Stored:
        record: Stored = _ADAPTERS[kind].validate_json(body)
        return record
