"""Times of the stages of running jobs, and which providers have become slower.

What is measured is in the database, so that a restarted server knows it, and a new plan, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ravnest.server.db.database import Transaction
from ravnest.server.db.records import AssignmentRecord, StageTimesRecord
from ravnest.server.job_status import holders, roots
from ravnest.server.scheduling.stragglers import WINDOW, Slowdowns, measured_times, slowdowns
from ravnest.server.unit_of_work import UnitOfWorkFactory

_LOSSES = 20
"""Updates of which the number of micro-batches is taken."""


class StragglerService:
    """Finds stragglers; the methods are thread-safe."""

    def __init__(self, units: UnitOfWorkFactory) -> None:
        self._units = units

    def measure(self, job: str) -> None:
        """Store what the newest timings of a job's stages say."""
        now = self._units.clock.wall()
        with self._units.db.read() as db:
            before = db.stage_times.of_job(job)
            held = holders(db.assignments.of_job(job))
            known = {(each.attempt, each.cluster, each.stage): each for each in before}
            numbers = {each: stage.number for each, stage in db.assignments.stages(job).items()}
            found = [
                each
                for root in roots(held)
                for each in self._measured(db, root, _stages(numbers, held, root, known, now), now)
            ]
        changed = set(found) - set(before)
        if changed:
            with self._units.begin() as uow:
                uow.db.stage_times.put(changed)

    def slowdowns(self, job: str) -> Slowdowns:
        """Return how much slower the providers of a job have become."""
        with self._units.db.read() as db:
            return slowdowns(db.stage_times.of_job(job))

    @staticmethod
    def _measured(
        db: Transaction, root: AssignmentRecord, stages: Sequence[StageTimesRecord], now: float
    ) -> list[StageTimesRecord]:
        is_known = all(each.baseline for each in stages)
        first = now - WINDOW if is_known else min(each.since for each in stages)
        timings = db.telemetry.timings_between(root.id, first, now)
        last = db.telemetry.last_loss(root.id)
        if last is None:
            return list(stages)
        losses = db.telemetry.losses(root.id, last.update - _LOSSES)
        microbatches = statistics.median(each.microbatches for each in losses)
        return measured_times(stages, timings, now, microbatches)


def _stages(
    numbers: Mapping[str, int],
    held: Sequence[AssignmentRecord],
    root: AssignmentRecord,
    known: dict[tuple[int, int, int], StageTimesRecord],
    now: float,
) -> list[StageTimesRecord]:
    """Return the stages of a cluster in order; one with another provider than before begins anew.

    ``numbers``: those of the stages, by assignment.
    """
    found = []
    for each in held:
        if each.cluster != root.cluster:
            continue
        stage = numbers[each.id]
        record = known.get((each.attempt, each.cluster, stage))
        if record is None or record.provider != each.provider:
            record = StageTimesRecord(each.job, each.attempt, each.cluster, stage, each.provider, now)
        found.append(record)
    return sorted(found, key=lambda each: each.stage)
