"""Plans are complete, fit the RAM and are deterministic; infeasible ones say why."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from plan_cases import chain, load_benchmark, node, planned, unit

from ravnest.errors import PlanError
from ravnest.plan.cluster_cost import COST_EXPONENT
from ravnest.plan.cost import ModelCosts
from ravnest.plan.explain import explain
from ravnest.plan.infeasible import Infeasible
from ravnest.plan.memory import averaging_copies
from ravnest.plan.plan import Plan
from ravnest.plan.planner import make_plan
from ravnest.plan.profile import ModelProfile, TensorProfile, UnitCost
from ravnest.types import Role

planning = load_benchmark()


def random_plan(seed: int, nodes: int) -> tuple[ModelProfile, Plan]:
    rng = planning.random.Random(seed)
    while True:
        case = planning.random_case(rng, nodes)
        plan = make_plan(case.profile, case.nodes)
        if isinstance(plan, Plan):
            return case.profile, plan


@pytest.mark.parametrize("seed", range(8))
def test_every_plan_is_complete_and_fits(seed: int) -> None:
    profile, plan = random_plan(seed, 2 + seed % 4)
    assert [stage.node.id for stage in plan.stages] == list(range(2 + seed % 4))
    costs = ModelCosts.of(profile, averaging=averaging_copies() if len(plan.clusters) > 1 else 0)
    for cluster in plan.clusters:
        stages = cluster.stages
        assert (stages[0].start, stages[-1].stop) == (0, len(profile.units))
        assert all(one.stop == other.start for one, other in pairwise(stages))
        assert all(stage.start < stage.stop for stage in stages)
        assert [stage.index for stage in stages] == list(range(len(stages)))
        assert [stage.role for stage in stages] == [Role.at(k, len(stages)) for k in range(len(stages))]
        for stage in stages:
            assert stage.cluster == cluster.id
            behind = len(stages) - stage.index
            assert stage.memory == costs.memory(stage.start, stage.stop, behind, stage.kept)
            assert stage.memory.total <= stage.node.ram * 1e9
        assert stages[-1].link_seconds == 0
        slowest = max(max(stage.compute_seconds, stage.link_seconds) for stage in stages)
        assert cluster.seconds >= slowest
        assert cluster.samples_per_second == pytest.approx(profile.batch_size / cluster.seconds)
        assert (cluster.microbatches, cluster.microbatch_rows, cluster.in_flight) == (1, None, 2)
    assert plan.samples_per_second == sum(c.samples_per_second for c in plan.clusters)


@pytest.mark.parametrize("seed", range(8))
def test_every_ring_has_one_owner_in_each_cluster(seed: int) -> None:
    profile, plan = random_plan(seed, 3 + seed % 3)
    first_unit = {tensor.name: tensor.units[0] for tensor in profile.state if tensor.averaged}
    assert sorted(name for ring in plan.rings for name in ring.names) == sorted(first_unit)
    for ring in plan.rings:
        assert [member.cluster for member in ring.members] == [c.id for c in plan.clusters]
        for member in ring.members:
            stage = plan.stage_of(member.node_id)
            assert (stage.cluster, stage.node.address) == (member.cluster, member.address)
            assert all(stage.start <= first_unit[name] < stage.stop for name in ring.names)


def test_neighbours_and_lookup() -> None:
    plan = planned(chain(9), [node(k) for k in range(3)], clusters=1)
    assert [stage.node.id for stage in plan.clusters[0].stages] == [0, 1, 2]
    assert plan.previous(0) is None
    assert plan.next(0) == plan.previous(2) == plan.stage_of(1)
    assert plan.next(2) is None
    assert [ring.id for ring in plan.rings_of(1)] == [1]
    with pytest.raises(KeyError, match="the plan has no node 7"):
        plan.stage_of(7)


def test_clusters_are_numbered_by_their_lowest_node() -> None:
    nodes = [node(k, bandwidth=10 if k in (0, 3) else 1000) for k in range(4)]
    plan = planned(chain(8, crossing=10**6), nodes)
    assert [sorted(s.node.id for s in c.stages) for c in plan.clusters] == [[0, 3], [1, 2]]


def test_the_order_in_which_nodes_are_given_does_not_matter() -> None:
    nodes = [node(k, bandwidth=20 + 7 * k, ram=4 + k) for k in range(5)]
    assert planned(chain(8, crossing=10**5), nodes) == planned(chain(8, crossing=10**5), nodes[::-1])


def test_the_description_of_the_bottleneck() -> None:
    slow_node = [node(0, compute=100), node(1, compute=1)]
    plan = planned(chain(2), slow_node)
    assert plan.clusters[0].bottleneck == "the compute of Node(1), its Leaf"
    slow_link = [node(0, bandwidth=5), node(1, bandwidth=2.5)]
    plan = planned(chain(2, crossing=10**6), slow_link)
    assert plan.clusters[0].bottleneck == "the link from Node(0) to Node(1) at the 2.5 Mbps of Node(1)"


def test_a_single_node_is_a_root_that_keeps_no_older_version() -> None:
    plan = planned(chain(3), [node(0)])
    (stage,) = plan.clusters[0].stages
    assert (stage.role, stage.memory.versions) == (Role.ROOT, 0)


def test_batches_that_cannot_be_split_keep_one_older_version() -> None:
    nodes = [node(k) for k in range(4)]
    plan = planned(chain(8), nodes, clusters=1)
    assert plan.schedule == "async"
    assert [s.memory.versions / s.memory.weights for s in plan.stages] == [1, 1, 1, 0]
    assert plan.clusters[0].split_reason.startswith("batches are not split into micro-batches: it is")
    plan = planned(chain(8, rows=1), nodes, clusters=1)
    assert plan.schedule == "sync"
    assert not any(s.memory.versions for s in plan.stages)


def test_gradients_that_must_not_be_late_lead_to_sync() -> None:
    """Although batches cannot be split, for which gradients are late otherwise."""
    profile = replace(chain(8), late_reason="forward writes to the weight w")
    plan = planned(profile, [node(k) for k in range(4)], clusters=1)
    assert plan.schedule == "sync"
    assert not any(stage.memory.versions for stage in plan.stages)
    assert plan.clusters[0].split_reason.endswith("because forward writes to the weight w")


def test_a_model_without_work_still_has_a_plan() -> None:
    plan = planned(chain(3, work=0.0), [node(0), node(1)])
    assert plan.clusters[0].seconds < 0.1
    assert plan.samples_per_second > 0


def test_micro_batches_are_chosen_by_time() -> None:
    (cluster,) = planned(chain(8, rows=1), [node(0), node(1)]).clusters
    assert cluster.microbatch_rows is not None
    assert 3 <= cluster.microbatches <= 16
    assert cluster.in_flight == cluster.microbatches == -(-32 // cluster.microbatch_rows)
    assert cluster.split_reason == (
        f"each batch of 32 is split into {cluster.microbatches} micro-batches of"
        f" {cluster.microbatch_rows}"
    )
    (limited,) = planned(chain(8, rows=16), [node(0), node(1)]).clusters
    assert (limited.microbatches, limited.microbatch_rows) == (2, 16)
    (short,) = planned(chain(8, rows=1, work=1.0), [node(0), node(1)]).clusters
    assert (short.microbatches, short.microbatch_rows) == (1, 32)
    assert short.split_reason == "batches are not split into micro-batches: that would not be faster"


def heavy(rows: int) -> ModelProfile:
    """Return four units, each with 1 GB of activations and 1 GB of workspace for a whole batch."""
    return replace(
        chain(4, rows=rows, weight=10**6),
        units=(UnitCost(1e9, 10**9, 10**9, 10**6, 10**6, passing_bytes=10**9),) * 4,
    )


@pytest.mark.parametrize(
    ("ram", "rows"), [(4.1, 1), (3.0, 1), (1.3, 1), (0.7, 1), (0.4, 1), (2.0, 4), (0.7, 4), (2.0, 8)]
)
def test_the_plan_with_short_memory_is_the_fastest_that_fits(ram: float, rows: int) -> None:
    nodes = [node(0, ram=ram), node(1, ram=ram)]
    plan = planned(heavy(rows), nodes)
    (cluster,) = plan.clusters
    assert all(stage.memory.total <= ram * 1e9 for stage in plan.stages)
    limited = f"of which at most {cluster.in_flight} are in flight, because RAM is short"
    assert (limited in cluster.split_reason) == (cluster.in_flight < cluster.microbatches)
    roomy = planned(heavy(rows), [node(0, ram=9), node(1, ram=9)])
    assert plan.samples_per_second <= 1.05 * roomy.samples_per_second
    keeping = make_plan(heavy(rows), nodes, recompute=False)
    if isinstance(keeping, Plan):
        assert all(stage.kept is None for stage in keeping.stages)
        assert keeping.samples_per_second <= 1.001 * plan.samples_per_second


def test_recomputation_is_chosen_where_fewer_in_flight_are_slower() -> None:
    """Micro-batches have at least 8 of 32 samples: with two in flight, four stages would wait."""
    nodes = [node(0, ram=0.9), *(node(k, ram=9) for k in (1, 2, 3))]
    profile = replace(heavy(8), state=(*heavy(8).state, _large_head()))
    keeping = planned(profile, nodes, clusters=1, recompute=False)
    assert keeping.clusters[0].in_flight == 2
    plan = planned(profile, nodes, clusters=1)
    assert plan.samples_per_second > 1.1 * keeping.samples_per_second
    small = plan.stage_of(0)
    assert small.role is not Role.LEAF
    assert {stage.node.id: stage.kept for stage in plan.stages} == {0: 2, 1: None, 2: None, 3: None}
    assert plan.clusters[0].in_flight == 4
    assert small.compute_seconds == pytest.approx(1e9 / 50e9 * (1 + 2 / 4 / 3))


def _large_head() -> TensorProfile:
    return TensorProfile("head", 5 * 10**8, trainable=True, averaged=True, units=(3,))


def test_the_number_kept_is_the_largest_that_fits() -> None:
    for ram in (0.6, 0.9, 1.3, 1.7):
        plan = planned(heavy(1), [node(0, ram=ram), node(1, ram=9)], clusters=1)
        (cluster,) = plan.clusters
        for stage in cluster.stages:
            if stage.kept is not None:
                assert 1 <= stage.kept < cluster.in_flight
                assert stage.memory.total <= ram * 1e9


def test_a_batch_that_cannot_be_split_is_trained_alone_if_two_do_not_fit() -> None:
    profile = chain(
        2, weight=10**8, activation=10**6
    )  # 4 bytes per byte of weights, or 5 with two versions
    roomy = planned(profile, [node(0, ram=0.6), node(1, ram=0.6)])
    assert (roomy.schedule, roomy.clusters[0].in_flight) == ("async", 2)
    tight = planned(profile, [node(0, ram=0.45), node(1, ram=0.45)])
    assert (tight.schedule, tight.clusters[0].in_flight, tight.splittable) == ("sync", 1, False)
    assert not any(stage.memory.versions for stage in tight.stages)
    assert tight.clusters[0].split_reason.endswith(
        "; one batch at a time is in the pipeline, because RAM is short"
    )
    assert tight.samples_per_second < roomy.samples_per_second


def test_weight_gradients_of_a_single_batch_are_not_deferred_if_ram_is_short() -> None:
    one = UnitCost(1e9, 10**8, 10**7, 10**6, 10**6, deferred_bytes=15 * 10**7)
    profile = replace(chain(4, weight=10**6), units=(one,) * 4)
    enough = ModelCosts.of(profile, max_delay=0)
    ram = 1.01 * enough.memory(1, 2, 3, defers=False).total
    assert enough.memory(1, 2, 3).total > ram
    plan = planned(profile, [node(k, ram=ram / 1e9) for k in range(4)], clusters=1)
    (cluster,) = plan.clusters
    assert (plan.schedule, cluster.in_flight) == ("sync", 1)
    assert [stage.defers for stage in cluster.stages] == [True, False, False, False]
    assert all(stage.kept is None and stage.memory.total <= ram for stage in cluster.stages)
    assert all(stage.compute_seconds == pytest.approx(0.02) for stage in cluster.stages)
    assert cluster.seconds >= 4 * 0.02, "a stage sends nothing before its weight gradients"
    words = explain(plan, profile, ["layer"] * 4).splitlines()
    told = "RAM is short: weight gradients are computed with those of the inputs, not after them."
    assert [line.strip() for line in words].count(told) == 3


def test_two_batches_that_cannot_be_split_are_recomputed_if_only_one_can_be_kept() -> None:
    profile = chain(2, weight=10**6, activation=10**9)
    plan = planned(profile, [node(0, ram=1.5), node(1, ram=1.5)])
    root, leaf = plan.clusters[0].stages
    assert (plan.schedule, root.kept, leaf.kept) == ("async", 1, None)
    assert root.compute_seconds == pytest.approx(4 / 3 * leaf.compute_seconds)


def test_one_node_splits_batches_if_its_memory_is_short() -> None:
    profile = chain(4, rows=1, weight=10**6, activation=10**9)
    assert planned(profile, [node(0, ram=5)]).clusters[0].microbatch_rows is None
    (cluster,) = planned(profile, [node(0, ram=1.5)]).clusters
    assert cluster.microbatch_rows == 8
    (stage,) = cluster.stages
    assert stage.kept == 1
    assert stage.memory.total <= 1.5e9


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"clusters": 0}, "clusters=0 is not possible with 3 nodes: choose 1 to 3"),
        ({"clusters": 4}, "clusters=4 is not possible with 3 nodes: choose 1 to 3"),
        (
            {"clusters": 1},
            "clusters=1 is not possible: the model can be cut into at most 2 stages, so 3 nodes need"
            " at least 2 clusters",
        ),
    ],
)
def test_impossible_numbers_of_clusters(options: dict[str, int], expected: str) -> None:
    assert make_plan(chain(2), [node(k) for k in range(3)], **options) == Infeasible(expected)


def test_invalid_arguments() -> None:
    with pytest.raises(PlanError, match="update_frequency must be at least 1, is 0"):
        make_plan(chain(2), [node(0)], update_frequency=0)
    with pytest.raises(PlanError, match="there are no nodes"):
        make_plan(chain(2), [])
    with pytest.raises(PlanError, match="two nodes have the same id"):
        make_plan(chain(2), [node(0), node(0)])
    with pytest.raises(PlanError, match="the model has no operation to train"):
        make_plan(ModelProfile((), (), 1, 0), [node(0)])


def infeasible(profile: ModelProfile, *rams: float, clusters: int | None = None) -> Infeasible:
    found = make_plan(profile, [node(k, ram=ram) for k, ram in enumerate(rams)], clusters=clusters)
    assert isinstance(found, Infeasible)
    return found


def test_too_little_ram_in_total() -> None:
    profile = chain(7, weight=325_000_000)
    found = infeasible(profile, 2, 2, 2)
    assert found.reason.startswith(
        "the model needs 9.1 GB to train at batch 32; the 3 nodes of node_configs.json offer 6.0 GB."
    )
    assert (found.needed_bytes, found.offered_bytes) == (pytest.approx(9.1e9), 6e9)
    assert "the 1 node of node_configs.json offers 6.0 GB" in infeasible(profile, 6).reason


def test_a_node_too_small_for_any_stage() -> None:
    profile = chain(4, weight=10**9)
    found = infeasible(profile, 32, 1, 32)
    assert found.reason.startswith(
        "node 1 (1.0 GB) is too small for any stage: the smallest stage needs 4.0 GB at batch 32."
    )
    assert (found.needed_bytes, found.offered_bytes) == (4e9, 1e9)
    assert "node 4 (1.0 GB) and 1 more are too small" in infeasible(profile, 64, 1, 1, 1, 1, 1).reason


def test_a_unit_that_fits_no_node() -> None:
    profile = chain(4, weight=10**6)
    large = unit(activation=10**10)
    profile = ModelProfile((*profile.units[:2], large, profile.units[3]), profile.state, 32, 0)
    assert infeasible(profile, 8, 8).reason.startswith(
        "unit 2 of the model (with layer2.weight) cannot be cut further and needs 10.0 GB to train at"
        " batch 32; the largest of the 2 nodes of node_configs.json has 8.0 GB."
    )


def test_enough_ram_in_total_but_no_cut_that_fits() -> None:
    found = infeasible(chain(3, weight=10**9), 6.5, 6.5).reason
    assert found.startswith(
        "the model needs 12.0 GB to train at batch 32 and the 2 nodes of node_configs.json offer"
        " 13.0 GB, but no cut was found that gives every node a stage that fits"
    )
    assert "About 1.25 times the RAM on each node" in found
    assert "a stage also keeps the activations of its batch" in found


@pytest.mark.parametrize(("weight", "helps"), [(10**9, False), (10**6, True)])
def test_a_smaller_batch_is_suggested_only_if_it_helps(weight: int, helps: bool) -> None:
    profile = chain(2, weight=weight, rows=1, activation=40 * 10**9)
    found = infeasible(profile, 2, 2).reason
    assert "to train at batch 32 with the activations of 1/16 of it at a time" in found
    assert ("a smaller batch" in found) == helps
    found = infeasible(chain(2, weight=weight, activation=40 * 10**9), 2, 2).reason
    assert "to train at batch 32; the 2 nodes" in found
    assert ("a smaller batch" in found) == helps


def test_too_many_clusters_for_the_ram() -> None:
    found = infeasible(chain(4, weight=10**9), 10, 10, 10, 10, clusters=3)
    assert found.reason == (
        "clusters=3 does not fit: each cluster holds the whole model, at least 24.0 GB at batch 32, and"
        " the 4 nodes of node_configs.json offer 40.0 GB. 1 cluster fits."
    )


def test_a_single_cluster_needs_no_memory_for_averaging() -> None:
    nodes = [node(k, ram=13) for k in range(4)]
    single = planned(chain(4, weight=10**9), nodes)
    assert len(single.clusters) == 1
    assert all(stage.memory.averaging == 0 for stage in single.stages)
    roomy = planned(chain(4, weight=10**9), [node(k, ram=17) for k in range(4)])
    assert len(roomy.clusters) == 2
    assert all(stage.memory.averaging == 2 * stage.memory.weights for stage in roomy.stages)
    frugal = planned(chain(4, weight=10**9), nodes, averaging=0)
    assert len(frugal.clusters) == 2


def test_clusters_are_made_only_if_a_loss_is_reached_sooner() -> None:
    """Two clusters of equal nodes have the rate of one pipeline, and need more samples."""
    nodes = [node(k) for k in range(4)]
    profile = chain(8, rows=1, work=1e10, crossing=10**6)
    single, several = (planned(profile, nodes, clusters=count) for count in (1, 2))
    assert single.samples_per_second < several.samples_per_second
    assert planned(profile, nodes) == single
    slow_links = [node(k, bandwidth=1) for k in range(4)]
    assert len(planned(profile, slow_links).clusters) == 2
    assert several.loss_rate == pytest.approx(several.samples_per_second / 2**COST_EXPONENT)


@pytest.mark.parametrize("seed", range(6))
def test_no_other_number_of_clusters_reaches_a_loss_sooner(seed: int) -> None:
    rng = planning.random.Random(100 + seed)
    case = planning.random_case(rng, 4 + seed % 3)
    profile = replace(case.profile, smallest_rows=1 if seed % 2 else None)
    found = make_plan(profile, case.nodes)
    singles = [None if isinstance(found, Infeasible) else _singles(found)]
    for count in range(1, len(case.nodes) // 2 + 1):
        other = make_plan(profile, case.nodes, clusters=count)
        if isinstance(other, Plan):
            assert isinstance(found, Plan)
            if [_singles(other)] == singles:
                assert other.loss_rate <= 1.001 * found.loss_rate


def _singles(plan: Plan) -> int:
    return sum(len(cluster.stages) == 1 for cluster in plan.clusters)


def test_a_large_pool_has_fewer_clusters_if_that_reaches_a_loss_sooner() -> None:
    profile, nodes = chain(24, rows=1), [node(k) for k in range(12)]
    plan, pairs = planned(profile, nodes), planned(profile, nodes, clusters=6)
    assert len(plan.clusters) < 6
    assert plan.loss_rate > pairs.loss_rate


def test_too_few_clusters_for_the_ram() -> None:
    """Every stage has the shared tensor, 1 GB, and what crosses its cuts: 0.6 GB, 1.2 GB in a Stem."""
    shared = TensorProfile("shared", 10**9, trainable=False, averaged=False, units=(0, 1, 2, 3))
    profile = replace(chain(4, crossing=300_000_000), state=(shared,))
    found = infeasible(profile, 1.7, 1.7, 1.7, 2.3, clusters=1)
    assert found.reason.startswith("clusters=1 does not fit: a pipeline of 4 stages needs more memory")
    assert found.reason.endswith("2 clusters fit.")


def test_the_reason_names_the_source_of_the_nodes() -> None:
    nodes = [node(0, ram=1), node(1, ram=1)]
    for source, pool in (("pool.json", "the 2 nodes of pool.json offer"), ("", "2 providers offer")):
        found = make_plan(chain(4, weight=10**9), nodes, source=source)
        assert isinstance(found, Infeasible)
        assert f"{pool} 2.0 GB" in found.reason
