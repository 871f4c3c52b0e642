"""Planner: makes a plan from a profile and a pool of nodes.

Pure: the same arguments give the same plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ravnest.errors import PlanError
from ravnest.plan.cost import ModelCosts, NodeCapacity, capacities_of
from ravnest.plan.cuts import PipelineCuts, best_cuts
from ravnest.plan.infeasible import Infeasible, explain_infeasible
from ravnest.plan.memory import averaging_copies
from ravnest.plan.microbatches import (
    StageTimes,
    choose_microbatches,
    cycle_seconds,
    delayed_seconds,
)
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.plan import ClusterPlan, Plan, StagePlan
from ravnest.plan.profile import ModelProfile
from ravnest.plan.rings import OwnedUnits, Ring, RingMember, make_rings
from ravnest.plan.schedule_choice import delay_pays
from ravnest.plan.search import Pipeline, find_clusters
from ravnest.types import Role

_STEPS = [(1.0, 1.0), (1.0, 1 / 4), (1 / 2, 1 / 8), *((1 / n, 1 / 16) for n in (4, 8, 16))]
"""Shares and parts of ``memory_steps``. A share of four parts keeps a pipeline of two or three stages
busy; below that stages wait for each other."""


def make_plan(
    profile: ModelProfile,
    nodes: Sequence[NodeConfig],
    *,
    clusters: int | None = None,
    seed: int = 0,
    update_frequency: int = 1,
    averaging: float | None = None,
    source: str = "node_configs.json",
) -> Plan | Infeasible:
    """Return the plan that uses every node with the highest predicted samples per second.

    Without ``clusters``, every cluster has a Root and a Leaf, unless some node could not be used
    otherwise: the pool has one node, the model cannot be cut, or nothing else fits the RAM. With
    ``clusters`` there are exactly that many, and clusters of one node are allowed. ``averaging`` is the
    memory for rounds between clusters (``averaging_copies``). ``source`` names the file of the nodes in
    messages; empty if they are a server's providers.

    Returns ``Infeasible`` if no plan exists; raises ``PlanError`` for invalid arguments.
    """
    _check(profile, nodes, update_frequency)
    impossible = _impossible_clusters(len(profile.units), len(nodes), clusters)
    if impossible is not None:
        return impossible
    nodes = sorted(nodes, key=lambda node: node.id)
    copies = averaging_copies() if averaging is None else averaging
    machines = capacities_of(nodes)
    for share, part, max_delay in memory_steps(profile):
        several = ModelCosts.of(profile, update_frequency, copies, share, part, max_delay)
        found = find_clusters(several, machines, clusters, seed)
        if found is not None:
            break
    else:
        return explain_infeasible(profile, several, nodes, clusters, source)
    costs, pipelines = found
    if _delay_pays(profile, costs, pipelines, machines):
        costs = costs.delayed()
    planned = tuple(
        _cluster(number, profile, costs, [nodes[i] for i in pipeline], [machines[i] for i in pipeline])
        for number, pipeline in enumerate(pipelines)
    )
    return Plan(
        clusters=planned,
        rings=_rings(profile, planned),
        batch_size=profile.batch_size,
        update_frequency=update_frequency,
        seed=seed,
        schedule="async" if costs.training.max_delay else "sync",
        smallest_rows=profile.smallest_rows or 1,
    )


def memory_steps(profile: ModelProfile) -> list[tuple[float, float, int]]:
    """Return what the planner tries in turn, the fastest first, until the stages fit the RAM.

    Each is the share of a batch for which stages keep activations, the part of it that a micro-batch
    has at most, and the number of updates by which gradients are late. A batch that cannot be split is
    trained with a delay or, if two batches and versions of the weights do not fit, without.
    """
    if profile.smallest_rows is None:
        return [(1.0, 1.0, 1), (1.0, 1.0, 0)]
    least = profile.smallest_rows / profile.batch_size
    steps = [step for step in _STEPS if step[1] >= least] or _STEPS[:1]
    return [(share, part, 0) for share, part in steps]


def _delay_pays(
    profile: ModelProfile,
    costs: ModelCosts,
    pipelines: Sequence[Pipeline],
    machines: Sequence[NodeCapacity],
) -> bool:
    """Return whether batches that can be split are better trained with a delay, and fit the RAM so."""
    if profile.smallest_rows is None or costs.training.share < 1:
        return False
    clusters = []
    for pipeline in pipelines:
        order = [machines[node] for node in pipeline]
        cuts = best_cuts(costs.delayed(), order)
        if cuts is None:
            return False
        clusters.append(_times(costs, cuts, order))
    return delay_pays(clusters, profile.batch_size // profile.smallest_rows)


def _times(costs: ModelCosts, cuts: PipelineCuts, machines: Sequence[NodeCapacity]) -> list[StageTimes]:
    last = len(machines) - 1
    return [
        StageTimes(
            costs.compute_seconds(start, stop, machines[index]),
            0.0 if index == last else costs.link_seconds(stop, *machines[index : index + 2]),
            stop - start,
        )
        for index, (start, stop) in enumerate(itertools.pairwise(cuts.bounds))
    ]


def _check(profile: ModelProfile, nodes: Sequence[NodeConfig], update_frequency: int) -> None:
    if not nodes:
        raise PlanError("there are no nodes to plan for; list at least one in node_configs.json")
    if len({node.id for node in nodes}) < len(nodes):
        raise PlanError("two nodes have the same id")
    if not profile.units:
        raise PlanError("the model has no operation to train")
    if update_frequency < 1:
        raise PlanError(f"update_frequency must be at least 1, is {update_frequency}")


def _impossible_clusters(units: int, count: int, clusters: int | None) -> Infeasible | None:
    """Report a number of clusters that cannot use ``count`` nodes, whatever their RAM."""
    if clusters is None:
        return None
    if not 1 <= clusters <= count:
        return Infeasible(
            f"clusters={clusters} is not possible with {_nodes(count)}: choose 1 to {count}"
        )
    if clusters * units < count:
        return Infeasible(
            f"clusters={clusters} is not possible: the model can be cut into at most {units}"
            f" stages, so {_nodes(count)} need at least {-(-count // units)} clusters"
        )
    return None


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _cluster(
    number: int,
    profile: ModelProfile,
    costs: ModelCosts,
    nodes: Sequence[NodeConfig],
    machines: Sequence[NodeCapacity],
) -> ClusterPlan:
    cuts = best_cuts(costs, machines)
    if cuts is None:
        raise AssertionError(f"cluster {number} fitted in the search and does not fit now")
    stages = tuple(_stage(number, index, costs, cuts, (nodes, machines)) for index in range(len(nodes)))
    split = _choose_split(profile, costs, _times(costs, cuts, machines))
    return ClusterPlan(
        id=number,
        stages=stages,
        seconds=split.seconds,
        samples_per_second=costs.batch_size / max(split.seconds, 1e-9),
        bottleneck=_bottleneck(stages),
        microbatches=split.count,
        microbatch_rows=split.rows if split.count > 1 else None,
        split_reason=_split_reason(profile, costs, split),
        in_flight=split.in_flight,
        delay_fits=_delay_fits(costs, stages),
    )


def _delay_fits(costs: ModelCosts, stages: Sequence[StagePlan]) -> bool:
    """Return whether two whole batches and two versions of the weights fit the stages' RAM."""
    delayed, length = costs.delayed(), len(stages)
    whole = costs.training.share == costs.training.part == 1
    return whole and all(
        delayed.memory(stage.start, stage.stop, length - stage.index).total <= stage.node.ram * 1e9
        for stage in stages
    )


@dataclass(frozen=True)
class _Split:
    """Micro-batches of a cluster."""

    count: int
    rows: int
    in_flight: int
    seconds: float


def _choose_split(profile: ModelProfile, costs: ModelCosts, times: Sequence[StageTimes]) -> _Split:
    """Choose the micro-batches that are fastest within the memory that the stages are planned for."""
    training, batch = costs.training, costs.batch_size
    smallest = profile.smallest_rows or batch
    largest = max(smallest, int(batch * training.part))
    chosen = choose_microbatches(times, batch, smallest) if len(times) > 1 else 1
    rows = min(-(-batch // chosen), largest)
    count = -(-batch // rows)
    if training.max_delay:
        return _Split(count, rows, 2 * count, delayed_seconds(times, count))
    in_flight = count if training.share == 1 else max(1, int(batch * training.share) // rows)
    return _Split(count, rows, in_flight, cycle_seconds(times, count, in_flight))


def _split_reason(profile: ModelProfile, costs: ModelCosts, split: _Split) -> str:
    """Explain the number of micro-batches and the schedule to the user."""
    delayed = bool(costs.training.max_delay)
    if profile.smallest_rows is None:
        whole = f"batches are not split into micro-batches: {profile.unsplit_reason}"
        return whole if delayed else f"{whole}; two batches at once do not fit in RAM"
    if split.count == 1:
        text = "batches are not split into micro-batches: that would not be faster"
    else:
        parts = f"{split.count} micro-batches of {split.rows}"
        text = f"each batch of {profile.batch_size} is split into {parts}"
    if costs.training.share < 1:
        return f"{text}, of which at most {split.in_flight} are in flight, because RAM is short"
    return f"{text}; too few to keep the stages busy, so that two batches overlap" if delayed else text


def _stage(
    cluster: int,
    index: int,
    costs: ModelCosts,
    cuts: PipelineCuts,
    pipeline: tuple[Sequence[NodeConfig], Sequence[NodeCapacity]],
) -> StagePlan:
    nodes, machines = pipeline
    start, stop = cuts.bounds[index : index + 2]
    last = index == len(nodes) - 1
    return StagePlan(
        node=nodes[index],
        cluster=cluster,
        index=index,
        role=Role.at(index, len(nodes)),
        start=start,
        stop=stop,
        memory=costs.memory(start, stop, len(nodes) - index),
        compute_seconds=costs.compute_seconds(start, stop, machines[index]),
        link_seconds=0 if last else costs.link_seconds(stop, *machines[index : index + 2]),
    )


def _bottleneck(stages: Sequence[StagePlan]) -> str:
    """Describe the slowest stage or link; among equals the first stage."""
    computing = max(stages, key=lambda stage: stage.compute_seconds)
    sending = max(stages, key=lambda stage: stage.link_seconds)
    if computing.compute_seconds >= sending.link_seconds:
        return f"the compute of Node({computing.node.id}), its {computing.role}"
    receiver = stages[sending.index + 1]
    slower = min(sending.node, receiver.node, key=lambda node: node.bandwidth)
    return (
        f"the link from Node({sending.node.id}) to Node({receiver.node.id})"
        f" at the {slower.bandwidth:g} Mbps of Node({slower.id})"
    )


def _rings(profile: ModelProfile, clusters: Sequence[ClusterPlan]) -> tuple[Ring, ...]:
    owned = [
        [
            OwnedUnits(
                stage.start,
                stage.stop,
                RingMember(cluster.id, stage.node.id, stage.node.address),
            )
            for stage in cluster.stages
        ]
        for cluster in clusters
    ]
    return make_rings(profile.state, owned)
