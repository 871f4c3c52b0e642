"""Stragglers: which series of stage times are a slower provider, and what the planner is told then."""

import random
from collections.abc import Callable

import pytest
from server_cases import offer

from ravnest.server.db.records import LinkRecord, StageTimesRecord
from ravnest.server.scheduling.link_tests import NO_LINKS, ProviderLinks, addresses_of
from ravnest.server.scheduling.stragglers import (
    NO_SLOWDOWNS,
    LinkSlowdown,
    Slowdowns,
    TimedRecord,
    measured_times,
    slowdowns,
    with_slowdowns,
)
from ravnest.telemetry import TimingRecord

Cost = Callable[[float], tuple[float, float]]
"""Seconds of a stage and on its link to the next one, by time."""
STEP = 30
"""Seconds between two looks of the server."""


def places(*names: str, attempt: int = 0, since: float = 0.0) -> list[StageTimesRecord]:
    return [
        StageTimesRecord("job-1", attempt, 0, stage, name, since) for stage, name in enumerate(names)
    ]


def series(*costs: Cost, seconds: int = 900, begin: int = 0) -> list[TimedRecord]:
    found = []
    for second in range(begin, begin + seconds):
        now = float(second)
        for stage, cost in enumerate(costs):
            compute, link = cost(now)
            back = costs[stage - 1](now)[1] if stage else 0.0
            record = TimingRecord(stage, 5, compute / 3, compute * 2 / 3, 0.01, link, back)
            found.append((now, record))
    return found


def looked(
    known: list[StageTimesRecord], timings: list[TimedRecord], until: int = 900, begin: int = 0
) -> list[Slowdowns]:
    """Return what the server finds at each look."""
    found = []
    for now in range(begin, begin + until + 1, STEP):
        so_far = [timed for timed in timings if timed[0] <= now]
        known = measured_times(known, so_far, float(now))
        found.append(slowdowns(known))
    return found


def steady(seconds: float, link: float = 0.0) -> Cost:
    return lambda _: (seconds, link)


def after(time: float, factor: float, seconds: float = 0.1) -> Cost:
    return lambda now: (seconds * (factor if now >= time else 1.0), 0.0)


def test_a_stage_that_became_slower_is_found_and_its_provider_named() -> None:
    found = looked(places("a", "b"), series(steady(0.1), after(400, 3.0)))
    assert found[400 // STEP] == NO_SLOWDOWNS
    assert found[-1].compute == {"b": pytest.approx(3.0, rel=0.01)}
    first = next(number for number, each in enumerate(found) if each)
    assert first * STEP >= 400 + 90, "three quarters of the window must be slow"
    assert found[-1].described({"b": "bob"}) == "the stage of bob takes 3.0 times as long as at first"


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_short_bursts_are_no_straggler(seed: int) -> None:
    draw = random.Random(seed)
    bursts = [draw.uniform(200, 850) for _ in range(3)]

    def noisy(now: float) -> tuple[float, float]:
        burst = 8.0 if any(start <= now < start + 20 for start in bursts) else 1.0
        return 0.1 * draw.lognormvariate(0, 0.3) * burst, 0.03 * draw.lognormvariate(0, 0.5)

    assert not any(looked(places("a", "b", "c"), series(noisy, noisy, noisy)))


def test_growth_that_all_stages_share_is_no_straggler() -> None:
    assert not any(looked(places("a", "b"), series(after(400, 3.0), after(400, 3.0))))


def test_other_micro_batches_are_no_straggler() -> None:
    """Twice as large ones cost about twice as much, half of them are in an update."""
    timings = series(after(400, 2.0), after(400, 2.2))
    known = places("a", "b")
    for now in range(0, 901, STEP):
        so_far = [timed for timed in timings if timed[0] <= now]
        known = measured_times(known, so_far, float(now), 4.0 if now < 400 else 2.0)
    assert slowdowns(known) == NO_SLOWDOWNS
    assert known[0].recent == pytest.approx(known[0].baseline)


def test_the_slow_start_of_a_stage_does_not_count() -> None:
    warming = [lambda now: (1.0 if now < 20 else 0.1, 0.0)] * 2
    found = looked(places("a", "b"), series(*warming))
    assert not any(found)
    known = measured_times(places("a", "b"), series(*warming), 200.0)
    assert known[0].baseline == pytest.approx(0.1)


def test_nothing_is_concluded_from_a_few_timings_or_old_ones() -> None:
    known = measured_times(places("a", "b"), series(steady(0.1), steady(0.1), seconds=200), 200.0)
    rare = series(steady(0.1), steady(0.9), begin=300, seconds=200)[::60]
    assert measured_times(known, rare, 500.0) == known
    old = series(steady(0.1), steady(0.9), begin=300, seconds=60)
    assert measured_times(known, old, 500.0) == known, "the last window is not covered"


def test_a_slower_link_is_found_if_it_matters() -> None:
    def link(now: float) -> tuple[float, float]:
        return 0.1, 0.2 if now >= 400 else 0.05

    found = looked(places("b", "a"), series(link, steady(0.1)))[-1]
    assert found == Slowdowns({}, {("a", "b"): LinkSlowdown(pytest.approx(4.0, rel=0.01), 0.0)})
    assert found.described({}) == "the link between a and b takes 4.0 times as long as at first"

    def fast(now: float) -> tuple[float, float]:
        return 0.1, 0.002 if now >= 400 else 0.0005

    assert not any(looked(places("b", "a"), series(fast, steady(0.1)))), "2 ms beside 100 ms"


def test_a_busy_machine_also_answers_late_and_its_links_are_not_to_blame() -> None:
    def late(now: float) -> tuple[float, float]:
        return 0.1, 0.2 if now >= 400 else 0.05

    found = looked(places("a", "b"), series(late, after(400, 3.0)))[-1]
    assert found == Slowdowns({"b": pytest.approx(3.0, rel=0.01)}, {})


def test_a_slowdown_outlives_its_plan_and_a_recovery_ends_it() -> None:
    before = places("a", "b")
    timings = series(steady(0.1), after(400, 3.0))
    for now in range(0, 901, STEP):
        before = measured_times(before, [t for t in timings if t[0] <= now], float(now))
    fresh = places("a", "b", attempt=1, since=900.0)
    assert slowdowns([*before, *fresh]).compute == {"b": pytest.approx(3.0, rel=0.01)}
    timings = series(steady(0.15), after(1400, 1 / 3, 0.15), begin=900)
    for now in range(900, 1801, STEP):
        fresh = measured_times(fresh, [t for t in timings if t[0] <= now], float(now))
        if now == 1350:
            assert slowdowns([*before, *fresh]).compute == {"b": pytest.approx(3.0, rel=0.01)}
    assert slowdowns([*before, *fresh]) == NO_SLOWDOWNS


def test_a_stage_alone_has_nobody_to_be_compared_with() -> None:
    assert not any(looked(places("a"), series(after(400, 3.0))))


def test_the_planner_is_told_what_was_measured() -> None:
    one, other = offer("one", compute=90.0), offer("other", address="127.0.0.1:9001", bandwidth=40.0)
    providers = (("a", one), ("b", other))
    slow = Slowdowns({"a": 3.0}, {("a", "b"): LinkSlowdown(4.0, since=100.0)})
    chosen, links = with_slowdowns(providers, NO_LINKS, slow)
    assert [each.compute for _, each in chosen] == [30.0, 50.0]
    assert [(each.one, each.other, each.forward, each.back) for each in links.records] == [
        ("a", "b", 10.0, 10.0)
    ], "a quarter of what the slower one states"
    measured = LinkRecord("a", "b", addresses_of(one, other), 50.0, forward=80.0, back=60.0)
    _, links = with_slowdowns(providers, ProviderLinks((measured,)), slow)
    assert [(each.forward, each.back) for each in links.records] == [(20.0, 15.0)]
    later = LinkRecord("a", "b", addresses_of(one, other), 150.0, forward=20.0, back=15.0)
    assert with_slowdowns(providers, ProviderLinks((later,)), slow)[1].records == (later,)
    failed = LinkRecord("a", "b", addresses_of(one, other), 50.0, failure="no route")
    assert with_slowdowns(providers, ProviderLinks((failed,)), slow)[1].records == (failed,)
    assert with_slowdowns(providers, NO_LINKS, NO_SLOWDOWNS) == (providers, NO_LINKS)
