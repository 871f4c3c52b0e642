"""Curves of a job for the page, with a bounded number of points however long the training is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ravnest.server.db.database import Transaction
from ravnest.server.db.records import AssignmentRecord
from ravnest.server.db.telemetry import LossBucket
from ravnest.server.views import history
from ravnest.telemetry import PaceRecord, ScheduleRecord, TimingRecord, ValidationRecord

MOST_BUCKETS = 2000
"""Points of a loss curve that a browser may ask for."""
_MOST_PACES = 600
_MOST_TIMINGS = 200
"""Points of each stage."""
_READ_TIMINGS = 4000
_LAST = 2**53
Each = TypeVar("Each")


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
    """Times and samples per second at that time."""
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
    paces = _paces(db, chain)
    validations = tuple(
        ValidationPoint(ends.get(test.epoch - 1, 0), test.epoch, test.name, test.value)
        for _, test in sorted(results.items())
    )
    return JobCurves(
        loss=loss_buckets(db, job, points, first, last),
        validations=thinned(validations, MOST_BUCKETS),
        paces=thinned(paces, _MOST_PACES),
        stages=_stage_times(db, chain, paces, _samples_per_microbatch(db, job, chain)),
    )


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


def _paces(db: Transaction, chain: Sequence[AssignmentRecord]) -> list[tuple[float, float]]:
    """Return times and rates, oldest first; nodes of an earlier version report a mean only."""
    found = (
        (time, pace.samples_per_second if pace.recent is None else pace.recent)
        for each in chain
        for time, pace in db.telemetry.timed(each.id, PaceRecord, 2000)
    )
    return sorted((time, rate) for time, rate in found if rate is not None)


def _samples_per_microbatch(
    db: Transaction, job: str, chain: Sequence[AssignmentRecord]
) -> float | None:
    schedules = db.telemetry.newest(chain[0].id, ScheduleRecord) if chain else []
    if not schedules:
        return None
    return max(1.0, db.jobs.spec(job).training.batch_size / max(1, schedules[0].microbatches))


def _stage_times(
    db: Transaction,
    chain: Sequence[AssignmentRecord],
    paces: Sequence[tuple[float, float]],
    size: float | None,
) -> tuple[StageTimeCurve, ...]:
    """Return the times of the stages of the leading cluster; older plans had other stages."""
    by_stage: dict[int, list[tuple[float, float]]] = {}
    for each in chain[:1]:
        for time, timing in db.telemetry.timed(each.id, TimingRecord, _READ_TIMINGS):
            seconds = timing.forward + timing.backward + timing.step
            by_stage.setdefault(timing.stage, []).append((time, seconds))
    return tuple(
        StageTimeCurve(
            cluster=chain[0].cluster,
            stage=stage,
            times=tuple(time for time, _ in points),
            seconds=tuple(seconds for _, seconds in points),
            shares=tuple(computing_share(time, seconds, paces, size) for time, seconds in points),
        )
        for stage, newest_first in sorted(by_stage.items())
        for points in [thinned(newest_first[::-1], _MOST_TIMINGS)]
    )


def computing_share(
    time: float, seconds: float, paces: Sequence[tuple[float, float]], size: float | None
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
