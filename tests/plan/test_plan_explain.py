"""The log of ``clusterize`` has its documented format, and the description of a plan has its numbers."""

from __future__ import annotations

from dataclasses import replace

from plan_cases import chain, node, planned

from ravnest.plan.cluster_cost import about_clusters
from ravnest.plan.explain import clusterize_log, clusterize_notes, explain, idle_nodes
from ravnest.plan.plan import Plan
from ravnest.plan.profile import ModelProfile, TensorProfile
from ravnest.plan.rings import OwnedUnits, RingMember, make_rings

NAMES = ["conv1", "conv1", "pool", "fc1", "fc2", "softmax"]


def model() -> ModelProfile:
    names = {0: "conv1.weight", 3: "fc1.weight", 4: "fc2.weight"}
    state = tuple(
        TensorProfile(name, 250_000_000, trainable=True, averaged=True, units=(unit,))
        for unit, name in names.items()
    )
    return replace(chain(6, activation=10_000_000, crossing=1_000_000), state=state)


def test_the_log_has_the_documented_format() -> None:
    plan = planned(model(), [node(k, compute=50 if k % 2 else 40) for k in range(4)], clusters=2)
    assert clusterize_log(plan) == (
        "Node(0, Cluster(0)) \n"
        "self.IP(10.0.0.1:8080) \n"
        "Ring IDs({0: 'conv1.weight'}) \n"
        "Address2Param({'10.0.0.1:8081': 'conv1.weight'})\n\n\n"
        "Node(2, Cluster(0)) \n"
        "self.IP(10.0.0.1:8082) \n"
        "Ring IDs({1: 'fc1.weight'}) \n"
        "Address2Param({'10.0.0.1:8083': 'fc1.weight'})\n\n\n"
        "Node(1, Cluster(1)) \n"
        "self.IP(10.0.0.1:8081) \n"
        "Ring IDs({0: 'conv1.weight'}) \n"
        "Address2Param({'10.0.0.1:8080': 'conv1.weight'})\n\n\n"
        "Node(3, Cluster(1)) \n"
        "self.IP(10.0.0.1:8083) \n"
        "Ring IDs({1: 'fc1.weight'}) \n"
        "Address2Param({'10.0.0.1:8082': 'fc1.weight'})\n\n\n"
        "Cluster 0 : Node(0) -> Node(2)\n"
        "Cluster 1 : Node(1) -> Node(3)\n\n\n"
        "Node(0) -> Root\n"
        "Node(1) -> Root\n"
        "Node(2) -> Leaf\n"
        "Node(3) -> Leaf\n"
    )


def test_the_log_of_a_single_cluster_has_no_next_members() -> None:
    log = clusterize_log(planned(model(), [node(k) for k in range(3)]))
    assert log.count("Address2Param({})") == 3
    assert "Cluster 0 : Node(0) -> Node(1) -> Node(2)\n" in log
    assert log.endswith("Node(0) -> Root\nNode(1) -> Stem\nNode(2) -> Leaf\n")


def plan_of(*bounds: int) -> Plan:
    """Return a plan with clusters of two nodes each, cut at the given units."""
    plan = planned(model(), [node(k) for k in range(2 * len(bounds))])
    clusters = tuple(
        replace(cluster, stages=(replace(root, stop=cut), replace(leaf, start=cut)))
        for cluster, (root, leaf), cut in zip(
            plan.clusters, (cluster.stages for cluster in plan.clusters), bounds, strict=True
        )
    )
    owned = [
        [
            OwnedUnits(stage.start, stage.stop, RingMember(c.id, stage.node.id, stage.node.address))
            for stage in c.stages
        ]
        for c in clusters
    ]
    return replace(plan, clusters=clusters, rings=make_rings(model().state, owned))


def test_the_log_lists_rings_that_share_the_next_member() -> None:
    """fc1 belongs to the Leaf of clusters 0 and 1, and to the Root of cluster 2."""
    log = clusterize_log(plan_of(3, 3, 4))
    assert (
        "Node(1, Cluster(0)) \n"
        "self.IP(10.0.0.1:8081) \n"
        "Ring IDs({1: 'fc1.weight', 2: 'fc2.weight'}) \n"
        "Address2Param({'10.0.0.1:8083': ['fc1.weight', 'fc2.weight']})\n"
    ) in log
    assert (
        "Ring IDs({1: 'fc1.weight', 2: 'fc2.weight'}) \n"
        "Address2Param({'10.0.0.1:8084': 'fc1.weight', '10.0.0.1:8085': 'fc2.weight'})\n"
    ) in log


def test_the_description_has_memory_and_times() -> None:
    nodes = [node(0, ram=8, compute=40), node(1, ram=4, compute=20, bandwidth=8)]
    lines = explain(planned(model(), nodes), model(), NAMES).splitlines()
    head, _, cluster, root, root_memory, root_time, leaf, leaf_memory, leaf_time, _, rings = lines
    assert head.startswith("2 nodes in 1 cluster train about 29.5 samples/s in batches of 32")
    assert head.endswith("schedule async.")
    assert "about 29.5 samples/s" in cluster
    assert "every 1.09 s" in cluster
    assert "batches are not split into micro-batches: it is not known" in cluster
    assert "the link from Node(0) to Node(1) at the 8 Mbps of Node(1)" in cluster
    assert "Node(0) at 10.0.0.1:8080 is the Root: layers conv1 to fc1 (4 units), 67%" in root
    assert "Memory 2.5 GB of 8 GB (32%): weights 500 MB, older versions 500 MB" in root_memory
    assert "optimizer 1.0 GB, activations 80 MB, transfer 4 MB" in root_memory
    assert root_memory.endswith("460 MB, sent and not yet acknowledged by the neighbours 2 MB.")
    assert "100 ms" in root_time
    assert "1 s on the link to Node(1)" in root_time
    assert "Node(1) at 10.0.0.1:8081 is the Leaf: layers fc2 to softmax (2 units), 33%" in leaf
    assert "Memory 1.0 GB of 4 GB (25%): weights 250 MB, older versions 0 kB" in leaf_memory
    assert "100 ms" in leaf_time
    assert "link" not in leaf_time
    assert "nothing is averaged" in rings


def test_the_description_lists_rings() -> None:
    text = explain(planned(model(), [node(k) for k in range(4)]), model(), NAMES)
    assert "2 rings average the clusters:" in text
    assert "  Ring 0: 1 tensor from conv1.weight on, by Node(0), Node(2)." in text
    assert "  Ring 1: 2 tensors from fc1.weight on, by Node(1), Node(3)." in text


def test_a_stage_of_one_layer() -> None:
    text = explain(planned(chain(2), [node(0), node(1)]), chain(2), ["conv", "fc"])
    assert "the Root: layer conv (1 unit), 50% of the work." in text


def test_the_description_names_assumed_compute() -> None:
    profile = chain(2)
    text = explain(planned(profile, [node(0, compute=None), node(1)]), profile, ["a", "b"])
    assert "50 GFLOP/s: Node(0)." in text
    silent = [node(0, compute=None), node(1, compute=None)]
    text = explain(planned(profile, silent), profile, ["a", "b"])
    assert "No node states its compute: 50 GFLOP/s is assumed for all." in text


def test_the_description_of_a_model_without_work() -> None:
    profile = chain(2, work=0.0)
    text = explain(planned(profile, [node(0)]), profile, ["a", "b"])
    assert text.startswith("1 node in 1 cluster trains about")
    assert "none of the work" in text


def test_nodes_that_hold_no_weights_are_said() -> None:
    """Three equal nodes on slow links: one does all the work."""
    profile = chain(6, weight=4_000_000, activation=1_000_000, crossing=50_000_000)
    first = replace(profile.units[0], work=1e5, crossing_bytes=1000, gradient_bytes=0)
    early = replace(profile, units=(first, *profile.units[1:]), state=profile.state[1:])
    slow = planned(early, [node(k, bandwidth=100) for k in range(2)], clusters=1)
    warning = idle_nodes(slow)
    assert warning.startswith("Warning: Node(0) holds next to no weights")
    assert "100 Mbit/s" in warning
    assert warning in explain(slow, early, ["layer"] * 6)


def test_a_plan_that_uses_all_nodes_has_no_warning() -> None:
    assert not idle_nodes(planned(model(), [node(k) for k in range(3)]))


def test_the_notes_of_clusterize_name_schedule_savings_and_the_cost_of_clusters() -> None:
    profile = chain(2, weight=10**6, activation=10**9)
    tight = planned(profile, [node(0, ram=1.5), node(1, ram=1.5)])
    assert clusterize_notes(tight).splitlines() == [
        f"Schedule async: {tight.clusters[0].split_reason}.",
        "Node(0): RAM is short: activations are recomputed in the backward pass.",
    ]
    several = planned(chain(4), [node(k) for k in range(4)], clusters=2)
    assert clusterize_notes(several).splitlines()[-1] == about_clusters(2)
    assert about_clusters(2) in explain(several, chain(4), ["layer"] * 4)
    unequal = [node(0), node(1), node(2, compute=0.01), node(3, compute=0.01)]
    lines = clusterize_notes(planned(chain(4, rows=1), unequal, clusters=2)).splitlines()
    assert lines[0].startswith("Cluster 0, schedule sync: ")


def test_the_cost_of_clusters_in_words() -> None:
    assert not about_clusters(1)
    assert about_clusters(4) == (
        "4 clusters share the data: each makes about 1/4 of the updates of one process per epoch, and"
        " schedules of the learning rate end where they would end there. At the same learning rate the"
        " loss after the same samples is larger (by 65% with 2 and 368% with 4 clusters in short"
        " trainings): use about 4 times the learning rate of one process, or clusters=1."
    )
