"""Description of a plan in words, and the log of ``clusterize``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ravnest.plan.cluster_cost import about_clusters
from ravnest.plan.cost import assumed_compute
from ravnest.plan.links import MeasuredLink
from ravnest.plan.memory import StageMemory, size
from ravnest.plan.plan import ClusterPlan, Plan, StagePlan
from ravnest.plan.profile import ModelProfile, RowCut
from ravnest.plan.rings import Ring

_IDLE_WEIGHTS = 0.01
"""Share of the weights of a cluster up to which a node counts as idle."""
_IDLE_WORK = 0.1
"""Time of a stage, relative to the slowest one, up to which a node counts as idle."""


def explain(plan: Plan, profile: ModelProfile, unit_names: Sequence[str]) -> str:
    """Describe a plan in words: roles, layers, memory against RAM, times and the bottleneck.

    ``unit_names`` has one name per unit, for display; neighbouring units may share one.
    """
    lines = [_headline(plan), *_assumption(plan), *map(_row_cut_line, plan.row_cuts)]
    lines += plan_notes(plan)
    for cluster in plan.clusters:
        lines += ["", _cluster_line(cluster)]
        for stage in cluster.stages:
            lines += _stage_lines(cluster, stage, profile, unit_names)
    lines += ["", *_ring_lines(plan)]
    return "\n".join(lines)


def clusterize_log(plan: Plan) -> str:
    """Return the documented log: one block per node in pipeline order, then clusters, then roles.

    The spaces at the ends of lines belong to the format.
    """
    blocks = [_node_block(plan, stage) for cluster in plan.clusters for stage in cluster.stages]
    clusters = [
        f"Cluster {cluster.id} : " + " -> ".join(f"Node({stage.node.id})" for stage in cluster.stages)
        for cluster in plan.clusters
    ]
    roles = [f"Node({stage.node.id}) -> {stage.role}" for stage in plan.stages]
    return "\n\n\n".join([*blocks, "\n".join(clusters), "\n".join(roles)]) + "\n"


def clusterize_notes(plan: Plan) -> str:
    """Return what ``clusterize`` says besides its log: schedule, savings of memory and warnings."""
    lines = [*_schedules(plan), *map(_row_cut_line, plan.row_cuts)]
    for cluster in plan.clusters:
        for stage in cluster.stages:
            lines += [f"Node({stage.node.id}): {line}" for line in _savings(cluster, stage)]
    return "\n".join([*lines, *plan_notes(plan)])


def _schedules(plan: Plan) -> list[str]:
    """Return the schedule and the reasons for the micro-batches, once if all clusters have the same."""
    reasons = {cluster.id: cluster.split_reason for cluster in plan.clusters}
    if len(set(reasons.values())) == 1:
        return [f"Schedule {plan.schedule}: {reasons[0]}."]
    return [f"Cluster {number}, schedule {plan.schedule}: {each}." for number, each in reasons.items()]


def _node_block(plan: Plan, stage: StagePlan) -> str:
    rings = plan.rings_of(stage.node.id)
    ids = {ring.id: ring.names[0] for ring in rings}
    return (
        f"Node({stage.node.id}, Cluster({stage.cluster})) \n"
        f"self.IP({stage.node.address}) \n"
        f"Ring IDs({ids}) \n"
        f"Address2Param({_next_members(rings, stage.node.id)})"
    )


def _next_members(rings: Sequence[Ring], node_id: int) -> dict[str, str | list[str]]:
    names: dict[str, list[str]] = {}
    for ring in rings:
        successor = ring.successor(node_id)
        if successor is not None:
            names.setdefault(str(successor.address), []).append(ring.names[0])
    return {address: own[0] if len(own) == 1 else own for address, own in names.items()}


def _headline(plan: Plan) -> str:
    nodes = _counted(len(plan.stages), "node")
    clusters = _counted(len(plan.clusters), "cluster")
    verb = "trains" if len(plan.stages) == 1 else "train"
    return (
        f"{nodes} in {clusters} {verb} about {_rounded(plan.samples_per_second)} samples/s"
        f" in batches of {plan.batch_size}, schedule {plan.schedule}."
    )


def _assumption(plan: Plan) -> list[str]:
    """Say for which nodes the compute is assumed."""
    nodes = [stage.node for stage in plan.stages]
    silent = [f"Node({node.id})" for node in nodes if node.compute is None]
    if not silent:
        return []
    assumed = f"{assumed_compute(nodes):g} GFLOP/s"
    if len(silent) == len(nodes):
        return [f"No node states its compute: {assumed} is assumed for all."]
    return [f"Assumed compute (the median of the others), {assumed}: {', '.join(silent)}."]


def plan_notes(plan: Plan) -> list[str]:
    """Return what a user should know before training: idle nodes, and the cost of several clusters."""
    return [note for note in (idle_nodes(plan), about_clusters(len(plan.clusters))) if note]


def idle_nodes(plan: Plan) -> str:
    """Return a warning of nodes that hold next to no weights and do next to no work; empty if none."""
    idle = [stage for cluster in plan.clusters for stage in _idle_stages(cluster)]
    if not idle:
        return ""
    names = [f"Node({stage.node.id})" for stage in idle]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    rate = min(stage.node.bandwidth for stage in plan.stages)
    return (
        f"Warning: {listed} {'holds' if len(idle) == 1 else 'hold'} next to no weights, and nearly all"
        " work is done elsewhere: the model has no cut at which passing on activations at"
        f" {rate:g} Mbit/s takes less time than the work that it saves. Training is as fast with fewer"
        " nodes. Larger batches, compression of what is sent or faster links may help."
    )


def _idle_stages(cluster: ClusterPlan) -> Iterator[StagePlan]:
    if len(cluster.stages) < 2:
        return
    weights = sum(stage.memory.weights for stage in cluster.stages)
    slowest = max(stage.compute_seconds for stage in cluster.stages)
    for stage in cluster.stages:
        few = stage.memory.weights <= _IDLE_WEIGHTS * weights
        if few and stage.compute_seconds <= _IDLE_WORK * slowest:
            yield stage


def _row_cut_line(cut: RowCut) -> str:
    return (
        f"{cut.name} ({size(cut.bytes)}) is cut into {cut.blocks} blocks of rows, because no plan fits"
        " the RAM otherwise."
    )


def _cluster_line(cluster: ClusterPlan) -> str:
    return (
        f"Cluster {cluster.id}: about {_rounded(cluster.samples_per_second)} samples/s, one"
        f" batch every {_time(cluster.seconds)}; the bottleneck is {cluster.bottleneck};"
        f" {cluster.split_reason}."
    )


def _stage_lines(
    cluster: ClusterPlan, stage: StagePlan, profile: ModelProfile, unit_names: Sequence[str]
) -> Iterator[str]:
    memory = stage.memory
    share = memory.total / (stage.node.ram * 1e9)
    yield (
        f"  Node({stage.node.id}) at {stage.node.address} is the {stage.role}:"
        f" {_layers(stage, unit_names)}, {_share_of_work(stage, profile)} of the work."
    )
    yield (
        f"    Memory {size(memory.total)} of {stage.node.ram:g} GB ({share:.0%}): weights"
        f" {size(memory.weights)}, older versions {size(memory.versions)}, optimizer"
        f" {size(memory.optimizer)}, activations"
        f" {size(memory.activations)}, transfer {size(memory.transfer)}, gradients and workspace"
        f" {size(memory.gradients)}{_averaging(memory)}{_unacknowledged(memory)}."
    )
    yield from (f"    {line}" for line in _savings(cluster, stage))
    yield f"    Time {_time(stage.compute_seconds)} per batch{_link(cluster, stage)}."


def _savings(cluster: ClusterPlan, stage: StagePlan) -> Iterator[str]:
    """Say what the node does because it cannot keep everything that would make it faster."""
    last = stage.index == len(cluster.stages) - 1
    if cluster.loss_chunks > 1 and last:
        chunks = f"{cluster.loss_chunks} chunks of positions"
        yield f"Logits and loss are computed in {chunks}, because RAM is short."
    if not stage.defers:
        yield "RAM is short: weight gradients are computed with those of the inputs, not after them."
    if stage.kept is None:
        return
    kept = f"the activations of {stage.kept} of {cluster.in_flight} micro-batches fit at once"
    if last:
        yield f"RAM is short: {kept}; weight gradients are computed early."
    elif cluster.microbatch_rows is None:
        yield "RAM is short: activations are recomputed in the backward pass."
    else:
        yield f"RAM is short: {kept}, those of the others are recomputed in the backward pass."


def _averaging(memory: StageMemory[float]) -> str:
    return f", averaging with other clusters {size(memory.averaging)}" if memory.averaging else ""


def _unacknowledged(memory: StageMemory[float]) -> str:
    kept = memory.unacknowledged
    return f", sent and not yet acknowledged by the neighbours {size(kept)}" if kept else ""


def _link(cluster: ClusterPlan, stage: StagePlan) -> str:
    if stage.index == len(cluster.stages) - 1:
        return ""
    receiver = cluster.stages[stage.index + 1].node
    text = f", and {_time(stage.link_seconds)} on the link to Node({receiver.id})"
    return text if stage.link is None else f"{text}: {_figures(stage.link)} (measured)"


def _figures(link: MeasuredLink) -> str:
    through = ", relayed" if link.relayed else ""
    return f"{_rounded(link.rate)} Mbit/s, {_rounded(link.delay * 1e3)} ms{through}"


def _layers(stage: StagePlan, unit_names: Sequence[str]) -> str:
    names = list(dict.fromkeys(unit_names[stage.start : stage.stop]))
    units = _counted(stage.stop - stage.start, "unit")
    if len(names) == 1:
        return f"layer {names[0]} ({units})"
    return f"layers {names[0]} to {names[-1]} ({units})"


def _share_of_work(stage: StagePlan, profile: ModelProfile) -> str:
    total = sum(unit.work for unit in profile.units)
    own = sum(unit.work for unit in profile.units[stage.start : stage.stop])
    return f"{own / total:.0%}" if total else "none"


def _ring_lines(plan: Plan) -> Iterator[str]:
    if len(plan.clusters) == 1:
        yield "One cluster holds the only copy of the model; nothing is averaged."
        return
    verb = "averages" if len(plan.rings) == 1 else "average"
    yield f"{_counted(len(plan.rings), 'ring')} {verb} the clusters:"
    for ring in plan.rings:
        members = ", ".join(f"Node({member.node_id})" for member in ring.members)
        tensors = _counted(len(ring.names), "tensor")
        yield f"  Ring {ring.id}: {tensors} from {ring.names[0]} on, by {members}."


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _time(seconds: float) -> str:
    return f"{_rounded(seconds * 1e3)} ms" if seconds < 1 else f"{_rounded(seconds)} s"


def _rounded(number: float) -> str:
    """Format a prediction with three digits."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
