"""Speed of providers as their work shows it, against the speed that they offer. Pure.

How much of its offered GFLOP/s a machine reaches depends on the model, so that providers of the same job
are compared with each other: each one's stage, its work by the plan and the time that it took. One whose
share is lower than that of most offers more than it has. The times are the nodes' own words; the clock
of the server shows if a cluster takes much longer than they explain.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ravnest.server.db.records import StageTimesRecord
from ravnest.server.scheduling.stragglers import LEAST_RECORDS, TimedRecord, slowdowns

LEAST_PROVIDERS = 3
"""Providers of a job that can be compared: of two, nobody knows which one states something wrong."""
LOW_RATE = 0.5
"""Share of the offered rate below which a provider's rate becomes an event."""
UNEXPLAINED = 2.0
"""Time of a micro-batch, in terms of all that the nodes state one after the other, which is believed:
pipelines overlap these times, and messages and data cost some more."""
LEAST_SHARE = 0.01
"""Smallest share of an offer: a rate of 0 could not be planned with."""
_LEAST_GROUPS = 5


@dataclass(frozen=True)
class MeasuredStage:
    """One provider's stage of a job."""

    provider: str
    offered: float
    """GFLOP/s in its offer."""
    work: float
    """GFLOP of the stage per batch, by the plan."""
    seconds: float
    """Seconds per update, as its node states."""
    stretch: float = 1.0
    """Factor by which its cluster is slower than its nodes' times explain."""


def measured_rates(stages: Sequence[MeasuredStage]) -> dict[str, float]:
    """Return the GFLOP/s of the providers of a job by their work, at most what each offers.

    Empty if too few can be compared. The share of the offer that most reach counts as all of it. A
    minority of providers that offer too little cannot make the others look slow.
    """
    known = [each for each in stages if min(each.offered, each.work, each.seconds) > 0]
    if len(known) < LEAST_PROVIDERS:
        return {}
    shares = {each.provider: each.work / (each.seconds * each.stretch) / each.offered for each in known}
    usual = sorted(shares.values())[len(shares) // 2]
    return {
        each.provider: each.offered * min(max(shares[each.provider] / usual, LEAST_SHARE), 1.0)
        for each in known
    }


def first_seconds(own: StageTimesRecord, stored: Iterable[StageTimesRecord]) -> float:
    """Return the first time of a stage, as it would be if its provider had not become slower.

    ``stored``: the stages of all plans of the job. Its plans count what became slower under earlier ones
    besides the rate; it must not count twice.
    """
    earlier = slowdowns(each for each in stored if each.attempt < own.attempt)
    return own.baseline / earlier.compute.get(own.provider, 1.0)


def stretch_of(timings: Iterable[TimedRecord]) -> float:
    """Return by how much a cluster is slower than the times of its nodes explain; 1: they explain it.

    ``timings``: those that its Root reported within a window, with the times at which they arrived.
    Pauses, such as validations, do not count as long as they are rare.
    """
    arrivals: dict[float, int] = {}
    stated: dict[int, list[float]] = {}
    for time, record in timings:
        costs = (record.forward, record.backward, record.step, record.to_next, record.to_previous)
        stated.setdefault(record.stage, []).append(sum(costs))
        if record.stage == 0:
            arrivals[time] = arrivals.get(time, 0) + record.microbatches
    times = sorted(arrivals)
    seen = [(time - before) / arrivals[time] for before, time in pairwise(times) if arrivals[time]]
    if len(seen) < _LEAST_GROUPS or any(len(each) < LEAST_RECORDS for each in stated.values()):
        return 1.0
    explained = UNEXPLAINED * sum(statistics.median(each) for each in stated.values())
    return max(statistics.median(seen) / explained, 1.0) if explained > 0 else 1.0
