"""Simulator of the schedule, compared with results computed by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.runtime.schedule.events import RunBackward, RunForward
from ravnest.runtime.schedule.machine import Schedule, format_runs
from ravnest.runtime.schedule.simulator import LinkCost, Scenario, StageCost, grid, simulate, steady_rate


def equal_stages(
    stages: int,
    window: int,
    *,
    link: float = 0,
    step: float = 0,
    every: int = 1,
    schedule: Schedule = "async",
    batches: int = 200,
) -> Scenario:
    """Return stages of 30 (10 forward, 20 backward); whole numbers, so that equal times are equal."""
    links = (LinkCost(link, link),) * (stages - 1)
    return Scenario((StageCost(10, 20, step),) * stages, links, window, every, schedule, batches)


def test_a_single_node_never_waits() -> None:
    found = simulate(equal_stages(1, 1, step=6, every=2, batches=10))
    assert found.rate == pytest.approx(1 / 33)
    assert found.makespan == 10 * 33
    assert found.stages[0].utilisation == pytest.approx(1)
    assert found.stages[0].max_staleness == 0


def test_with_a_window_of_one_each_micro_batch_takes_a_round_trip() -> None:
    found = simulate(equal_stages(3, 1, link=20, batches=7))
    assert found.makespan == 7 * (3 * 30 + 4 * 20)
    assert found.rate == pytest.approx(1 / 170)


def test_a_full_pipeline_reaches_the_rate_of_its_stages() -> None:
    found = simulate(equal_stages(3, 3))
    assert found.rate == pytest.approx(1 / 30)
    assert all(use.utilisation > 0.95 for use in found.stages)


@pytest.mark.parametrize(
    ("stages", "window", "share"),
    [(3, 3, 0.529), (3, 6, 0.947), (3, 7, 1.0), (8, 20, 0.938), (8, 21, 0.984)],
)
def test_known_rates(stages: int, window: int, share: float) -> None:
    found = simulate(equal_stages(stages, window, link=20, batches=40 * window))
    assert found.rate * 30 == pytest.approx(share, abs=0.005)


def test_ramp_up_and_drain_do_not_count() -> None:
    short, long = (simulate(equal_stages(3, 7, link=20, batches=n)) for n in (60, 600))
    assert short.rate == pytest.approx(long.rate, rel=1e-3)
    assert 60 / short.makespan < 0.95 * short.rate


def test_a_short_phase_has_its_overall_rate() -> None:
    assert simulate(equal_stages(3, 3, batches=1)).rate == pytest.approx(1 / 90)


def test_staleness_decreases_from_root_to_leaf() -> None:
    found = simulate(equal_stages(3, 3, batches=300))
    # The burst at the start may reach the Stem before its first update, so its maximum is 2.
    assert [use.max_staleness for use in found.stages] == [2, 2, 0]
    means = [use.mean_staleness for use in found.stages]
    assert means == pytest.approx([2, 1, 0], abs=0.05)


def test_sync_has_no_staleness_and_two_versions_while_it_steps() -> None:
    found = simulate(equal_stages(3, 3, every=4, schedule="sync"))
    assert {use.max_staleness for use in found.stages} == {0}
    assert {use.peak_versions for use in found.stages} == {2}


def test_sync_is_slower_because_of_the_flush() -> None:
    found = simulate(equal_stages(2, 2, every=2, schedule="sync", batches=20))
    # Root:  0F 1F .. 0B 1B, Leaf: 0F 0B 1F 1B: (10 + 30 + 30 + 20) per update.
    assert found.rate == pytest.approx(2 / 90)


def test_a_slow_root_still_feeds_the_following_stages() -> None:
    """If backwards always ran first, its own would queue up and the rate would be 71%."""
    costs = (StageCost(12, 24), StageCost(7, 14), StageCost(5.5, 11))
    links = (LinkCost(24.4, 24.4), LinkCost(2.2, 2.2))
    assert simulate(Scenario(costs, links, window=4, microbatches=200)).rate * 36 > 0.98


def test_steady_rate_equals_the_rate_of_a_long_phase() -> None:
    scenario = equal_stages(3, 7, link=20, step=3, every=2, batches=500)
    assert steady_rate(scenario) == pytest.approx(simulate(scenario).rate, rel=0.01)
    sync = equal_stages(3, 7, link=20, step=3, every=8, batches=80, schedule="sync")
    assert steady_rate(sync) == pytest.approx(simulate(sync).rate)


def test_the_timeline_is_kept_only_if_requested() -> None:
    scenario = equal_stages(2, 2, batches=2)
    assert simulate(scenario).timeline == ()
    timeline = simulate(scenario, record=True).timeline
    assert format_runs(span.run for span in timeline if span.stage == 1) == "0F 0B s0 1F 1B s1 e0"
    assert grid(timeline, 10) == (
        "Root  0F 1F .  .  0B 0B .  1B 1B\n"  # a cell is ten ticks
        "Leaf  .  0F 0B 0B 1F 1B 1B .  ."
    )


times = st.integers(0, 40)


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(
        st.builds(StageCost, st.integers(1, 20), st.integers(1, 40), times), min_size=1, max_size=5
    ),
    delays=st.lists(st.builds(LinkCost, times, times), min_size=4, max_size=4),
    window=st.integers(1, 9),
    every=st.integers(1, 4),
    schedule=st.sampled_from(["async", "sync"]),
    batches=st.integers(1, 40),
)
def test_invariants_of_any_pipeline(
    costs: list[StageCost],
    delays: list[LinkCost],
    window: int,
    every: int,
    schedule: Schedule,
    batches: int,
) -> None:
    links = tuple(delays[: len(costs) - 1])
    found = simulate(Scenario(tuple(costs), links, window, every, schedule, batches), record=True)
    updates = math.ceil(batches / every)
    for position, (cost, use) in enumerate(zip(costs, found.stages, strict=True)):
        spans = [span for span in found.timeline if span.stage == position]
        assert all(before.end <= after.start for before, after in pairwise(spans))
        assert sum(isinstance(span.run, RunForward) for span in spans) == batches
        assert sum(isinstance(span.run, RunBackward) for span in spans) == batches
        busy = batches * (cost.forward + cost.backward) + updates * cost.step
        assert use.utilisation == pytest.approx(busy / found.makespan)
        assert use.peak_in_flight <= window
        assert use.peak_versions <= math.ceil(window / every) + 1, "the plan's estimate"
