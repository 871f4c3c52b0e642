"""The schedule under virtual time, against figures that can be worked out by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.plan.microbatches import (
    LATENCY_SECONDS,
    OVERHEAD_SECONDS,
    UNIT_SECONDS,
    StageTimes,
    cycle_seconds,
    delayed_seconds,
)
from ravnest.runtime.schedule.events import Action, RunBackward, RunForward, RunStep, RunWeights
from ravnest.runtime.schedule.notation import format_runs
from ravnest.runtime.schedule.simulator import (
    LinkCost,
    Scenario,
    Simulation,
    StageCost,
    grid,
    simulate,
    steady_rate,
)
from ravnest.types import Schedule


def equal_stages(
    stages: int,
    update_size: int,
    *,
    link: float = 0,
    step: float = 0,
    schedule: Schedule = "sync",
    window: int | None = None,
    updates: int = 12,
    clip: bool = False,
) -> Scenario:
    """Return a pipeline of stages of 30: forward, gradients of inputs and of weights take 10 each.

    The window is as large as is useful. The costs are whole numbers, so that ties are ties.
    """
    return Scenario(
        (StageCost(10, 10, step, weights=10),) * stages,
        (LinkCost(link, link),) * (stages - 1),
        window or update_size * (1 if schedule == "sync" else 2),
        update_size,
        schedule,
        update_size * updates,
        clip,
    )


def share(scenario: Scenario) -> float:
    """Return the rate as a share of that of a stage of 30 that never waits."""
    return steady_rate(scenario) * 30


class TestRate:
    def test_a_node_alone_never_waits(self) -> None:
        found = simulate(equal_stages(1, 2, step=6, updates=5))
        assert found.rate == pytest.approx(1 / 33)
        assert found.makespan == 10 * 33
        assert found.stages[0].utilisation == pytest.approx(1)
        assert found.stages[0].max_staleness == 0

    def test_one_in_flight_takes_a_round_trip_each(self) -> None:
        """The last stages compute their weight gradients while the next micro-batch is on its way."""
        found = simulate(equal_stages(3, 7, link=20, window=1, updates=20))
        assert found.rate == pytest.approx(1 / (30 + 20 + 20 + 4 * 20))

    @pytest.mark.parametrize(
        ("stages", "update_size", "link", "expected"),
        [
            (3, 12, 0, 1.0),
            (3, 12, 10, 1.0),
            (3, 12, 20, 0.97),
            (3, 15, 20, 1.0),
            (8, 32, 0, 1.0),
            (8, 32, 10, 0.985),
            (8, 32, 20, 0.90),
            (8, 40, 20, 0.976),
            (3, 1, 20, 0.2),
            (8, 1, 20, 0.067),
        ],
    )
    def test_sync(self, stages: int, update_size: int, link: float, expected: float) -> None:
        assert share(equal_stages(stages, update_size, link=link)) == pytest.approx(expected, abs=0.005)

    @pytest.mark.parametrize(
        ("stages", "update_size", "link", "expected"),
        [(3, 1, 20, 0.4), (3, 6, 20, 1.0), (8, 1, 20, 0.133), (8, 16, 20, 1.0)],
    )
    def test_async(self, stages: int, update_size: int, link: float, expected: float) -> None:
        found = share(equal_stages(stages, update_size, link=link, schedule="async"))
        assert found == pytest.approx(expected, abs=0.005)

    @pytest.mark.parametrize(
        ("stages", "update_size", "link", "expected"),
        [(3, 12, 0, 0.947), (3, 12, 20, 0.783), (8, 32, 0, 0.932), (8, 32, 20, 0.733)],
    )
    def test_a_clip_costs_a_round_trip_per_update(
        self, stages: int, update_size: int, link: float, expected: float
    ) -> None:
        clipped = equal_stages(stages, update_size, link=link, clip=True)
        assert share(clipped) == pytest.approx(expected, abs=0.005)

    def test_deferred_weight_gradients_fill_the_time_in_which_a_stage_would_wait(self) -> None:
        deferred = equal_stages(8, 32, link=10)
        together = replace(deferred, costs=(StageCost(10, 20),) * 8)
        assert share(together) < 0.8 < 0.98 < share(deferred)

    def test_ramp_up_and_drain_do_not_count(self) -> None:
        short, long = (simulate(equal_stages(3, 12, link=20, updates=n)) for n in (6, 60))
        assert short.rate == pytest.approx(long.rate, rel=1e-3)
        assert 72 / short.makespan < 0.98 * short.rate

    def test_a_phase_too_short_to_settle_gives_its_overall_rate(self) -> None:
        found = simulate(equal_stages(3, 1, updates=1))
        assert found.rate == pytest.approx(1 / 70)

    def test_a_slow_root_still_feeds_the_stages_behind_it(self) -> None:
        """If backwards always ran first, the Root's would queue and the others would starve."""
        costs = (StageCost(12, 24), StageCost(7, 14), StageCost(5.5, 11))
        links = (LinkCost(24.4, 24.4), LinkCost(2.2, 2.2))
        scenario = Scenario(costs, links, window=4, update_size=8, schedule="async", microbatches=400)
        assert simulate(scenario).rate * 36 > 0.98

    def test_steady_rate_is_that_of_a_long_phase(self) -> None:
        for schedule in ("sync", "async"):
            scenario = equal_stages(3, 8, link=20, step=3, schedule=schedule, updates=60)  # type: ignore[arg-type]
            assert steady_rate(scenario) == pytest.approx(simulate(scenario).rate, rel=0.01)


class TestMemory:
    @pytest.mark.parametrize("clip", [False, True])
    def test_sync_uses_the_weights_themselves_and_no_older_ones(self, clip: bool) -> None:
        found = simulate(equal_stages(3, 4, link=20, clip=clip))
        assert {use.max_staleness for use in found.stages} == {0}
        assert {use.peak_versions for use in found.stages} == {1}

    @pytest.mark.parametrize("update_size", [1, 3, 8])
    def test_async_is_one_update_late_and_keeps_two_versions(self, update_size: int) -> None:
        found = simulate(equal_stages(4, update_size, link=20, schedule="async"))
        assert [use.max_staleness for use in found.stages] == [1, 1, 1, 0]
        assert [use.peak_versions for use in found.stages] == [2, 2, 2, 1]

    def test_a_stage_keeps_activations_of_one_batch_at_most(self) -> None:
        found = simulate(equal_stages(3, 12, link=20))
        assert [use.peak_in_flight for use in found.stages] == [12, 12, 12]

    def test_of_many_micro_batches_a_stage_keeps_what_is_under_way(self) -> None:
        found = simulate(equal_stages(3, 24))
        assert [use.peak_in_flight for use in found.stages] == [7, 11, 11]

    def test_fewer_activations_cost_little_as_long_as_the_pipeline_stays_full(self) -> None:
        free = equal_stages(3, 24)
        assert share(replace(free, activation_limits=(5, 4, 2))) > 0.92
        found = simulate(replace(free, activation_limits=(5, 4, 2)))
        assert [use.peak_in_flight for use in found.stages] == [5, 4, 2]
        assert share(replace(free, activation_limits=(1, 1, 1))) == pytest.approx(30 / 90, abs=0.1)


def test_the_timeline_is_kept_only_if_requested() -> None:
    scenario = equal_stages(2, 2, updates=1)
    assert simulate(scenario).timeline == ()
    timeline = simulate(scenario, record=True).timeline
    assert format_runs(span.run for span in timeline if span.stage == 1) == "0F 0B 1F 1B 0W 1W s0 e0"
    assert grid(timeline, 10) == (
        "Root  0F 1F .  0B 0B 1B 1B\n"  # a cell is ten ticks
        "Leaf  .  0F 0B 1F 1B 0W 1W"
    )


def _random_stages(drawn: random.Random) -> tuple[StageTimes, ...]:
    """Return a pipeline: batches of 10 ms to 10 s, stages that differ, links of any speed."""
    batch = 10 ** drawn.uniform(-2, 1)
    return tuple(
        StageTimes(
            compute=batch * drawn.uniform(0.3, 1),
            link=drawn.choice([0.0, batch * drawn.uniform(0, 0.5), 0.02]),
            units=drawn.randint(1, 10),
        )
        for _ in range(drawn.randint(1, 8))
    )


def _simulated_cycle(stages: tuple[StageTimes, ...], count: int, schedule: Schedule = "sync") -> float:
    each = [s.compute / count + OVERHEAD_SECONDS + UNIT_SECONDS * s.units for s in stages]
    busy = [s.link / count for s in stages[:-1]]
    scenario = Scenario(
        tuple(StageCost(third, third, 0.0, third) for third in (seconds / 3 for seconds in each)),
        tuple(LinkCost(b + LATENCY_SECONDS, b + LATENCY_SECONDS, b, b) for b in busy),
        window=count if schedule == "sync" else 2 * count,
        update_size=count,
        schedule=schedule,
    )
    return count / steady_rate(scenario)


def test_the_plan_predicts_the_time_of_a_batch() -> None:
    """The closed form, by which the plan chooses the number of micro-batches, against the simulator."""
    drawn = random.Random(5)
    errors: list[float] = []
    for _ in range(120):
        stages = _random_stages(drawn)
        errors += [
            cycle_seconds(stages, count) / _simulated_cycle(stages, count) - 1
            for count in (1, drawn.randint(2, 8 * len(stages)))
        ]
    assert max(map(abs, errors)) < 0.15
    assert sum(abs(error) > 0.1 for error in errors) <= 0.02 * len(errors)
    assert abs(sum(errors)) / len(errors) < 0.01


def test_the_plan_predicts_the_time_of_a_batch_with_a_delay() -> None:
    drawn = random.Random(5)
    errors: list[float] = []
    for _ in range(60):
        stages = _random_stages(drawn)
        errors += [
            delayed_seconds(stages, count) / _simulated_cycle(stages, count, "async") - 1
            for count in (1, drawn.randint(2, 8 * len(stages)))
        ]
    assert max(map(abs, errors)) < 0.15
    assert abs(sum(errors)) / len(errors) < 0.02


times = st.integers(0, 40)


@settings(max_examples=80, deadline=None)
@given(
    costs=st.lists(
        st.builds(StageCost, st.integers(1, 20), st.integers(1, 40), times, times),
        min_size=1,
        max_size=5,
    ),
    delays=st.lists(st.builds(LinkCost, times, times, times, times), min_size=4, max_size=4),
    window=st.integers(1, 9),
    update_size=st.integers(1, 6),
    schedule=st.sampled_from(["async", "sync"]),
    microbatches=st.integers(1, 40),
    clip=st.booleans(),
    limits=st.none() | st.lists(st.integers(1, 5), min_size=5, max_size=5),
)
def test_what_holds_for_any_pipeline(
    costs: list[StageCost],
    delays: list[LinkCost],
    window: int,
    update_size: int,
    schedule: Schedule,
    microbatches: int,
    clip: bool,
    limits: list[int] | None,
) -> None:
    held = tuple(limits[: len(costs)]) if limits else None
    links = tuple(delays[: len(costs) - 1])
    scenario = Scenario(tuple(costs), links, window, update_size, schedule, microbatches, clip, held)
    found = simulate(scenario, record=True)
    for position in range(len(costs)):
        _check_stage(found, scenario, position)


def _check_stage(found: Simulation, scenario: Scenario, position: int) -> None:
    cost, use = scenario.costs[position], found.stages[position]
    assert isinstance(cost, StageCost)
    count, updates = scenario.microbatches, math.ceil(scenario.microbatches / scenario.update_size)
    defers = position > 0 and cost.weights > 0
    spans = [span for span in found.timeline if span.stage == position]
    assert all(before.end <= after.start for before, after in pairwise(spans))
    numbers = {
        kind: sum(isinstance(span.run, kind) for span in spans)
        for kind in (RunForward, RunBackward, RunWeights, RunStep)
    }
    assert numbers == {
        RunForward: count,
        RunBackward: count,
        RunWeights: count if defers else 0,
        RunStep: updates,
    }
    busy = count * cost.microbatch + updates * cost.step
    assert use.utilisation == pytest.approx(busy / found.makespan)
    late = int(scenario.schedule == "async" and position < len(scenario.costs) - 1)
    assert use.max_staleness <= late
    assert use.peak_versions <= 1 + late
    assert use.peak_in_flight <= scenario.update_size * (1 + late)
    if scenario.activation_limits is not None:
        assert use.peak_in_flight <= scenario.activation_limits[position]


def test_actions_are_observed_after_what_they_depend_on() -> None:
    """A backward of a stage comes after those of later stages, and its update after its backwards."""
    seen: list[tuple[float, int, Action]] = []
    scenario = Scenario(
        (StageCost(1.0, 1.0, weights=1.0),) * 3,
        (LinkCost(0.5, 0.5),) * 2,
        window=4,
        update_size=4,
        schedule="sync",
        microbatches=8,
    )
    simulate(scenario, observe=lambda now, stage, action: seen.append((now, stage, action)))
    assert [now for now, _, _ in seen] == sorted(now for now, _, _ in seen)
    order = [(stage, action) for _, stage, action in seen]
    backwards = [
        [order.index(run) for run in order if run[0] == stage and isinstance(run[1], RunBackward)]
        for stage in range(3)
    ]
    assert all(earlier > later for earlier, later in zip(backwards[0], backwards[1], strict=True))
    assert all(earlier > later for earlier, later in zip(backwards[1], backwards[2], strict=True))
    steps = [place for place, (stage, action) in enumerate(order) if action == RunStep(1, 1)]
    assert len(steps) == 3
    assert max(backwards[2]) < min(steps) < max(steps)
