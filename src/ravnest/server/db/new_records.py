"""Storing of new records, those of many reports at once.

A statement takes longer in Python than in SQLite, and Python's lock may change hands at each one, which
takes longest when the machine is busy. So the reports of many heartbeats share their statements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from pydantic import TypeAdapter
from sqlalchemy import Connection, bindparam, delete, func, select, text, update
from sqlalchemy.dialects.sqlite import insert

from ravnest.server.db.records import AssignmentRecord
from ravnest.server.db.tables import assignments, losses, records
from ravnest.telemetry import LossRecord, WorkerRecord

MOST_LOSSES = 100_000
"""Losses that are kept per assignment; half of them remain when older ones are thinned out."""
NEWEST_KEPT = {
    "validation": 10_000,
    "best": 10,
    "round": 1000,
    "timing": 8000,
    "queue": 200,
    "work": 10,
    "pace": 2000,
    "schedule": 100,
    "warning": 200,
    "phase": 200,
    "checkpoint": 200,
    "recovery": 1000,
    "check": 200,
    "spans": 96,
}
"""Records that are kept per assignment and kind."""
THINNED = ("timing", "pace")
"""Kinds of which curves are drawn: of the older half of them, some of the whole time remain."""

_ANY_RECORD: TypeAdapter[WorkerRecord] = TypeAdapter(WorkerRecord)

# Statements of each report: building one takes as long as executing it.
_COUNT_RECORDS = (
    update(assignments)
    .where(assignments.c.id == bindparam("assignment"))
    .values(
        records=bindparam("received"),
        losses=bindparam("kept"),
        used_memory=bindparam("used"),
        peak_memory=bindparam("peak"),
    )
)
_KNOWN_LOSSES = text(
    "SELECT losses.assignment FROM json_each(:names) AS name CROSS JOIN losses"
    " ON losses.assignment = json_extract(name.value, '$[0]')"
    " AND losses.update_number = json_extract(name.value, '$[1]')"
)
"""Losses of a list of assignments and updates in JSON; the join in this order uses the primary key."""
_ADD_LOSSES = insert(losses).prefix_with("OR REPLACE")
_ADD_RECORDS = text(
    "INSERT INTO records (assignment, kind, position, time, body)"
    " SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),"
    " :now, json_extract(value, '$[3]') FROM json_each(:rows) WHERE true ON CONFLICT DO NOTHING"
)
"""Insertion of all rows of a list in JSON, in one step without Python's lock."""
_SURPLUS = text(
    "SELECT assignment, last FROM ("
    " SELECT value AS assignment, (SELECT position FROM records WHERE records.assignment = value"
    " AND kind = :kind ORDER BY position DESC LIMIT 1 OFFSET :kept) AS last"
    " FROM json_each(:assignments) LIMIT -1"
    ") WHERE last IS NOT NULL"
)
"""Newest record of a kind that is too many, of each assignment in a list in JSON.

Without ``LIMIT -1``, SQLite would merge both queries, and look for each record twice.
"""
_OLDER_HALF = text(
    "SELECT min(time), max(time), count(DISTINCT json_extract(body, '$.stage')) FROM records"
    " WHERE assignment = :of AND kind = :named AND position <= :last"
)
_THIN = text(
    "DELETE FROM records WHERE assignment = :of AND kind = :named AND position <= :last"
    " AND position NOT IN (SELECT min(position) FROM records"
    " WHERE assignment = :of AND kind = :named AND position <= :last"
    " GROUP BY CAST(time / :step AS INTEGER), json_extract(body, '$.stage'))"
)
"""Deletion of all records up to a position except the first of each stage in each ``step`` seconds."""
_FORGET = delete(records).where(
    records.c.assignment == bindparam("of"),
    records.c.kind == bindparam("named"),
    records.c.position <= bindparam("last"),
)


@dataclass(frozen=True)
class NewRecords:
    """Records of one report."""

    assignment: AssignmentRecord
    first: int
    """Position of the first of them among all records of the assignment."""
    reported: Sequence[WorkerRecord]

    @property
    def start(self) -> int:
        """Position of the first new one: a report is sent again until it is acknowledged."""
        return max(self.assignment.records, self.first)

    @property
    def new(self) -> Sequence[WorkerRecord]:
        """Records that are not stored yet."""
        return self.reported[self.start - self.first :]

    @property
    def losses(self) -> dict[int, LossRecord]:
        """New losses by update; of repeated ones the last."""
        return {each.update: each for each in self.new if isinstance(each, LossRecord)}


def add_records(
    connection: Connection, now: float, reports: Sequence[NewRecords], most_losses: int = MOST_LOSSES
) -> list[Sequence[WorkerRecord]]:
    """Store the new records of reports about different assignments; return them, by report."""
    assert len({each.assignment.id for each in reports}) == len(reports), "one report per assignment"
    added = [each for each in reports if each.new]
    if added:
        kept = _add_losses(connection, now, added)
        for each in added:
            if kept[each.assignment.id] > most_losses:
                kept[each.assignment.id] = _thin_losses(connection, each.assignment.id, most_losses)
        _add_others(connection, now, added)
        counts = [
            {
                "assignment": each.assignment.id,
                "received": each.start + len(each.new),
                "kept": kept[each.assignment.id],
                "used": each.assignment.used_memory,
                "peak": each.assignment.peak_memory,
            }
            for each in added
        ]
        connection.execute(_COUNT_RECORDS, counts)
    return [each.new for each in reports]


def _add_losses(connection: Connection, now: float, reports: Sequence[NewRecords]) -> dict[str, int]:
    """Store losses, instead of those of updates that are repeated; return how many there are now."""
    names = [(report.assignment.id, number) for report in reports for number in report.losses]
    rows = [
        {
            "assignment": report.assignment.id,
            "update_number": record.update,
            "value": record.loss,
            "epoch": record.epoch,
            "microbatches": record.microbatches,
            "staleness": record.staleness,
            "learning_rate": record.learning_rate,
            "time": now,
        }
        for report in reports
        for record in report.losses.values()
    ]
    kept = Counter({report.assignment.id: report.assignment.losses for report in reports})
    if rows:
        kept.subtract(connection.execute(_KNOWN_LOSSES, {"names": _json(names)}).scalars())
        connection.execute(_ADD_LOSSES, rows)
        kept.update(name for name, _ in names)
    return kept


def _thin_losses(connection: Connection, assignment: str, most: int) -> int:
    """Keep the losses of every n-th update and the last one; return how many remain."""
    own = losses.c.assignment == assignment
    last = connection.execute(select(func.max(losses.c.update_number)).where(own)).scalar_one()
    step = 2
    while (last + 1) // step > most // 2:
        step *= 2
    number = losses.c.update_number
    connection.execute(delete(losses).where(own, number % step != 0, number != last))
    query = select(func.count()).select_from(losses).where(own)
    return int(connection.execute(query).scalar_one())


def _add_others(connection: Connection, now: float, reports: Sequence[NewRecords]) -> None:
    """Store all records but losses, and forget those that are too many then."""
    rows = [
        (
            report.assignment.id,
            record.kind,
            report.start + offset,
            _ANY_RECORD.dump_json(record).decode(),
        )
        for report in reports
        for offset, record in enumerate(report.new)
        if not isinstance(record, LossRecord)
    ]
    if not rows:
        return
    connection.execute(_ADD_RECORDS, {"now": now, "rows": _json(rows)})
    for kind in {kind for _, kind, _, _ in rows}:
        own = {assignment for assignment, each, _, _ in rows if each == kind}
        _forget(connection, kind, sorted(own))


def _forget(connection: Connection, kind: str, named: Sequence[str]) -> None:
    """Remove the records of a kind that are too many."""
    chosen = {"kind": kind, "kept": NEWEST_KEPT[kind], "assignments": _json(named)}
    surplus = connection.execute(_SURPLUS, chosen).all()
    if surplus and kind in THINNED:
        of = _json([of for of, _ in surplus])
        halves = {**chosen, "kept": NEWEST_KEPT[kind] // 2, "assignments": of}
        for assignment, last in connection.execute(_SURPLUS, halves).all():
            _thin(connection, {"of": assignment, "named": kind, "last": last}, NEWEST_KEPT[kind] // 4)
    elif surplus:
        gone = [{"of": of, "named": kind, "last": last} for of, last in surplus]
        connection.execute(_FORGET, gone)


def _thin(connection: Connection, chosen: dict[str, object], most: int) -> None:
    """Keep about ``most`` of the records up to a position at most, evenly spread over their time.

    Steps are powers of two, so that what one thinning keeps is what the next one chooses from.
    """
    first, last, stages = connection.execute(_OLDER_HALF, chosen).one()
    step = 1.0
    while (last - first) / step * max(stages, 1) > most:
        step *= 2
    connection.execute(_THIN, {**chosen, "step": step})


def _json(rows: Sequence[object]) -> str:
    return msgspec.json.encode(rows).decode()
