"""Choice of the schedule and of the number of micro-batches."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from plan_cases import chain, node, planned

from ravnest.plan.infeasible import Infeasible
from ravnest.plan.links import LinkFigures, MeasuredLink
from ravnest.plan.microbatches import (
    FAR,
    NEAR,
    StageTimes,
    choose_microbatches,
    cycle_seconds,
    delayed_seconds,
)
from ravnest.plan.plan import Plan
from ravnest.plan.planner import make_plan
from ravnest.plan.schedule_choice import DELAY_COST, delay_pays


def _equal(stages: int, compute: float = 1.0, link: float = 0.0) -> list[StageTimes]:
    return [StageTimes(compute, link if s < stages - 1 else 0.0, 4) for s in range(stages)]


@pytest.mark.parametrize(
    ("stages", "most", "pays"),
    [
        (1, 1, False),  # nobody waits
        (2, 1, True),  # twice the rate
        (8, 1, True),
        (3, 4, False),  # four micro-batches keep three stages busy enough
        (8, 4, True),
        (8, 16, False),
    ],
)
def test_a_delay_pays_if_there_are_too_few_micro_batches(stages: int, most: int, pays: bool) -> None:
    assert delay_pays([_equal(stages)], most) == pays


def test_fixed_times_do_not_make_a_delay_pay() -> None:
    """Otherwise every small model would be trained with late gradients."""
    assert not delay_pays([_equal(3, compute=1e-6)], 16)
    assert not delay_pays([_equal(3, compute=0.0)], 16)


def test_a_delay_never_more_than_doubles_the_rate() -> None:
    drawn = random.Random(3)
    for _ in range(200):
        stages = [
            StageTimes(drawn.uniform(0.01, 1), drawn.uniform(0, 1), 4)
            for _ in range(drawn.randint(1, 8))
        ]
        count = drawn.randint(1, 64)
        ratio = cycle_seconds(stages, count) / delayed_seconds(stages, count)
        assert 0.99 <= ratio <= 2.01
        if delay_pays([stages], 1):
            assert cycle_seconds(stages, 1) > 0.9 * DELAY_COST * delayed_seconds(stages, 1)


@pytest.mark.parametrize(("stages", "seconds"), [(3, 0.36), (8, 0.96)])
def test_the_number_of_micro_batches_is_good_on_near_and_far_links(stages: int, seconds: float) -> None:
    times = _equal(stages, seconds)
    chosen = choose_microbatches(times, 64, 1)
    assert chosen == -(-64 // -(-64 // chosen)), "the parts of a batch have equal sizes, but the last"
    for fixed in (NEAR, FAR):
        best = min(cycle_seconds(times, count, fixed=fixed) for count in range(1, 65))
        assert cycle_seconds(times, chosen, fixed=fixed) <= 1.07 * best


@pytest.mark.parametrize(("delay", "pays"), [(None, False), (0.005, False), (0.1, True)])
def test_measured_delays_of_distant_nodes_count(delay: float | None, pays: bool) -> None:
    """Three stages of 40 ms wait for 400 ms of links; short delays leave small models exact."""
    stages = [replace(each, latency=delay) for each in _equal(3, compute=0.04)]
    assert delay_pays([stages], 32) == pays


def test_a_plan_for_links_of_100_ms_overlaps_batches() -> None:
    nodes = [node(k) for k in range(3)]
    far = LinkFigures({pair: MeasuredLink(1000, 0.1) for pair in ((0, 1), (1, 2), (0, 2))})
    plan = planned(chain(6, rows=1), nodes, clusters=1, links=far)
    assert plan.schedule == "async"
    assert planned(chain(6, rows=1), nodes, clusters=1).schedule == "sync"


@pytest.mark.parametrize("rows", [None, 1])
def test_the_schedule_of_the_user_is_planned(rows: int | None) -> None:
    """With two versions of the weights and the activations of two batches, or with one of each."""
    profile = chain(9, rows=rows, weight=10**8, activation=10**7)
    nodes = [node(k) for k in range(3)]
    late, exact = (planned(profile, nodes, clusters=1, schedule=s) for s in ("async", "sync"))
    assert (late.schedule, exact.schedule) == ("async", "sync")
    assert [s.memory.versions / s.memory.weights for s in late.stages] == [1, 1, 0]
    assert not any(stage.memory.versions for stage in exact.stages)
    assert late.clusters[0].in_flight == 2 * late.clusters[0].microbatches
    assert all(
        a.memory.total > b.memory.total for a, b in zip(late.stages[:2], exact.stages, strict=False)
    )
    tight = [node(k, ram=1.01 * max(s.memory.total for s in exact.stages) / 1e9) for k in range(3)]
    assert isinstance(make_plan(profile, tight, clusters=1, schedule="sync"), Plan)
    assert isinstance(make_plan(profile, tight, clusters=1, schedule="async"), Infeasible)
    reason = (late if rows else exact).clusters[0].split_reason
    assert reason.endswith(f"because schedule='{'async' if rows else 'sync'}'")


def test_a_plan_says_that_memory_forbids_an_overlap() -> None:
    profile = chain(3, rows=32, weight=10**9)
    (cluster,) = planned(profile, [node(k, ram=5.5) for k in range(3)], clusters=1).clusters
    assert cluster.split_reason.endswith("; two batches that overlap would be faster, but RAM is short")


def test_a_plan_says_that_memory_forbids_larger_micro_batches() -> None:
    profile = chain(4, rows=1, weight=10**6, activation=10**9)
    (roomy,) = planned(profile, [node(0, ram=5)]).clusters
    assert "RAM" not in roomy.split_reason
    (tight,) = planned(profile, [node(0, ram=1.5)]).clusters
    assert tight.split_reason == (
        "each batch of 32 is split into 4 micro-batches of 8, because RAM is short"
    )


def test_a_plan_trains_single_samples_with_a_delay() -> None:
    nodes = [node(k) for k in range(3)]
    few, many = (planned(chain(9, rows=rows), nodes, clusters=1) for rows in (32, 1))
    assert (few.schedule, many.schedule) == ("async", "sync")
    (cluster,) = few.clusters
    assert cluster.split_reason == (
        "batches are not split into micro-batches: that would not be faster; too few to keep the stages"
        " busy, so that two batches overlap"
    )
    assert cluster.in_flight == 2
    assert [stage.memory.versions > 0 for stage in cluster.stages] == [True, True, False]
    assert few.samples_per_second < many.samples_per_second


def test_a_delay_must_fit_the_memory() -> None:
    profile = chain(3, rows=32, weight=10**9)
    tight = planned(profile, [node(k, ram=5.5) for k in range(3)], clusters=1)
    roomy = planned(profile, [node(k, ram=6.5) for k in range(3)], clusters=1)
    assert (tight.schedule, roomy.schedule) == ("sync", "async")
