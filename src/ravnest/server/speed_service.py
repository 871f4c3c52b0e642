"""Rates of providers, as their work in running jobs shows them; later plans use them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ravnest.server.db.database import Transaction
from ravnest.server.db.records import ProviderRecord, StageTimesRecord
from ravnest.server.job_status import holders, roots
from ravnest.server.scheduling.speed import (
    LOW_RATE,
    MeasuredStage,
    first_seconds,
    measured_rates,
    stretch_of,
)
from ravnest.server.scheduling.stragglers import WINDOW
from ravnest.server.unit_of_work import UnitOfWorkFactory

_LEAST_CHANGE = 0.1
"""Relative change of a rate below which the earlier one stays: each new one makes new plans."""

_Measured = frozenset[tuple[int, int, int, str, float]]
"""Plan, cluster, stage, provider and start of all measured stages of a job."""


@dataclass(frozen=True)
class _HeldStage:
    """Stage of a running job, its provider and its times."""

    root: str
    """Assignment of the Root of its cluster."""
    times: StageTimesRecord
    work: float
    """GFLOP per batch."""


class SpeedService:
    """Compares offers with work; ``check`` and ``keep`` belong to one thread."""

    def __init__(self, units: UnitOfWorkFactory) -> None:
        self._units = units
        self._checked: dict[str, _Measured] = {}
        """Stages of each job whose rates are stored."""

    def keep(self, jobs: Collection[str]) -> None:
        """Forget all other jobs."""
        self._checked = {job: key for job, key in self._checked.items() if job in jobs}

    def check(self, job: str) -> None:
        """Store the rates of a job's providers, once for each set of providers and plan."""
        with self._units.db.read() as db:
            stored = db.stage_times.of_job(job)
            held = _held_stages(db, job, stored)
            key = frozenset(_key(each.times) for each in held)
            if not held or self._checked.get(job) == key:
                return
            providers = {each.times.provider: db.providers.get(each.times.provider) for each in held}
            known = {name: each for name, each in providers.items() if each is not None}
            if len(known) < len(providers):
                return
            rates = measured_rates(self._measured(db, held, stored, known))
        with self._units.begin() as uow:
            for each in known.values():
                rate = rates.get(each.id)
                if rate is None or abs(rate / each.offer.compute - 1) < _LEAST_CHANGE:
                    continue
                uow.db.providers.set_rate(each.id, rate, job)
                if rate < LOW_RATE * each.stated:
                    uow.db.events.add("warning", each.id, _described(each, rate), job=job)
        self._checked[job] = key

    def _measured(
        self,
        db: Transaction,
        held: Sequence[_HeldStage],
        stored: Sequence[StageTimesRecord],
        providers: Mapping[str, ProviderRecord],
    ) -> list[MeasuredStage]:
        now = self._units.clock.wall()
        stretches = {
            root: stretch_of(db.telemetry.timings_between(root, now - WINDOW, now))
            for root in {each.root for each in held}
        }
        return [
            MeasuredStage(
                each.times.provider,
                providers[each.times.provider].stated,
                each.work,
                first_seconds(each.times, stored),
                stretches[each.root],
            )
            for each in held
        ]


def _held_stages(db: Transaction, job: str, stored: Sequence[StageTimesRecord]) -> list[_HeldStage]:
    """Return the stages of a job; none while the first times of one are not known."""
    held = holders(db.assignments.of_job(job))
    assigned = db.assignments.stages(job)
    times = {(each.attempt, each.cluster, each.stage): each for each in stored}
    found = []
    for root in roots(held):
        for each in held:
            if each.cluster != root.cluster:
                continue
            stage = assigned[each.id]
            own = times.get((each.attempt, each.cluster, stage.number))
            if own is None or own.provider != each.provider or not own.baseline:
                return []
            found.append(_HeldStage(root.id, own, stage.work))
    return found


def _key(times: StageTimesRecord) -> tuple[int, int, int, str, float]:
    return times.attempt, times.cluster, times.stage, times.provider, times.since


def _described(provider: ProviderRecord, rate: float) -> str:
    return (
        f"{provider.offer.name} offers {provider.stated:.3g} GFLOP/s, and its stage runs at {rate:.3g} "
        "GFLOP/s, compared with the offers and times of the others; plans count with that from now on"
    )
