"""Planner: makes a plan from a profile and a pool of nodes.

Pure: the same arguments give the same plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ravnest.errors import PlanError
from ravnest.plan.cost import ModelCosts, NodeCapacity, capacities_of
from ravnest.plan.cuts import ROUNDING, PipelineCuts, best_cuts
from ravnest.plan.infeasible import Infeasible, explain_infeasible
from ravnest.plan.loss_chunks import chunk_counts, with_loss_chunks
from ravnest.plan.memory import RECOMPUTATION, averaging_copies
from ravnest.plan.memory_steps import later_costs, loses_nothing, memory_steps
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
from ravnest.plan.search import EXACT_NODES, Pipeline, find_clusters
from ravnest.types import Role


def make_plan(
    profile: ModelProfile,
    nodes: Sequence[NodeConfig],
    *,
    clusters: int | None = None,
    seed: int = 0,
    update_frequency: int = 1,
    averaging: float | None = None,
    recompute: bool = True,
    source: str = "node_configs.json",
) -> Plan | Infeasible:
    """Return the plan that uses every node with the highest predicted samples per second.

    Without ``clusters``, every cluster has a Root and a Leaf, unless some node could not be used
    otherwise: the pool has one node, the model cannot be cut, or nothing else fits the RAM. With
    ``clusters`` there are exactly that many, and clusters of one node are allowed. ``averaging`` is the
    memory for rounds between clusters (``averaging_copies``). ``recompute``: stages may recompute
    activations. ``source`` names the file of the nodes in messages; empty if they are a server's
    providers.

    Returns ``Infeasible`` if no plan exists; raises ``PlanError`` for invalid arguments.
    """
    _check(profile, nodes, update_frequency)
    impossible = _impossible_clusters(len(profile.units), len(nodes), clusters)
    if impossible is not None:
        return impossible
    nodes = sorted(nodes, key=lambda node: node.id)
    copies = averaging_copies() if averaging is None else averaging
    machines = capacities_of(nodes)
    found: list[Plan] = []
    for chunks in chunk_counts(profile):
        chunked = with_loss_chunks(profile, chunks)
        for step in memory_steps(chunked):
            several = step.costs(chunked, update_frequency, copies, recompute=recompute)
            clusters_found = find_clusters(several, machines, clusters, seed)
            if clusters_found is None:
                continue
            plan = _plan(chunked, clusters_found, nodes, machines, update_frequency, seed)
            if chunks > 1 and not _holds_head(profile, plan):
                continue
            found.append(_with_chunks(plan, profile, chunks, clusters_found[0]))
            kept_all = all(stage.kept is None for stage in plan.stages)
            if len(nodes) > EXACT_NODES or (kept_all and loses_nothing(step)):
                return max(found, key=_worth)
        if chunks > 1 and found:
            break
    if not found:
        return explain_infeasible(profile, several, nodes, clusters, source)
    return max(found, key=_worth)


def _holds_head(profile: ModelProfile, plan: Plan) -> bool:
    """Return whether the last stage of each cluster has the layer of the logits."""
    head = profile.chunkable
    return head is not None and all(c.stages[-1].start <= head.unit for c in plan.clusters)


def _with_chunks(plan: Plan, profile: ModelProfile, chunks: int, costs: ModelCosts) -> Plan:
    """Return the plan with the fewest chunks, up to ``chunks``, that fit each cluster's last stage."""
    if chunks == 1:
        return plan
    with_chunks = {
        count: replace(
            ModelCosts.of(with_loss_chunks(profile, count), plan.update_frequency),
            training=costs.training,
        )
        for count in chunk_counts(profile)
        if count < chunks
    }

    def changed(cluster: ClusterPlan) -> ClusterPlan:
        leaf = cluster.stages[-1]
        for count, fewer in with_chunks.items():
            memory = fewer.memory(leaf.start, leaf.stop, 1)
            if leaf.kept is None and memory.total <= leaf.node.ram * 1e9:
                stages = (*cluster.stages[:-1], replace(leaf, memory=memory))
                return replace(cluster, stages=stages, loss_chunks=count)
        return replace(cluster, loss_chunks=chunks)

    return replace(plan, clusters=tuple(map(changed, plan.clusters)))


def _plan(
    profile: ModelProfile,
    found: tuple[ModelCosts, tuple[Pipeline, ...]],
    nodes: Sequence[NodeConfig],
    machines: Sequence[NodeCapacity],
    update_frequency: int,
    seed: int,
) -> Plan:
    """Return the plan with these pipelines."""
    costs, pipelines = found
    if _delay_pays(profile, costs, pipelines, machines):
        costs = costs.delayed()
    clusters = tuple(
        _cluster(number, profile, costs, [nodes[i] for i in each], [machines[i] for i in each])
        for number, each in enumerate(pipelines)
    )
    return Plan(
        clusters=clusters,
        rings=_rings(profile, clusters),
        batch_size=profile.batch_size,
        update_frequency=update_frequency,
        seed=seed,
        schedule="async" if costs.training.max_delay else "sync",
        smallest_rows=profile.smallest_rows or 1,
        splittable=profile.smallest_rows is not None,
        row_cuts=profile.row_cuts,
    )


def _worth(plan: Plan) -> tuple[int, float]:
    """Return the rank of a plan: fewer one-node clusters, then more samples per second."""
    return -sum(len(cluster.stages) == 1 for cluster in plan.clusters), plan.samples_per_second


def _delay_pays(
    profile: ModelProfile,
    costs: ModelCosts,
    pipelines: Sequence[Pipeline],
    machines: Sequence[NodeCapacity],
) -> bool:
    """Return whether batches that can be split are better trained with a delay, and fit the RAM so.

    Stages must keep all activations of two batches: to recompute them would take what a delay gains.
    """
    if profile.smallest_rows is None or costs.training.share < 1:
        return False
    clusters, delayed = [], costs.delayed()
    delayed = replace(delayed, training=replace(delayed.training, recompute=False))
    for pipeline in pipelines:
        order = [machines[node] for node in pipeline]
        cuts = best_cuts(delayed, order)
        if cuts is None:
            return False
        clusters.append(_times(costs, cuts, order))
    return delay_pays(clusters, profile.batch_size // profile.smallest_rows)


def _times(costs: ModelCosts, cuts: PipelineCuts, machines: Sequence[NodeCapacity]) -> list[StageTimes]:
    """Return the times of the stages; infinite if a stage does not fit the RAM."""
    last = len(machines) - 1
    return [
        StageTimes(
            costs.stage_seconds(start, stop, machines[index], len(machines) - index),
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
    best = _cluster_with(number, profile, costs, cuts, (nodes, machines))
    assert best is not None
    if all(stage.kept is None for stage in best.stages):
        return best
    later = (
        _cluster_with(number, profile, other, cuts, (nodes, machines))
        for other in later_costs(profile, costs)
    )
    return min([best, *filter(None, later)], key=lambda cluster: cluster.seconds)


def _cluster_with(
    number: int,
    profile: ModelProfile,
    costs: ModelCosts,
    cuts: PipelineCuts,
    pipeline: tuple[Sequence[NodeConfig], Sequence[NodeCapacity]],
) -> ClusterPlan | None:
    """Return the cluster with these cuts; None if its stages do not fit the RAM."""
    nodes, machines = pipeline
    planned = _times(costs, cuts, machines)
    if not all(math.isfinite(times.compute) for times in planned):
        return None
    split = _choose_split(profile, costs, planned)
    stages = tuple(
        _stage(number, index, costs, cuts, (nodes, machines), split) for index in range(len(nodes))
    )
    times = [
        StageTimes(stage.compute_seconds, stage.link_seconds, stage.stop - stage.start)
        for stage in stages
    ]
    seconds = _cycle(costs, times, split)
    return ClusterPlan(
        id=number,
        stages=stages,
        seconds=seconds,
        samples_per_second=costs.batch_size / max(seconds, 1e-9),
        bottleneck=_bottleneck(stages),
        microbatches=split.count,
        microbatch_rows=split.rows if _may_split(profile, split, len(nodes)) else None,
        split_reason=_split_reason(profile, costs, split),
        in_flight=split.in_flight,
        largest_rows=_largest_rows(profile, costs),
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


def _choose_split(profile: ModelProfile, costs: ModelCosts, times: Sequence[StageTimes]) -> _Split:
    """Choose the micro-batches that are fastest within the memory that the stages are planned for."""
    training, batch = costs.training, costs.batch_size
    smallest = profile.smallest_rows or batch
    largest = _largest_rows(profile, costs)
    chosen = choose_microbatches(times, batch, smallest) if len(times) > 1 else 1
    rows = min(-(-batch // chosen), largest)
    count = -(-batch // rows)
    if training.max_delay:
        return _Split(count, rows, 2 * count)
    in_flight = count if training.share == 1 else max(1, int(batch * training.share) // rows)
    return _Split(count, rows, in_flight)


def _largest_rows(profile: ModelProfile, costs: ModelCosts) -> int:
    """Return the samples of the largest micro-batch for which memory is planned."""
    return max(profile.smallest_rows or 1, int(costs.batch_size * costs.training.part))


def _cycle(costs: ModelCosts, times: Sequence[StageTimes], split: _Split) -> float:
    """Return the predicted time between batches."""
    if costs.training.max_delay:
        return delayed_seconds(times, split.count)
    return cycle_seconds(times, split.count, split.in_flight)


def _may_split(profile: ModelProfile, split: _Split, stages: int) -> bool:
    """Return whether batches are split, or may be once times are measured."""
    return split.count > 1 or (profile.smallest_rows is not None and stages > 1)


def _split_reason(profile: ModelProfile, costs: ModelCosts, split: _Split) -> str:
    """Explain the number of micro-batches and the schedule to the user."""
    delayed = bool(costs.training.max_delay)
    if profile.smallest_rows is None:
        text = f"batches are not split into micro-batches: {profile.unsplit_reason}"
        alone = "; one batch at a time is in the pipeline, because RAM is short"
        return text if delayed else text + alone
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
    split: _Split,
) -> StagePlan:
    nodes, machines = pipeline
    start, stop = cuts.bounds[index : index + 2]
    machine, behind = machines[index], len(nodes) - index
    kept = _kept(costs, split, behind, costs.kept_batches(start, stop, behind, machine.ram))
    batches = None if kept is None else max(kept * split.rows / costs.batch_size, costs.training.part)
    recomputed = 0.0 if kept is None or behind == 1 else _recomputed(costs, split, kept)
    return StagePlan(
        node=nodes[index],
        cluster=cluster,
        index=index,
        role=Role.at(index, len(nodes)),
        start=start,
        stop=stop,
        memory=costs.memory(start, stop, behind, batches),
        compute_seconds=costs.compute_seconds(start, stop, machine) * (1 + RECOMPUTATION * recomputed),
        link_seconds=0 if behind == 1 else costs.link_seconds(stop, *machines[index : index + 2]),
        kept=kept,
    )


def _kept(costs: ModelCosts, split: _Split, behind: int, batches: float) -> int | None:
    """Return the micro-batches whose activations a stage keeps; None if it keeps all in flight."""
    if batches >= costs.training.in_flight(behind):
        return None
    kept = max(1, int(batches * costs.batch_size / split.rows * (1 + ROUNDING)))
    return kept if kept < split.in_flight else None


def _recomputed(costs: ModelCosts, split: _Split, kept: int) -> float:
    """Return the share of micro-batches that a stage recomputes."""
    if costs.training.max_delay:
        return 1.0
    return (split.in_flight - kept) / split.in_flight


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
