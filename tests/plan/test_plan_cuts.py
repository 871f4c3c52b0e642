"""The cuts for a given order are optimal, and the greedy ones fit."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import chain, load_benchmark, machines, node, profiles, steady, unit

from ravnest.plan import cuts as cuts_module
from ravnest.plan.cost import ModelCosts, NodeCapacity, capacities_of
from ravnest.plan.cuts import best_cuts, greedy_cuts
from ravnest.plan.profile import ModelProfile

planning = load_benchmark()


def costs_of(profile: ModelProfile) -> ModelCosts:
    """Return costs with which stages recompute if their RAM is short."""
    return ModelCosts.of(profile, part=1.0 if profile.smallest_rows is None else 1 / 4)


def all_cuts(costs: ModelCosts, order: list[NodeCapacity]) -> list[tuple[float, tuple[int, ...]]]:
    """Return every cut that fits, with its time, by the definition."""
    found = []
    for inner in combinations(range(1, costs.units), len(order) - 1):
        bounds = (0, *inner, costs.units)
        stages = [(bounds[k], bounds[k + 1], machine) for k, machine in enumerate(order)]
        if all(
            costs.least_memory(start, stop, len(order) - k) <= machine.ram
            for k, (start, stop, machine) in enumerate(stages)
        ):
            times = [costs.stage_seconds(*s, len(order) - k) for k, s in enumerate(stages)]
            times += [costs.link_seconds(cut, *order[k : k + 2]) for k, cut in enumerate(inner)]
            found.append((max(times), bounds))
    return found


@given(profiles(max_units=8), st.lists(machines, min_size=1, max_size=5))
@steady
def test_the_cuts_are_optimal(profile: ModelProfile, order: list[NodeCapacity]) -> None:
    costs = costs_of(profile)
    expected = all_cuts(costs, order)
    found = best_cuts(costs, order)
    if not expected:
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(min(expected)[0])
    assert found.bounds in {bounds for _, bounds in expected}


@given(profiles(max_units=8), st.lists(machines, min_size=1, max_size=5))
@steady
def test_greedy_cuts_fit(profile: ModelProfile, order: list[NodeCapacity]) -> None:
    costs = costs_of(profile)
    found = greedy_cuts(costs, order)
    if found is not None:
        assert (found.seconds, found.bounds) in all_cuts(costs, order)


def test_small_grids_and_few_coarse_cuts_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = planning.random.Random(4)
    profile = planning.random_profile(rng, 120, tied=True)
    costs = ModelCosts.of(profile)
    order = capacities_of(planning.random_nodes(rng, 5, costs.smallest_total, (0.8, 2.0)))
    expected = best_cuts(costs, order)
    assert expected is not None
    monkeypatch.setattr(cuts_module, "GRID_CELLS", 50)
    monkeypatch.setattr(cuts_module, "COARSE_CUTS", 20)
    monkeypatch.setattr(cuts_module, "greedy_cuts", lambda *_: None)
    found = best_cuts(costs, order)
    assert found is not None
    assert found.seconds == expected.seconds


def test_unequal_nodes_get_unequal_shares() -> None:
    order = capacities_of([node(0, compute=30), node(1, compute=10)])
    found = best_cuts(ModelCosts.of(chain(8)), order)
    assert found is not None
    assert found.bounds == (0, 6, 8)


def test_ram_limits_a_stage() -> None:
    costs = ModelCosts.of(chain(8, weight=100_000_000))  # 4 bytes per byte in the Leaf, 6 in the Root
    found = best_cuts(costs, capacities_of([node(0, ram=1.3, compute=30), node(1, ram=8, compute=10)]))
    assert found is not None
    assert found.bounds == (0, 2, 8)


def test_a_slow_link_moves_the_cut_to_little_traffic() -> None:
    units = [unit(crossing=5_000_000) for _ in range(6)]
    units[0] = unit(crossing=100)
    profile = ModelProfile(tuple(units), (), 1, 0)
    found = best_cuts(
        ModelCosts.of(profile), capacities_of([node(0, bandwidth=1), node(1, bandwidth=1)])
    )
    assert found is not None
    assert found.bounds == (0, 1, 6)


def test_among_equal_cuts_the_balanced_one_is_taken() -> None:
    profile = chain(9, crossing=5_000_000)  # every link takes 40 s, every unit 0.02 s
    found = best_cuts(ModelCosts.of(profile), capacities_of([node(k, bandwidth=1) for k in range(3)]))
    assert found is not None
    assert found.bounds == (0, 3, 6, 9)
    order = capacities_of([node(0, bandwidth=1, compute=100), node(1, bandwidth=1, compute=50)])
    found = best_cuts(ModelCosts.of(profile), order)
    assert found is not None
    assert found.bounds == (0, 6, 9)


def test_more_machines_than_units() -> None:
    assert best_cuts(ModelCosts.of(chain(2)), capacities_of([node(k) for k in range(3)])) is None
