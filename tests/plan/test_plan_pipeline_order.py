"""The best order of machines: exact for short pipelines, close to it for long ones."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import chain, load_benchmark, machines, node, profiles, steady

from ravnest.plan.candidate_cuts import candidate_cuts
from ravnest.plan.cost import ModelCosts, NodeCapacity, capacities_of
from ravnest.plan.cuts import best_cuts
from ravnest.plan.pipeline_order import OrderSearch, PipelineOrder
from ravnest.plan.profile import ModelProfile

planning = load_benchmark()


def orders_of(
    costs: ModelCosts, pool: list[NodeCapacity], exact_length: int, cuts: int = 10_000
) -> OrderSearch:
    return OrderSearch(costs, pool, candidate_cuts(costs, cuts), exact_length)


def kinds_of(orders: OrderSearch, pool: list[NodeCapacity]) -> tuple[int, ...]:
    return tuple(orders.kinds.index(machine) for machine in pool)


def seconds_of(costs: ModelCosts, orders: OrderSearch, order: PipelineOrder) -> float:
    cuts = best_cuts(costs, [orders.kinds[kind] for kind in order.kinds])
    assert cuts is not None
    return cuts.seconds


@given(profiles(), st.lists(machines, min_size=1, max_size=4))
@steady
def test_the_order_is_the_best_of_all(profile: ModelProfile, pool: list[NodeCapacity]) -> None:
    costs = ModelCosts.of(profile, part=1.0 if profile.smallest_rows is None else 1 / 4)
    orders = orders_of(costs, pool, exact_length=4)
    found = orders.best(kinds_of(orders, pool))
    every = [cuts.seconds for order in permutations(pool) if (cuts := best_cuts(costs, order))]
    if not every:
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(min(every))
    assert seconds_of(costs, orders, found) == pytest.approx(min(every))
    assert sorted(found.kinds) == sorted(kinds_of(orders, pool))


def long_pipeline(count: int) -> tuple[ModelCosts, list[NodeCapacity]]:
    rng = planning.random.Random(count)
    costs = ModelCosts.of(planning.random_profile(rng, 150, tied=True), 4)
    return costs, list(capacities_of(planning.random_nodes(rng, count, costs.smallest_total, (0.3, 2))))


def test_longer_pipelines_come_close_to_the_best_order() -> None:
    costs, pool = long_pipeline(7)
    exact = orders_of(costs, pool, exact_length=7, cuts=60)
    best = exact.best(kinds_of(exact, pool))
    rough = orders_of(costs, pool, exact_length=3, cuts=60)
    kinds = kinds_of(rough, pool)
    heuristic, refined = rough.best(kinds), rough.refined(kinds)
    assert best is not None
    assert heuristic is not None
    assert refined is not None
    assert best.seconds <= refined.seconds <= heuristic.seconds
    assert best.seconds >= 0.9 * refined.seconds


@pytest.mark.parametrize("count", [12, 40])
def test_the_cuts_of_an_order_reach_its_time(count: int) -> None:
    costs, pool = long_pipeline(count)
    orders = orders_of(costs, pool, exact_length=3, cuts=60)
    found = orders.refined(kinds_of(orders, pool))
    assert found is not None
    assert sorted(found.kinds) == sorted(kinds_of(orders, pool))
    assert seconds_of(costs, orders, found) <= found.seconds * (1 + 1e-9)


def test_equal_machines_are_one_kind() -> None:
    pool = list(capacities_of([node(k) for k in range(4)]))
    orders = orders_of(ModelCosts.of(chain(6)), pool, exact_length=4)
    assert len(orders.kinds) == 1
    assert orders.best((0, 0, 0)) == PipelineOrder((0, 0, 0), pytest.approx(0.04))


def test_too_little_ram_is_found_without_a_search() -> None:
    pool = list(capacities_of([node(k, ram=0.1) for k in range(3)]))
    orders = orders_of(ModelCosts.of(chain(6, weight=10**9)), pool, exact_length=4)
    assert orders.best((0, 0, 0)) is None
    assert np.isfinite(orders.effort)
