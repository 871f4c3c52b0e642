"""Measured links replace what nodes state; relayed ones share their relay; failing ones are avoided."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from plan_cases import chain, node, planned

from ravnest.plan.cost import ModelCosts, capacities_of
from ravnest.plan.explain import explain
from ravnest.plan.infeasible import Infeasible
from ravnest.plan.links import LinkFigures, MeasuredLink, measured_bandwidth, pair_of
from ravnest.plan.plan import Plan
from ravnest.plan.planner import make_plan

NEAR = MeasuredLink(100, 0.001)
MODEL = chain(8, crossing=10**6, rows=1)


def relayed(rate: float) -> MeasuredLink:
    return MeasuredLink(rate, 0.02, relayed=True)


def figures(pairs: dict[tuple[int, int], MeasuredLink], **fields: object) -> LinkFigures:
    return replace(LinkFigures(pairs), **fields)


@pytest.mark.parametrize(
    ("stated", "rate", "found"),
    [
        ((100, 100), 20, (20, 20)),  # neither reaches what it states
        ((100, 100), 400, (400, 400)),
        ((100, 20), 20, (100, 20)),  # the slower end explains the rate
        ((100, 20), 10, (10, 10)),
        ((10, 20), 50, (50, 50)),
    ],
)
def test_bandwidth_of_measured_nodes(
    stated: tuple[float, float], rate: float, found: tuple[float, float]
) -> None:
    known = figures({(0, 1): MeasuredLink(rate, 0.01)})
    result = measured_bandwidth({0: stated[0], 1: stated[1], 2: 7}, known)
    assert result == {0: found[0], 1: found[1], 2: 7}


def test_the_best_measured_link_is_the_bandwidth_of_a_node() -> None:
    known = figures({(0, 1): MeasuredLink(5, 0.1), (0, 2): MeasuredLink(50, 0.01)})
    assert measured_bandwidth({0: 100, 1: 100, 2: 100}, known) == {0: 50, 1: 5, 2: 50}


def test_a_measured_pair_counts_with_its_own_rate() -> None:
    known = figures({(0, 1): MeasuredLink(8, 0.01), (0, 2): MeasuredLink(80, 0.01)})
    costs = replace(ModelCosts.of(MODEL), links=known)
    zero, one, two = capacities_of([node(k) for k in range(3)], known)
    assert costs.link_seconds(1, zero, one) == pytest.approx(1.0)
    assert costs.link_seconds(1, two, zero) == pytest.approx(0.1)
    assert costs.link_seconds(1, one, two) == pytest.approx(1.0)  # not measured: its slower end
    assert costs.link_delay(zero, two) == 0.01


def test_nodes_without_measured_links_stay_interchangeable() -> None:
    known = figures({(0, 1): NEAR})
    assert [m.node for m in capacities_of([node(k) for k in range(4)], known)] == [0, 1, None, None]


def test_pairs_with_fast_links_become_neighbours() -> None:
    pairs = {(0, 1): MeasuredLink(5, 0.01), (2, 3): MeasuredLink(5, 0.01)}
    pairs |= {(0, 3): MeasuredLink(500, 0.01), (1, 2): MeasuredLink(500, 0.01)}
    plan = planned(MODEL, [node(k) for k in range(4)], links=figures(pairs))
    assert [set(each) for each in plan.pipelines] == [{0, 3}, {1, 2}]


def test_pairs_that_cannot_connect_are_not_neighbours() -> None:
    known = figures({}, failing={(0, 1): "a and b cannot reach each other"})
    plan = planned(MODEL, [node(k) for k in range(3)], links=known)
    assert plan.pipelines[0][1] == 2


def test_no_plan_if_the_only_pair_cannot_connect() -> None:
    known = figures({}, failing={(0, 1): "a and b cannot reach each other: refused, no relay"})
    found = make_plan(MODEL, [node(0), node(1)], clusters=1, links=known)
    assert found == Infeasible("a and b cannot reach each other: refused, no relay", cut_off=True)


def test_too_little_ram_is_the_reason_even_if_a_pair_cannot_connect() -> None:
    known = figures({}, failing={(0, 1): "a and b cannot reach each other"})
    heavy = chain(8, weight=10**9)
    found = make_plan(heavy, [node(0, ram=1), node(1, ram=1)], links=known)
    assert isinstance(found, Infeasible)
    assert not found.cut_off
    assert "needs" in found.reason


def test_a_failing_pair_of_a_far_cut_without_traffic_is_not_used() -> None:
    """A cut that nothing crosses would take no time, even on a link that does not exist."""
    known = figures({}, failing={(0, 1): "a and b cannot reach each other"})
    found = make_plan(chain(8), [node(0), node(1)], clusters=1, links=known)
    assert isinstance(found, Infeasible)


def test_relayed_links_share_the_relay() -> None:
    pairs = {(0, 1): relayed(80), (2, 3): relayed(80), (0, 2): relayed(80), (1, 3): relayed(80)}
    known = figures(pairs, relay_rate=40)
    plan = planned(MODEL, [node(k) for k in range(4)], links=known)
    links = [cluster.stages[0].link for cluster in plan.clusters]
    assert [link and link.rate for link in links] == [20, 20]
    assert plan.clusters[0].stages[0].link_seconds == pytest.approx(8e6 / 20e6)


def test_a_relay_with_room_does_not_slow_links_down() -> None:
    known = figures({(0, 1): relayed(8)}, relay_rate=1000)
    stage = planned(MODEL, [node(0), node(1)], links=known).stages[0]
    assert stage.link == relayed(8)


def test_fewer_relayed_links_if_the_relay_is_the_bottleneck() -> None:
    """Direct links that are slower than a relayed one alone are faster than two that share."""
    pairs = {(0, 1): relayed(80), (2, 3): relayed(80)}
    pairs |= {(0, 2): MeasuredLink(60, 0.01), (1, 3): MeasuredLink(60, 0.01)}
    pairs |= {(0, 3): MeasuredLink(9, 0.01), (1, 2): MeasuredLink(9, 0.01)}
    nodes = [node(k) for k in range(4)]
    alone = planned(MODEL, nodes, clusters=2, links=figures(pairs))
    shared = planned(MODEL, nodes, clusters=2, links=figures(pairs, relay_rate=80))
    assert [set(each) for each in alone.pipelines] == [{0, 1}, {2, 3}]
    assert [set(each) for each in shared.pipelines] == [{0, 2}, {1, 3}]


def test_a_long_delay_gives_fewer_samples_and_other_micro_batches() -> None:
    nodes = [node(0), node(1)]
    near = planned(MODEL, nodes, links=figures({(0, 1): replace(NEAR, rate=10_000)}))
    far = planned(MODEL, nodes, links=figures({(0, 1): MeasuredLink(10_000, 0.3)}))
    assert far.samples_per_second < near.samples_per_second
    assert far.clusters[0].seconds > 0.3, "two batches share a round trip of 0.6 s"
    assert (near.schedule, far.schedule) == ("sync", "async")


def test_near_nodes_become_neighbours() -> None:
    pairs = {(0, 1): MeasuredLink(100, 0.2), (0, 2): NEAR, (1, 2): NEAR}
    nodes = [node(k) for k in range(3)]
    plan = planned(MODEL, nodes, clusters=1, links=figures(pairs))
    assert plan.pipelines[0][1] == 2
    assert planned(MODEL, nodes, clusters=1).pipelines == ((0, 1, 2),)


def test_the_delay_of_an_unmeasured_pair_is_that_of_the_farther_node() -> None:
    known = figures({(0, 1): MeasuredLink(100, 0.1), (1, 2): MeasuredLink(100, 0.001)})
    assert known.delay(0, 2) == 0.1
    assert known.delay(0, 3) is None
    assert known.other_orders((0, 1, 2)) == []


def test_the_explanation_says_what_was_measured() -> None:
    known = figures({(0, 1): MeasuredLink(93, 0.0213, relayed=True), (1, 2): NEAR})
    model = chain(8, crossing=10**8, rows=1)
    plan = planned(model, [node(k) for k in range(3)], clusters=1, links=known)
    assert plan.pipelines == ((0, 1, 2),)
    text = explain(plan, model, [f"layer{k}" for k in range(8)])
    assert "on the link to Node(1): 93 Mbit/s, 21.3 ms, relayed (measured)." in text
    assert "on the link to Node(2): 100 Mbit/s, 1 ms (measured)." in text
    assert "the bottleneck is the link from Node(0) to Node(1) at its measured 93 Mbps" in text
    plain = planned(model, [node(k) for k in range(3)], clusters=1)
    assert "measured" not in explain(plain, model, [f"layer{k}" for k in range(8)])


def test_noise_is_no_reason_to_measure_other_pairs() -> None:
    """Equal nodes whose figures differ a little keep their neighbours."""
    model = chain(8, crossing=10**5, rows=1)
    for count in (3, 4, 5):
        nodes = [node(k) for k in range(count)]
        first = planned(model, nodes)
        pairs = [pair_of(*pair) for each in first.pipelines for pair in itertools.pairwise(each)]
        known = {pair: MeasuredLink(95 - 3 * k, 0.01 + k / 1e3) for k, pair in enumerate(pairs)}
        again = planned(model, nodes, links=figures(known))
        assert sum(map(figures(known).count_unmeasured, again.pipelines)) == 0


def test_a_plan_without_links_is_as_before() -> None:
    nodes = [node(k, bandwidth=10 + k) for k in range(4)]
    plan = planned(MODEL, nodes)
    assert isinstance(plan, Plan)
    assert plan == planned(MODEL, nodes, links=LinkFigures(relay_rate=5))
