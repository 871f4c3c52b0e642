"""Stragglers: providers whose stage, or whose link, has become slower than it was. Pure.

A stage is compared with its own first minutes, so that nothing depends on what its provider states.
Growth that all stages of a cluster share does not count, as no other cut would help.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ravnest.schemas.providers import ProviderOffer
from ravnest.server.db.records import LinkRecord, StageTimesRecord
from ravnest.server.scheduling.link_tests import ProviderLinks, addresses_of
from ravnest.telemetry import TimingRecord

WARM_UP = 20.0
"""Seconds after the start of a stage whose timings do not count."""
WINDOW = 120.0
"""Seconds over which timings are taken together."""
LEAST_RECORDS = 10
"""Timings of a stage in a window, below which nothing is concluded from it."""
LEAST_GROWTH = 1.5
"""Growth of a stage's time, in terms of the other stages', from which its provider is a straggler."""
LEAST_LINK_SHARE = 0.1
"""Time on a link, in terms of the slowest stage's time, below which the link does not matter."""
_MOST = 100.0

TimedRecord = tuple[float, TimingRecord]
"""A timing, and when the server received it."""
_Pair = tuple[str, str]
_Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class LinkSlowdown:
    """Growth of the time on the link between two providers."""

    factor: float
    since: float
    """Figures of the link that were measured before this time do not contain it."""


@dataclass(frozen=True)
class Slowdowns:
    """How much slower providers of a job are than they were when they began to train it."""

    compute: Mapping[str, float] = field(default_factory=dict)
    """Growth of the time of their stages, by provider; those that did not slow down are left out."""
    links: Mapping[_Pair, LinkSlowdown] = field(default_factory=dict)
    """The same for links, by the ids of both providers in ascending order."""

    def __bool__(self) -> bool:
        return bool(self.compute or self.links)

    def described(self, names: Mapping[str, str]) -> str:
        """Name the stragglers."""
        stages = [
            f"the stage of {names.get(provider, provider)} takes {factor:.1f} times as long as at first"
            for provider, factor in sorted(self.compute.items())
        ]
        links = [
            f"the link between {' and '.join(sorted(names.get(each, each) for each in pair))} takes "
            f"{slow.factor:.1f} times as long as at first"
            for pair, slow in sorted(self.links.items())
        ]
        return "; ".join([*stages, *links])


NO_SLOWDOWNS = Slowdowns()


def measured_times(
    known: Sequence[StageTimesRecord],
    timings: Iterable[TimedRecord],
    now: float,
    microbatches: float = 1.0,
) -> list[StageTimesRecord]:
    """Return the times of a cluster's stages with what the newest timings say.

    ``known``: the stages by number, all of them. ``timings``: those of the Root, in any order; they are
    the costs of a micro-batch. ``microbatches``: number in an update, which the Root may change.
    """
    series: dict[int, list[TimedRecord]] = {each.stage: [] for each in known}
    for time, record in timings:
        if record.stage in series:
            series[record.stage].append((time, record))
    found = []
    for each in known:
        own = sorted(series[each.stage], key=lambda timed: timed[0])
        behind = sorted(series.get(each.stage + 1, ()), key=lambda timed: timed[0])
        first = _first_window(own, each.since, now)
        last = _last_window(own, now)
        updated = each
        if each.baseline == 0.0 and first:
            window = (first[0][0], first[-1][0])
            returned = [timed for timed in behind if window[0] <= timed[0] <= window[1]]
            updated = replace(
                updated,
                baseline=microbatches * statistics.median(map(_compute, first)),
                link_baseline=microbatches * _link(first, returned, statistics.median),
            )
        if last:
            returned = [timed for timed in behind if timed[0] >= last[0][0]]
            updated = replace(
                updated,
                recent=microbatches * statistics.median(map(_compute, last)),
                recent_least=microbatches * _lower_quartile(list(map(_compute, last))),
                link_recent_least=microbatches * _link(last, returned, _lower_quartile),
            )
        found.append(updated)
    return found


def slowdowns(known: Iterable[StageTimesRecord]) -> Slowdowns:
    """Return the slowdowns of a job's providers, from the times of all stages of all its plans.

    A new plan has new cuts, so that growth under one plan multiplies that under the plans before.
    """
    clusters: dict[tuple[int, int], list[StageTimesRecord]] = {}
    for each in known:
        clusters.setdefault((each.attempt, each.cluster), []).append(each)
    compute: dict[str, float] = {}
    links: dict[_Pair, LinkSlowdown] = {}
    for key in sorted(clusters):
        stages = sorted(clusters[key], key=lambda each: each.stage)
        if len(stages) < 2 or any(0.0 in (each.baseline, each.recent) for each in stages):
            continue  # alone, a stage has no others to be compared with
        pace = max(min(each.recent / each.baseline for each in stages), 1.0)
        slowest = max(each.recent for each in stages)
        late: set[int] = set()
        for each in stages:
            growth = _growth(
                each.recent_least / each.baseline / pace, each.recent / each.baseline / pace
            )
            compute[each.provider] = compute.get(each.provider, 1.0) * growth
            if growth >= LEAST_GROWTH:
                late.add(each.stage)
        for one, other in pairwise(stages):
            # A machine that is busy also answers late: the link is not to blame then.
            is_blamed = not late & {one.stage, other.stage} and one.link_baseline > 0.0
            matters = is_blamed and one.link_recent_least >= LEAST_LINK_SHARE * slowest
            growth = one.link_recent_least / one.link_baseline / pace if matters else 1.0
            if growth >= LEAST_GROWTH:
                pair = (min(one.provider, other.provider), max(one.provider, other.provider))
                before = links[pair].factor if pair in links else 1.0
                links[pair] = LinkSlowdown(min(before * growth, _MOST), max(one.since, other.since))
    return Slowdowns(
        {each: min(factor, _MOST) for each, factor in compute.items() if factor >= LEAST_GROWTH}, links
    )


def with_slowdowns(
    providers: Sequence[tuple[str, ProviderOffer]], links: ProviderLinks, slow: Slowdowns
) -> tuple[tuple[tuple[str, ProviderOffer], ...], ProviderLinks]:
    """Return what the planner should know about providers and links that have become slower."""
    offers = dict(providers)
    chosen = tuple(
        (name, offer.model_copy(update={"compute": offer.compute / slow.compute.get(name, 1.0)}))
        for name, offer in providers
    )
    records = {(each.one, each.other): each for each in links.records}
    for pair, growth in slow.links.items():
        if not set(pair) <= set(offers):
            continue
        one, other = (offers[each] for each in pair)
        stated = min(one.bandwidth, other.bandwidth)
        record = records.get(pair) or LinkRecord(
            *pair, addresses_of(one, other), 0.0, forward=stated, back=stated
        )
        if not record.failure and record.time <= growth.since:
            records[pair] = replace(
                record, forward=record.forward / growth.factor, back=record.back / growth.factor
            )
    return chosen, replace(links, records=tuple(records[pair] for pair in sorted(records)))


def _growth(least: float, typical: float) -> float:
    """Return the growth that counts: three quarters of the window show it, or half of it a recovery."""
    if least >= LEAST_GROWTH:
        return least
    return typical if typical <= 1 / LEAST_GROWTH else 1.0


def _first_window(own: Sequence[TimedRecord], since: float, now: float) -> list[TimedRecord]:
    """Return the timings of the first window after the start, once it is over; empty: too few."""
    warm = [timed for timed in own if timed[0] >= since + WARM_UP]
    if not warm or now < warm[0][0] + WINDOW:
        return []
    window = [timed for timed in warm if timed[0] < warm[0][0] + WINDOW]
    return window if len(window) >= LEAST_RECORDS else []


def _last_window(own: Sequence[TimedRecord], now: float) -> list[TimedRecord]:
    """Return the timings of the last window; empty if they do not cover it."""
    window = [timed for timed in own if now - WINDOW < timed[0] <= now]
    if len(window) < LEAST_RECORDS:
        return []
    covered = window[0][0] <= now - 0.75 * WINDOW and window[-1][0] >= now - 0.25 * WINDOW
    return window if covered else []


def _compute(timed: TimedRecord) -> float:
    return timed[1].forward + timed[1].backward


def _link(own: Sequence[TimedRecord], behind: Sequence[TimedRecord], statistic: _Statistic) -> float:
    """Return the time of a micro-batch on the link to the next stage and back; 0.0 at the last stage."""
    there = statistic([record.to_next for _, record in own])
    return there + statistic([record.to_previous for _, record in behind]) if behind else 0.0


def _lower_quartile(values: Sequence[float]) -> float:
    """Return one of the values: between those before and after a jump lies nothing that was measured."""
    return sorted(values)[len(values) // 4]
