"""The search finds clusters close to the optimum, deterministically."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from plan_cases import chain, load_benchmark, node

from ravnest.plan import search
from ravnest.plan.cost import ModelCosts, capacities_of
from ravnest.plan.cuts import best_cuts
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.profile import ModelProfile, TensorProfile
from ravnest.plan.search import Pipeline, find_pipelines

planning = load_benchmark()


def pipelines(
    profile: ModelProfile, nodes: list[NodeConfig], clusters: int | None = None, **options: int
) -> tuple[Pipeline, ...]:
    found = find_pipelines(ModelCosts.of(profile, 4), capacities_of(nodes), clusters, seed=0, **options)
    assert found is not None
    assert sorted(n for pipeline in found for n in pipeline) == list(range(len(nodes)))
    return found


def sets(found: tuple[Pipeline, ...]) -> list[set[int]]:
    return [set(pipeline) for pipeline in found]


def rate(profile: ModelProfile, nodes: list[NodeConfig], found: tuple[Pipeline, ...]) -> float:
    costs, machines = ModelCosts.of(profile, 4), capacities_of(nodes)
    cuts = [best_cuts(costs, [machines[n] for n in pipeline]) for pipeline in found]
    assert None not in cuts
    return sum(1 / cut.seconds for cut in cuts if cut is not None)


def test_close_to_the_optimum_on_random_pools() -> None:
    found = planning.outcomes(seed=1, sizes=[2 + index % 4 for index in range(24)] + [6])
    assert statistics.mean(o.planned for o in found) >= 0.98
    assert min(o.planned for o in found) >= 0.95
    assert statistics.mean(o.genetic for o in found) >= 0.98
    assert min(o.genetic for o in found) >= 0.95
    assert any(o.tight for o in found)


def test_close_to_the_optimum_with_measured_links() -> None:
    """Brute force counts the measured rate of each pair, and no pair that cannot connect."""
    found = planning.outcomes(seed=3, sizes=[2 + index % 4 for index in range(24)], measured=True)
    assert statistics.mean(o.planned for o in found) >= 0.98
    assert min(o.planned for o in found) >= 0.95
    assert statistics.mean(o.genetic for o in found) >= 0.95


def test_the_genetic_search_comes_close_to_the_exact_one() -> None:
    rng = planning.random.Random(2)
    for ram in ((0.3, 1.6), (1.5, 6.0), (0.3, 1.6)):
        profile = planning.random_profile(rng, 30, tied=True)
        need = ModelCosts.of(profile, 4).smallest_total
        nodes = list(planning.random_nodes(rng, 9, need, ram))
        best = rate(profile, nodes, pipelines(profile, nodes))
        assert rate(profile, nodes, pipelines(profile, nodes, exact_nodes=0)) >= 0.95 * best


def test_nodes_with_fast_links_are_grouped_together() -> None:
    nodes = [node(k, bandwidth=1000 if k % 2 else 10) for k in range(4)]
    assert sets(pipelines(chain(8, crossing=10**6), nodes)) == [{0, 2}, {1, 3}]


@pytest.mark.parametrize("field", ["ram", "compute"])
def test_among_equal_groupings_similar_nodes_are_together(field: str) -> None:
    nodes = [node(k, **{field: 64 if k % 2 else 16}) for k in range(4)]
    assert sets(pipelines(chain(10), nodes)) == [{0, 2}, {1, 3}]


def test_equal_nodes_are_in_ascending_order() -> None:
    assert pipelines(chain(6), [node(k) for k in range(6)]) == ((0, 1), (2, 3), (4, 5))


def test_a_cluster_has_a_root_and_a_leaf() -> None:
    """Single-node clusters would be as fast and need no link."""
    found = pipelines(chain(6, crossing=10**6), [node(k) for k in range(5)])
    assert sorted(map(len, found)) == [2, 3]


def test_a_single_node_is_a_cluster() -> None:
    assert pipelines(chain(3), [node(0)]) == ((0,),)


def test_every_node_gets_a_model_that_cannot_be_cut() -> None:
    assert pipelines(chain(1), [node(k) for k in range(3)]) == ((0,), (1,), (2,))
    assert len(pipelines(chain(1), [node(k) for k in range(13)])) == 13


@pytest.mark.parametrize("count", [3, 13])
def test_a_node_is_alone_only_if_necessary(count: int) -> None:
    found = pipelines(chain(2), [node(k, bandwidth=5 + k) for k in range(count)])
    assert sorted(map(len, found)) == [1] + [2] * (count // 2)


def test_a_node_is_alone_if_nothing_else_fits_the_ram() -> None:
    """Every stage has the shared tensor and what crosses its cuts; alone a node needs 5 GB."""
    shared = TensorProfile("shared", 10**9, trainable=True, averaged=True, units=(0, 1, 2, 3))
    profile = replace(chain(4, crossing=300_000_000), state=(shared,))
    nodes = [node(0, ram=5.5), node(1, ram=9), node(2, ram=5.5)]
    assert sorted(pipelines(profile, nodes)) == [(1, 0), (2,)]


@pytest.mark.parametrize("clusters", [1, 2, 3, 4])
@pytest.mark.parametrize("exact_nodes", [10, 0])
def test_the_number_of_clusters_can_be_set(clusters: int, exact_nodes: int) -> None:
    nodes = [node(k, bandwidth=10 + k) for k in range(4)]
    found = pipelines(chain(6), nodes, clusters, exact_nodes=exact_nodes)
    assert len(found) == clusters


@pytest.mark.parametrize("clusters", [1, 4, 11, 15, 20])
def test_the_number_of_clusters_can_be_set_for_many_nodes(clusters: int) -> None:
    rng = planning.random.Random(5)
    nodes = list(planning.random_nodes(rng, 20, 1e9, (4, 8)))
    assert len(pipelines(chain(60), nodes, clusters)) == clusters


@pytest.mark.parametrize("ram", [(1.5, 6.0), (0.1, 0.8)])
def test_the_plan_of_a_large_pool_is_deterministic(
    ram: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "LARGE_EFFORT", 40_000_000)
    rng = planning.random.Random(6)
    profile = planning.random_profile(rng, 150, tied=True)
    need = ModelCosts.of(profile, 4).smallest_total
    nodes = list(planning.random_nodes(rng, 40, need, ram))
    first = pipelines(profile, nodes)
    assert first == pipelines(profile, nodes)
    assert all(len(pipeline) >= 2 for pipeline in first)
    assert [min(pipeline) for pipeline in first] == sorted(min(pipeline) for pipeline in first)


def test_very_long_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "LARGE_EFFORT", 10_000_000)
    rng = planning.random.Random(8)
    nodes = list(planning.random_nodes(rng, 80, 1e9, (4, 8)))
    assert sorted(map(len, pipelines(chain(200), nodes, 2))) == [40, 40]


def test_finer_cuts_find_the_only_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one cut fits, and it is not among the first candidates."""
    monkeypatch.setattr(search, "EXACT_EFFORT", 0)
    profile = chain(200, weight=10**8)
    assert 89 not in search.candidate_cuts(ModelCosts.of(profile), 64)
    assert pipelines(profile, [node(0, ram=44.6), node(1, ram=44.6)]) == ((0, 1),)
