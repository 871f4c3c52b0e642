"""Curves of a job for the page, with a bounded number of points however long the training is."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from ravnest.schemas.jobs import TrainingSpec
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import AssignmentRecord
from ravnest.server.db.telemetry import LossBucket
from ravnest.server.job_status import lineage, roots
from ravnest.server.views import history, plans
from ravnest.telemetry import PaceRecord, ScheduleRecord, TimingRecord, ValidationRecord

MOST_BUCKETS = 2000
"""Points of a loss curve that a browser may ask for."""
_MOST_PACES = 600
_MOST_TIMINGS = 200
"""Points of each stage."""
_READ_SCHEDULES = 100
_LAST = 2**53
_SILENT = 10.0
"""Seconds for which the rate of a cluster that reports often counts in a pause."""
Each = TypeVar("Each")
Rate = tuple[float, float]
"""A time, and samples per second at that time."""


@dataclass(frozen=True)
class MicrobatchSizes:
    """Sizes of micro-batches and updates."""

    samples: float
    """Samples of a micro-batch."""
    per_update: int
    """Micro-batches of an update."""

    def computing(self, timing: TimingRecord) -> float:
        """Return the seconds that a stage computes for a micro-batch, with its part of the update."""
        return timing.forward + timing.backward + timing.step / self.per_update


@dataclass(frozen=True)
class LossCurve:
    """Losses of a range of updates."""

    step: int
    """Updates in a bucket."""
    buckets: tuple[LossBucket, ...]
    first: int = 0
    """First and last update of the whole training that are stored."""
    last: int = 0


@dataclass(frozen=True)
class ValidationPoint:
    """Result of a validation, at the update after which it was made."""

    update: int
    epoch: int
    name: str
    value: float | None


@dataclass(frozen=True)
class StageTimeCurve:
    """Computing time of a stage, over time."""

    cluster: int
    stage: int
    times: tuple[float, ...]
    seconds: tuple[float, ...]
    """Seconds of a micro-batch."""
    shares: tuple[float | None, ...]
    """Share of the time in which the stage computes, between 0 and 1; ``None``: not known."""


@dataclass(frozen=True)
class JobCurves:
    """All curves of a job."""

    loss: LossCurve
    validations: tuple[ValidationPoint, ...]
    paces: tuple[tuple[float, float], ...]
    """Times and samples per second at that time, of all clusters together."""
    stages: tuple[StageTimeCurve, ...]


def job_curves(db: Transaction, job: str, points: int, first: int, last: int) -> JobCurves:
    """Return the curves of a job; losses of updates ``first`` to ``last`` in at most ``points``."""
    chain = history(db, job, db.assignments.of_job(job))
    ends: dict[int, int] = {}
    results: dict[int, ValidationRecord] = {}
    for each in reversed(chain):
        results |= {test.number: test for test in db.telemetry.validations(each.id)}
    for each in reversed(chain) if results else ():
        ends |= db.telemetry.epoch_ends(each.id)
    leading = _paces(db, chain)
    tests = [test for _, test in sorted(results.items())]
    metrics = max((len(_metrics(test)) for test in tests), default=1)
    validations = tuple(
        ValidationPoint(ends.get(test.epoch - 1, 0), test.epoch, name, value)
        for test in thinned(tests, MOST_BUCKETS // metrics)
        for name, value in _metrics(test).items()
    )
    return JobCurves(
        loss=loss_buckets(db, job, points, first, last),
        validations=validations,
        paces=thinned(summed([leading, *_other_paces(db, job, chain)]), _MOST_PACES),
        stages=_stage_times(db, chain, leading, _microbatch_sizes(db, job, chain)),
    )


def microbatch_sizes(training: TrainingSpec, schedule: ScheduleRecord) -> MicrobatchSizes:
    """Return the sizes of micro-batches and updates under a schedule."""
    parts = max(1, schedule.microbatches)
    return MicrobatchSizes(max(1.0, training.batch_size / parts), parts * training.update_frequency)


def current_rate(pace: PaceRecord) -> float | None:
    """Return the newest samples per second; nodes of an earlier version report a mean only."""
    return pace.samples_per_second if pace.recent is None else pace.recent


def _metrics(test: ValidationRecord) -> dict[str, float | None]:
    """Return the results of a validation by metric, the first one first."""
    return {test.name: test.value} | test.metrics


def loss_buckets(db: Transaction, job: str, points: int, first: int = 0, last: int = _LAST) -> LossCurve:
    """Return a loss curve in at most ``points`` buckets.

    Updates that a later Root repeats replace those of an earlier one, as in ``job_losses``.
    """
    chain = history(db, job, db.assignments.of_job(job))
    spans = [(each, span) for each in chain if (span := db.telemetry.loss_range(each.id)) is not None]
    if not spans:
        return LossCurve(1, ())
    whole = min(span[0] for _, span in spans), max(span[1] for _, span in spans)
    begin, end = max(first, whole[0]), min(last, whole[1])
    step = bucket_size(begin, end, points)
    found: list[LossBucket] = []
    for each, span in spans:  # newest first: each one holds the updates before those after it
        if begin <= end:
            found += db.telemetry.loss_buckets(each.id, begin, end, step)
            end = min(end, span[0] - 1)
    return LossCurve(step, tuple(merged(found, step)), *whole)


def bucket_size(first: int, last: int, points: int) -> int:
    """Return the smallest size of buckets, aligned to multiples of it, of which ``points`` suffice."""
    step = max(1, -(-(last - first + 1) // max(points, 1)))
    while last // step - first // step + 1 > points > 0:
        step += 1
    return step


def merged(buckets: Iterable[LossBucket], step: int) -> list[LossBucket]:
    """Return buckets in order of their updates; parts of the same bucket become one."""
    found: dict[int, LossBucket] = {}
    for bucket in sorted(buckets, key=lambda each: each.first):
        key = bucket.first // step
        known = found.get(key)
        found[key] = bucket if known is None else _joined(known, bucket)
    return list(found.values())


def _joined(one: LossBucket, other: LossBucket) -> LossBucket:
    count = one.count + other.count
    finite = [each for each in (one, other) if each.mean is not None]
    weight = sum(each.count for each in finite)
    return LossBucket(
        first=one.first,
        last=other.last,
        count=count,
        mean=sum((each.mean or 0.0) * each.count for each in finite) / weight if finite else None,
        low=min((each.low for each in finite if each.low is not None), default=None),
        high=max((each.high for each in finite if each.high is not None), default=None),
        staleness=(one.staleness * one.count + other.staleness * other.count) / count,
        epoch=max(one.epoch, other.epoch),
        learning_rate=other.learning_rate if one.learning_rate is None else one.learning_rate,
    )


def thinned(values: Sequence[Each], most: int) -> tuple[Each, ...]:
    """Return at most ``most`` values, evenly spread, with the last one."""
    if len(values) <= most:
        return tuple(values)
    step = -(-len(values) // most)
    return tuple(values[(len(values) - 1) % step :: step])


def summed(clusters: Sequence[Sequence[Rate]]) -> list[Rate]:
    """Return the sum of the rates of clusters, at the times of all their reports.

    A rate counts until the next one of its cluster. In a longer pause it counts for ``_SILENT`` seconds,
    or for twice the time to the report before: of old reports, few are kept.
    """
    reports = sorted(
        (time, number, time + counts, rate)
        for number, own in enumerate(clusters)
        for (time, rate), counts in zip(own, _counting_times(own), strict=True)
    )
    newest: dict[int, tuple[float, float]] = {}
    found: dict[float, float] = {}
    for time, number, until, rate in reports:
        newest[number] = until, rate
        found[time] = sum(rate for until, rate in newest.values() if time <= until)
    return list(found.items())


def _counting_times(reports: Sequence[Rate]) -> list[float]:
    """Return the seconds for which each report of a cluster counts at most."""
    gaps = [later[0] - earlier[0] for earlier, later in pairwise(reports)]
    before = [*gaps[:1], *gaps] if gaps else [0.0] * len(reports)
    return [max(_SILENT, 2 * gap) for gap in before]


def _paces(db: Transaction, chain: Sequence[AssignmentRecord]) -> list[Rate]:
    """Return times and rates of a cluster, oldest first."""
    return sorted(rate for each in chain for rate in db.telemetry.rates(each.id))


def _other_paces(db: Transaction, job: str, leading: Sequence[AssignmentRecord]) -> list[list[Rate]]:
    """Return times and rates of the other clusters of each plan."""
    known = {each.id for each in leading}
    return [
        _paces(db, chain)
        for plan in plans(db, job, db.assignments.of_job(job))
        for root in roots(plan)
        if (chain := lineage(plan, root.node)) and chain[0].id not in known
    ]


def _microbatch_sizes(
    db: Transaction, job: str, chain: Sequence[AssignmentRecord]
) -> list[tuple[float, MicrobatchSizes]]:
    """Return times and the sizes from then on, oldest first."""
    schedules = db.telemetry.timed(chain[0].id, ScheduleRecord, _READ_SCHEDULES) if chain else []
    if not schedules:
        return []
    training = db.jobs.spec(job).training
    return [(time, microbatch_sizes(training, each)) for time, each in reversed(schedules)]


def sizes_at(time: float, sizes: Sequence[tuple[float, MicrobatchSizes]]) -> MicrobatchSizes | None:
    """Return the sizes at a time; ``sizes``: as they changed, oldest first."""
    if not sizes:
        return None
    return sizes[max(bisect_right(sizes, time, key=lambda each: each[0]) - 1, 0)][1]


def _stage_times(
    db: Transaction,
    chain: Sequence[AssignmentRecord],
    paces: Sequence[Rate],
    sizes: Sequence[tuple[float, MicrobatchSizes]],
) -> tuple[StageTimeCurve, ...]:
    """Return the times of the stages of the leading cluster; older plans had other stages."""
    by_stage: dict[int, list[tuple[float, float]]] = {}
    for each in chain[:1]:
        for time, timing in db.telemetry.timings_between(each.id, 0.0, _LAST):
            # Before the schedule is known, the optimizer step is left out: its share is not known.
            parts = sizes_at(time, sizes)
            seconds = timing.forward + timing.backward if parts is None else parts.computing(timing)
            by_stage.setdefault(timing.stage, []).append((time, seconds))
    return tuple(
        StageTimeCurve(
            cluster=chain[0].cluster,
            stage=stage,
            times=tuple(time for time, _ in points),
            seconds=tuple(seconds for _, seconds in points),
            shares=tuple(
                computing_share(time, seconds, paces, None if parts is None else parts.samples)
                for time, seconds in points
                for parts in [sizes_at(time, sizes)]
            ),
        )
        for stage, found in sorted(by_stage.items())
        for points in [thinned(found, _MOST_TIMINGS)]
    )


def computing_share(
    time: float, seconds: float, paces: Sequence[Rate], size: float | None
) -> float | None:
    """Return the share of time in which a stage computes, at the rate reported nearest to ``time``.

    ``seconds``: time of a micro-batch, ``paces``: times and samples per second, ``size``: samples of a
    micro-batch.
    """
    if not paces or size is None:
        return None
    after = bisect_left(paces, (time, 0.0))
    near = min(paces[max(after - 1, 0) : after + 1], key=lambda each: abs(each[0] - time))
    return min(1.0, seconds * near[1] / size)
