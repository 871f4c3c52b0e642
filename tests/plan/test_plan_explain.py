from __future__ import annotations

from dataclasses import replace

from plan_cases import chain, node

from ravnest.plan.explain import clusterize_log, explain
from ravnest.plan.plan import Plan
from ravnest.plan.planner import make_plan
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
    plan = make_plan(model(), [node(k, compute=50 if k % 2 else 40) for k in range(4)], clusters=2)
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
    log = clusterize_log(make_plan(model(), [node(k) for k in range(3)]))
    assert log.count("Address2Param({})") == 3
    assert "Cluster 0 : Node(0) -> Node(1) -> Node(2)\n" in log
    assert log.endswith("Node(0) -> Root\nNode(1) -> Stem\nNode(2) -> Leaf\n")


def plan_of(*bounds: int) -> Plan:
    """Clusters of two nodes each, cut at the given units."""
    plan = make_plan(model(), [node(k) for k in range(2 * len(bounds))])
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


def test_the_plan_in_words() -> None:
    nodes = [node(0, ram=8, compute=40), node(1, ram=4, compute=20, bandwidth=8)]
    text = explain(make_plan(model(), nodes), model(), NAMES)
    assert text.splitlines() == [
        "2 nodes in 1 cluster train about 32 samples/s in micro-batches of 32.",
        "",
        "Cluster 0: about 32 samples/s, a micro-batch every 1 s; the bottleneck is the link from"
        " Node(0) to Node(1) at the 8 Mbps of Node(1).",
        "  Node(0) at 10.0.0.1:8080 is the Root: layers conv1 to fc1 (4 units), 67% of the work.",
        "    Memory 3.0 GB of 8 GB (38%): weights 500 MB, older versions 1.0 GB, optimizer 1.0 GB,"
        " activations of 2 in flight 80 MB, transfer 2 MB, gradients and workspace 460 MB.",
        "    Time 100 ms a micro-batch, and 1 s on the link to Node(1).",
        "  Node(1) at 10.0.0.1:8081 is the Leaf: layers fc2 to softmax (2 units), 33% of the work.",
        "    Memory 1.0 GB of 4 GB (25%): weights 250 MB, older versions 0 kB, optimizer 500 MB,"
        " activations of 1 in flight 21 MB, transfer 1 MB, gradients and workspace 230 MB.",
        "    Time 100 ms a micro-batch.",
        "",
        "One cluster holds the only copy of the model: nothing is averaged.",
    ]


def test_rings_in_words() -> None:
    text = explain(make_plan(model(), [node(k) for k in range(4)]), model(), NAMES)
    assert "2 rings average the clusters:" in text
    assert "  Ring 0: 1 tensor from conv1.weight on, by Node(0), Node(2)." in text
    assert "  Ring 1: 2 tensors from fc1.weight on, by Node(1), Node(3)." in text


def test_a_stage_of_one_layer() -> None:
    text = explain(make_plan(chain(2), [node(0), node(1)]), chain(2), ["conv", "fc"])
    assert "the Root: layer conv (1 unit), 50% of the work." in text


def test_guessed_speeds_are_said() -> None:
    profile = chain(2)
    text = explain(make_plan(profile, [node(0, compute=None), node(1)]), profile, ["a", "b"])
    assert "Without a compute figure, taken for the median of 50 GFLOP/s: Node(0)." in text
    silent = [node(0, compute=None), node(1, compute=None)]
    text = explain(make_plan(profile, silent), profile, ["a", "b"])
    assert "No node gives its compute figure: all are taken for equal, at 50 GFLOP/s." in text


def test_a_model_without_work_in_words() -> None:
    profile = chain(2, work=0.0)
    text = explain(make_plan(profile, [node(0)]), profile, ["a", "b"])
    assert text.startswith("1 node in 1 cluster trains about")
    assert "none of the work" in text
