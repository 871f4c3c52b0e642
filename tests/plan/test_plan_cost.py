"""Times and bytes of stages and cuts."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import chain, node, profiles, steady

from ravnest.plan.candidate_cuts import candidate_cuts
from ravnest.plan.cost import NOMINAL_COMPUTE, ModelCosts, assumed_compute, capacities_of
from ravnest.plan.profile import ModelProfile, TensorProfile, UnitCost
from ravnest.plan.ranges import DistinctBytes, RangeMax


@given(profiles(max_units=9), st.data())
@steady
def test_a_tensor_is_counted_once_in_any_run(profile: ModelProfile, data: st.DataObject) -> None:
    count = len(profile.units)
    distinct = DistinctBytes.of(profile.state, count)
    some = st.lists(st.integers(0, count), min_size=1, unique=True).map(sorted)
    starts, stops = data.draw(some), data.draw(some)
    grid = distinct.grid(np.array(starts), np.array(stops))
    for row, start in enumerate(starts):
        for column, stop in enumerate(stops):
            if start < stop:
                held = [t.bytes for t in profile.state if any(start <= u < stop for u in t.units)]
                assert grid[row, column] == sum(held)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=20))
@steady
def test_the_largest_value_of_any_run(values: list[int]) -> None:
    every = np.arange(len(values) + 1)
    grid = RangeMax.of(values).grid(every, every)
    for start, stop in combinations(every.tolist(), 2):
        assert grid[start, stop] == max(values[start:stop])


def test_missing_compute_is_the_median_of_the_others() -> None:
    nodes = [node(0, compute=10), node(1, compute=None), node(2, compute=30), node(3, compute=90)]
    assert [machine.flops for machine in capacities_of(nodes)] == [10e9, 30e9, 30e9, 90e9]


def test_without_any_compute_all_nodes_are_equal() -> None:
    nodes = [node(0, compute=None), node(1, compute=None)]
    assert assumed_compute(nodes) == NOMINAL_COMPUTE
    assert {machine.flops for machine in capacities_of(nodes)} == {NOMINAL_COMPUTE * 1e9}


def test_capacities_are_in_bytes_bits_and_operations() -> None:
    (machine,) = capacities_of([node(0, ram=2, bandwidth=20, compute=5)])
    assert (machine.ram, machine.bandwidth, machine.flops) == (2e9, 20e6, 5e9)


def test_time_of_a_stage_and_of_a_link() -> None:
    profile = ModelProfile(
        units=(UnitCost(4e9, 0, 0, 1_000_000, 3_000_000), UnitCost(6e9, 0, 0, 0, 0)),
        state=(),
        batch_size=1,
        input_bytes=0,
    )
    costs = ModelCosts.of(profile)
    fast, slow = capacities_of([node(0, compute=2, bandwidth=100), node(1, compute=1, bandwidth=12)])
    assert costs.compute_seconds(0, 1, fast) == 2.0
    assert costs.compute_seconds(0, 2, slow) == 10.0
    assert costs.link_seconds(1, fast, slow) == costs.link_seconds(1, slow, fast) == 2.0


def test_only_the_owner_of_a_tied_tensor_keeps_its_optimizer_state() -> None:
    tied = TensorProfile("tied", 400, trainable=True, averaged=True, units=(0, 3))
    profile = ModelProfile(chain(4).units, (tied,), 1, 0, optimizer_bytes_per_parameter_byte=2.0)
    costs = ModelCosts.of(profile, averaging=2.0)
    owner, replica = costs.memory(0, 2, 2), costs.memory(2, 4, 1)
    assert (owner.weights, owner.optimizer, owner.averaging) == (400, 800, 800)
    assert (replica.weights, replica.optimizer, replica.averaging) == (400, 0, 0)
    assert costs.memory(0, 4, 1).optimizer == 800


def test_a_tied_tensor_crosses_a_cut_once_per_update() -> None:
    tied = TensorProfile("tied", 400, trainable=True, averaged=True, units=(0, 2))
    frozen = TensorProfile("frozen", 9999, trainable=False, averaged=True, units=(0, 3))
    profile = ModelProfile(chain(4, crossing=10).units, (tied, frozen), 1, 0)
    assert ModelCosts.of(profile).link_bytes.tolist() == [0, 410, 410, 10, 0]
    assert ModelCosts.of(profile, 4).link_bytes.tolist() == [0, 110, 110, 10, 0]


def test_tied_tensors_pass_through_a_stage_one_by_one() -> None:
    tied = tuple(
        TensorProfile(f"block {size}", size, trainable=True, averaged=True, units=units)
        for size, units in ((400, (0, 4)), (300, (0, 4)), (200, (0, 4)), (100, (1, 4)))
    )
    costs = ModelCosts.of(ModelProfile(chain(5).units, tied, 1, 0))
    assert costs.load(0, 1).shared == 900, "gradients of its own weights"
    assert costs.load(1, 2).shared == 800, "those of its own weight, and two that pass"
    assert costs.load(2, 4).shared == 700, "one arrives, another one leaves"
    assert costs.load(2, 5).shared == 0


def test_temporaries_that_do_not_depend_on_the_batch_count_once() -> None:
    plain = chain(2, weight=100)
    units = (replace(plain.units[0], fixed_bytes=900), plain.units[1])
    small, large = (
        ModelCosts.of(replace(plain, units=each, smallest_rows=1), part=0.5)
        for each in (plain.units, units)
    )
    assert large.memory(0, 1, 2).total - small.memory(0, 1, 2).total == 800
    assert large.memory(1, 2, 1).total == small.memory(1, 2, 1).total


def test_the_ends_of_the_model_have_no_traffic() -> None:
    costs = ModelCosts.of(chain(3, crossing=10))
    assert costs.link_bytes.tolist() == [0, 10, 10, 0]


@pytest.mark.parametrize("count", [5, 16, 40])
def test_candidate_cuts_include_the_ends_and_the_least_traffic(count: int) -> None:
    crossings = [100] * 199
    crossings[76] = 1
    profile = ModelProfile(
        tuple(UnitCost(1e9, 10, 0, crossing, crossing) for crossing in [*crossings, 0]), (), 1, 0
    )
    cuts = candidate_cuts(ModelCosts.of(profile), count)
    assert 3 <= len(cuts) <= count
    assert (cuts[0], cuts[-1]) == (0, 200)
    assert 77 in cuts
    assert (np.diff(cuts) > 0).all()


def test_few_cuts_are_all_candidates() -> None:
    assert candidate_cuts(ModelCosts.of(chain(4)), 5).tolist() == [0, 1, 2, 3, 4]
