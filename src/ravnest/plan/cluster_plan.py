"""Plan of one cluster: cuts, micro-batches, memory and times of a pipeline in a given order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ravnest.plan.cost import ModelCosts, NodeCapacity
from ravnest.plan.cuts import ROUNDING, PipelineCuts, best_cuts
from ravnest.plan.memory import RECOMPUTATION
from ravnest.plan.memory_steps import later_costs
from ravnest.plan.microbatches import (
    StageTimes,
    choose_microbatches,
    cycle_seconds,
    delayed_seconds,
)
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.plan import ClusterPlan, StagePlan
from ravnest.plan.profile import ModelProfile
from ravnest.types import Role


def stage_times(
    costs: ModelCosts, cuts: PipelineCuts, machines: Sequence[NodeCapacity]
) -> list[StageTimes]:
    """Return the times of the stages; infinite if a stage does not fit the RAM."""
    last = len(machines) - 1
    return [
        StageTimes(
            costs.stage_seconds(start, stop, machines[index], len(machines) - index),
            0.0 if index == last else costs.link_seconds(stop, *machines[index : index + 2]),
            stop - start,
            latency=None if index == last else costs.link_delay(*machines[index : index + 2]),
        )
        for index, (start, stop) in enumerate(itertools.pairwise(cuts.bounds))
    ]


def plan_cluster(
    number: int,
    profile: ModelProfile,
    costs: ModelCosts,
    nodes: Sequence[NodeConfig],
    machines: Sequence[NodeCapacity],
) -> ClusterPlan | None:
    """Return the cluster of these nodes, Root first; None if no cuts fit their RAM."""
    cuts = best_cuts(costs, machines)
    if cuts is None:
        return None
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
    planned = stage_times(costs, cuts, machines)
    if not all(math.isfinite(times.compute) for times in planned):
        return None
    split = _choose_split(profile, costs, planned)
    stages = tuple(
        _stage(number, index, costs, cuts, (nodes, machines), split) for index in range(len(nodes))
    )
    times = [
        StageTimes(
            stage.compute_seconds,
            stage.link_seconds,
            stage.stop - stage.start,
            latency=known.latency,
            defers=stage.defers,
        )
        for stage, known in zip(stages, planned, strict=True)
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
    forced: bool
    """RAM is too short for larger ones."""


def _choose_split(profile: ModelProfile, costs: ModelCosts, times: Sequence[StageTimes]) -> _Split:
    """Choose the micro-batches that are fastest within the memory that the stages are planned for."""
    training, batch = costs.training, costs.batch_size
    smallest = profile.smallest_rows or batch
    largest = _largest_rows(profile, costs)
    chosen = choose_microbatches(times, batch, smallest) if len(times) > 1 else 1
    fastest = -(-batch // chosen)
    rows = min(fastest, largest)
    count, forced = -(-batch // rows), rows < fastest
    if training.max_delay:
        return _Split(count, rows, 2 * count, forced)
    in_flight = count if training.share == 1 else max(1, int(batch * training.share) // rows)
    return _Split(count, rows, in_flight, forced)


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
    """Explain the number of micro-batches to the user."""
    if profile.smallest_rows is None:
        return f"batches are not split into micro-batches: {profile.unsplit_reason}"
    if split.count == 1:
        text = "batches are not split into micro-batches: that would not be faster"
    else:
        parts = f"{split.count} micro-batches of {split.rows}"
        text = f"each batch of {profile.batch_size} is split into {parts}"
    if costs.training.share < 1:
        return f"{text}, of which at most {split.in_flight} are in flight, because RAM is short"
    return f"{text}, because RAM is short" if split.forced else text


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
    defers = costs.defers(start, stop, behind, machine.ram)
    return StagePlan(
        node=nodes[index],
        cluster=cluster,
        index=index,
        role=Role.at(index, len(nodes)),
        start=start,
        stop=stop,
        memory=costs.memory(start, stop, behind, batches, defers=defers),
        compute_seconds=costs.compute_seconds(start, stop, machine) * (1 + RECOMPUTATION * recomputed),
        link_seconds=0 if behind == 1 else costs.link_seconds(stop, *machines[index : index + 2]),
        kept=kept,
        defers=defers,
        link=None if behind == 1 else costs.links.link(nodes[index].id, nodes[index + 1].id),
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
    if sending.link is not None:
        return (
            f"the link from Node({sending.node.id}) to Node({receiver.node.id})"
            f" at its measured {sending.link.rate:.3g} Mbps"
        )
    slower = min(sending.node, receiver.node, key=lambda node: node.bandwidth)
    return (
        f"the link from Node({sending.node.id}) to Node({receiver.node.id})"
        f" at the {slower.bandwidth:g} Mbps of Node({slower.id})"
    )
