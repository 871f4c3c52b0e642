"""The parts of a job: who has which assignment, how far it is, and its losses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from ravnest.schemas.jobs import ResultFile
from ravnest.schemas.providers import Assignment, TlsRejections
from ravnest.server.db.events import clipped
from ravnest.server.db.records import ENDED, AssignmentRecord
from ravnest.server.db.tables import assignments, losses

_SHORT = [column for column in assignments.c if column.name != "body"]
_AT_ONCE = 50_000
"""Losses of one answer."""


class AssignmentRepository:
    """All assignments that were ever made."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add(self, assignment: Assignment, provider: str) -> None:
        """An assignment that its provider will fetch."""
        self._connection.execute(
            insert(assignments).values(
                id=assignment.id,
                job=assignment.job,
                provider=provider,
                node=assignment.node,
                cluster=int(assignment.node_file["cluster"]),
                role=str(assignment.node_file["role"]),
                body=assignment.model_dump_json(),
                phase="waiting",
            )
        )

    def get(self, assignment: str) -> AssignmentRecord | None:
        """A part by the id of its assignment."""
        row = self._connection.execute(select(*_SHORT).where(assignments.c.id == assignment)).first()
        return None if row is None else _part(row)

    def body(self, assignment: str) -> Assignment:
        """All that the provider needs."""
        query = select(assignments.c.body).where(assignments.c.id == assignment)
        return Assignment.model_validate_json(self._connection.execute(query).scalar_one())

    def of_job(self, job: str) -> list[AssignmentRecord]:
        """By node."""
        query = select(*_SHORT).where(assignments.c.job == job).order_by(assignments.c.node)
        return [_part(row) for row in self._connection.execute(query)]

    def live_of(self, provider: str) -> AssignmentRecord | None:
        """What a provider should be working at."""
        query = select(*_SHORT).where(assignments.c.provider == provider)
        row = self._connection.execute(query.where(assignments.c.phase.not_in(ENDED))).first()
        return None if row is None else _part(row)

    def move(self, part: AssignmentRecord, phase: str, reason: str = "") -> None:
        """How far a part is now."""
        self._update(part, phase=phase, reason=clipped(reason))

    def keep_result(self, part: AssignmentRecord, files: Sequence[ResultFile]) -> None:
        """The trained files of a Root."""
        listed = [file.model_dump(mode="json") for file in files]
        self._update(part, result=json.dumps(listed))

    def result(self, part: AssignmentRecord) -> tuple[ResultFile, ...]:
        """The trained files that a Root has sent."""
        query = select(assignments.c.result).where(assignments.c.id == part.id)
        listed = json.loads(self._connection.execute(query).scalar_one() or "[]")
        return tuple(ResultFile.model_validate(file) for file in listed)

    def keep_losses(self, part: AssignmentRecord, first: int, values: Sequence[float | None]) -> int:
        """Keep those that follow what is known; how many there are then.

        A report is sent again until it is acknowledged, so its beginning may be known already. One
        that begins later than what is known would leave a gap: it is not taken, and comes again.
        """
        new = values[part.losses - first :] if first <= part.losses else ()
        if not new:
            return part.losses
        rows = [
            {"assignment": part.id, "position": part.losses + position, "value": value}
            for position, value in enumerate(new)
        ]
        self._connection.execute(insert(losses), rows)
        self._update(part, losses=part.losses + len(rows))
        return part.losses + len(rows)

    def keep_figures(self, part: AssignmentRecord, figures: Sequence[float | None]) -> bool:
        """Keep the validations so far; whether there is a new one."""
        if len(figures) <= len(part.figures):
            return False
        self._update(part, figures=json.dumps(figures))
        return True

    def keep_strangers(self, part: AssignmentRecord, strangers: TlsRejections) -> None:
        """Keep how many a node has turned away so far."""
        self._update(part, strangers=strangers.model_dump_json())

    def losses(self, part: str, first: int = 0, limit: int = _AT_ONCE) -> tuple[float | None, ...]:
        """Losses from one update on."""
        query = (
            select(losses.c.value)
            .where(losses.c.assignment == part, losses.c.position >= first)
            .order_by(losses.c.position)
            .limit(limit)
        )
        return tuple(self._connection.execute(query).scalars())

    def sampled_losses(self, part: AssignmentRecord, count: int) -> list[tuple[int, float]]:
        """About ``count`` losses, evenly spread, with their updates; those that are numbers."""
        step = max(1, part.losses // count)
        query = (
            select(losses.c.position, losses.c.value)
            .where(losses.c.assignment == part.id)
            .where((part.losses - 1 - losses.c.position) % step == 0, losses.c.value.is_not(None))
            .order_by(losses.c.position)
        )
        return [(row.position, row.value) for row in self._connection.execute(query)]

    def last_loss(self, part: AssignmentRecord) -> float | None:
        """Of the last update that is known."""
        return next(iter(self.losses(part.id, part.losses - 1)), None) if part.losses else None

    def _update(self, part: AssignmentRecord, **columns: Any) -> None:
        self._connection.execute(
            update(assignments).where(assignments.c.id == part.id).values(**columns)
        )


def _part(row: Row[Any]) -> AssignmentRecord:
    return AssignmentRecord(
        id=row.id,
        job=row.job,
        provider=row.provider,
        node=row.node,
        cluster=row.cluster,
        role=row.role,
        phase=row.phase,
        reason=row.reason,
        figures=tuple(json.loads(row.figures)),
        losses=row.losses,
        has_result=row.result is not None,
        strangers=TlsRejections.model_validate_json(row.strangers),
    )
