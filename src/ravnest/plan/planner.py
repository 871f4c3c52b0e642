"""Planner: makes a plan from a profile and a pool of nodes.

Pure: the same arguments give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ravnest.errors import PlanError
from ravnest.plan.cluster_plan import plan_cluster, stage_times
from ravnest.plan.cost import ModelCosts, NodeCapacity, capacities_of
from ravnest.plan.cuts import best_cuts
from ravnest.plan.infeasible import Infeasible, cut_off, explain_infeasible
from ravnest.plan.links import UNMEASURED, LinkFigures
from ravnest.plan.loss_chunks import chunk_counts, with_loss_chunks
from ravnest.plan.memory import averaging_copies
from ravnest.plan.memory_steps import loses_nothing, memory_steps
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.plan import ClusterPlan, Plan
from ravnest.plan.profile import ModelProfile
from ravnest.plan.rings import OwnedUnits, Ring, RingMember, make_rings
from ravnest.plan.schedule_choice import delay_pays
from ravnest.plan.search import EXACT_NODES, Pipeline, find_clusters
from ravnest.types import ScheduleSetting

COMPARED_NODES = 50
"""Largest pool for which several numbers of clusters are compared: each takes seconds in larger ones."""
NEARLY = 1.01
"""Multiple of the shortest time that counts as equal if measured links decide the order."""


def make_plan(
    profile: ModelProfile,
    nodes: Sequence[NodeConfig],
    *,
    clusters: int | None = None,
    seed: int = 0,
    update_frequency: int = 1,
    averaging: float | None = None,
    recompute: bool = True,
    schedule: ScheduleSetting = "auto",
    source: str = "node_configs.json",
    links: LinkFigures = UNMEASURED,
) -> Plan | Infeasible:
    """Return the plan that uses every node and reaches a given loss soonest by prediction.

    Without ``clusters``, every cluster has a Root and a Leaf, unless some node could not be used
    otherwise: the pool has one node, the model cannot be cut, or nothing else fits the RAM. With
    ``clusters`` there are exactly that many, and clusters of one node are allowed. ``averaging`` is the
    memory for rounds between clusters (``averaging_copies``). ``recompute``: stages may recompute
    activations. ``schedule`` is the user's. ``source`` names the file of the nodes in messages; empty
    if they are a server's providers. ``links`` are measured figures of the nodes' links.

    Returns ``Infeasible`` if no plan exists; raises ``PlanError`` for invalid arguments.
    """
    _check(profile, nodes, update_frequency)
    impossible = _impossible_clusters(len(profile.units), len(nodes), clusters)
    if impossible is not None:
        return impossible
    copies = averaging_copies() if averaging is None else averaging
    request = _PlanRequest(clusters, seed, update_frequency, copies, recompute, schedule, source)
    nodes = sorted(nodes, key=lambda node: node.id)
    plan = _best_plan(profile, nodes, request, links)
    if isinstance(plan, Plan):
        relayed = links.count_relayed(plan.pipelines)
        if relayed > 1 and links.relay_rate is not None:
            # The first search gave each link the whole relay: fewer relayed links may be better.
            fewer = _best_plan(profile, nodes, request, links.shared_by(relayed))
            return max((each for each in (plan, fewer) if isinstance(each, Plan)), key=_worth)
        return plan
    failing = [text for pair, text in links.failing.items() if {node.id for node in nodes} >= {*pair}]
    if failing and isinstance(_best_plan(profile, nodes, request, replace(links, failing={})), Plan):
        return cut_off(failing)
    return plan


@dataclass(frozen=True)
class _PlanRequest:
    """Arguments of ``make_plan`` besides the model, the nodes and their links."""

    clusters: int | None
    seed: int
    update_frequency: int
    averaging: float
    recompute: bool
    schedule: ScheduleSetting
    source: str


def _best_plan(
    profile: ModelProfile, nodes: Sequence[NodeConfig], request: _PlanRequest, links: LinkFigures
) -> Plan | Infeasible:
    """Return the best plan for nodes in the order of their ids."""
    machines = capacities_of(nodes, links)
    found: list[Plan] = []
    for chunks in chunk_counts(profile):
        chunked = with_loss_chunks(profile, chunks)
        for step in memory_steps(chunked, request.schedule):
            several = step.costs(
                chunked, request.update_frequency, request.averaging, recompute=request.recompute
            )
            several = replace(several, links=links)
            plans = list(_plans(chunked, several, nodes, machines, request))
            if chunks > 1:
                plans = [plan for plan in plans if _holds_head(profile, plan)]
            if not plans:
                continue
            plan = max(plans, key=_worth)
            costs = several if len(plan.clusters) > 1 else several.alone()
            found.append(_with_chunks(plan, profile, chunks, costs))
            kept_all = all(stage.kept is None for stage in plan.stages)
            if len(nodes) > EXACT_NODES or (kept_all and loses_nothing(step)):
                return max(found, key=_worth)
        if chunks > 1 and found:
            break
    if not found:
        return explain_infeasible(profile, several, nodes, request.clusters, request.source)
    return max(found, key=_worth)


def _plans(
    profile: ModelProfile,
    several: ModelCosts,
    nodes: Sequence[NodeConfig],
    machines: Sequence[NodeCapacity],
    request: _PlanRequest,
) -> Iterator[Plan]:
    """Yield a plan for each number of clusters; in a large pool while fewer clusters are better.

    Whole batches are not tried there with fewer clusters: at most two are in a pipeline, so that the
    stages of a longer one wait. Neither are pools above ``COMPARED_NODES``.
    """
    best: Plan | None = None
    for found in find_clusters(several, machines, request.clusters, request.seed):
        plan = _plan(profile, found, nodes, machines, request)
        yield plan
        if len(nodes) > EXACT_NODES:
            worse = best is not None and _worth(plan) < _worth(best)
            if worse or profile.smallest_rows is None or len(nodes) > COMPARED_NODES:
                return
        best = plan


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
                stages = (*cluster.stages[:-1], replace(leaf, memory=memory, defers=True))
                return replace(cluster, stages=stages, loss_chunks=count)
        return replace(cluster, loss_chunks=chunks)

    return replace(plan, clusters=tuple(map(changed, plan.clusters)))


def _plan(
    profile: ModelProfile,
    found: tuple[ModelCosts, tuple[Pipeline, ...]],
    nodes: Sequence[NodeConfig],
    machines: Sequence[NodeCapacity],
    request: _PlanRequest,
) -> Plan:
    """Return the plan with these pipelines, or with the same nodes in a better order."""
    costs, pipelines = found
    overlap = _Overlap.NO
    if request.schedule == "auto":
        overlap = _overlap(profile, costs, pipelines, machines)
    if overlap is _Overlap.PAYS:
        costs = costs.delayed()
    pool = _Pool(profile, nodes, machines)
    pipelines = tuple(pool.best_order(costs, pipeline) for pipeline in pipelines)
    relayed = costs.links.count_relayed([nodes[i].id for i in each] for each in pipelines)
    costs = replace(costs, links=costs.links.shared_by(relayed))
    clusters = tuple(pool.cluster(number, costs, each) for number, each in enumerate(pipelines))
    note = _overlap_note(profile, costs, overlap, request.schedule)
    clusters = tuple(replace(each, split_reason=each.split_reason + note) for each in clusters)
    return Plan(
        clusters=clusters,
        rings=_rings(profile, clusters),
        batch_size=profile.batch_size,
        update_frequency=request.update_frequency,
        seed=request.seed,
        schedule="async" if costs.training.max_delay else "sync",
        smallest_rows=profile.smallest_rows or 1,
        splittable=profile.smallest_rows is not None,
        row_cuts=profile.row_cuts,
    )


@dataclass(frozen=True)
class _Pool:
    """Model and nodes of a plan."""

    profile: ModelProfile
    nodes: Sequence[NodeConfig]
    machines: Sequence[NodeCapacity]

    def cluster(self, number: int, costs: ModelCosts, pipeline: Pipeline) -> ClusterPlan:
        """Return the cluster of a pipeline of the search."""
        found = self._cluster(number, costs, pipeline)
        if found is None:
            raise AssertionError(f"cluster {number} fitted in the search and does not fit now")
        return found

    def best_order(self, costs: ModelCosts, pipeline: Pipeline) -> Pipeline:
        """Return the order of a pipeline that is best with all measured figures.

        The search does not know delays, which cost time only before the first micro-batch returns, and
        does not care which links were measured. Its slowest stage or link must not become slower.
        """
        index = {self.nodes[i].id: i for i in pipeline}
        others = costs.links.other_orders(list(index))
        orders = [pipeline, *(tuple(index[node] for node in order) for order in others)]
        if len(orders) == 1:
            return pipeline
        slowest = NEARLY * _slowest(self.cluster(0, costs, pipeline))
        clusters = {order: self._cluster(0, costs, order) for order in orders}
        seconds = {
            order: found.seconds
            for order, found in clusters.items()
            if found is not None and _slowest(found) <= slowest
        }
        limit = NEARLY * min(seconds.values())

        def rank(order: Pipeline) -> tuple[int, float]:
            return costs.links.count_unmeasured([self.nodes[i].id for i in order]), seconds[order]

        return min((order for order in seconds if seconds[order] <= limit), key=rank)

    def _cluster(self, number: int, costs: ModelCosts, pipeline: Pipeline) -> ClusterPlan | None:
        nodes, machines = [self.nodes[i] for i in pipeline], [self.machines[i] for i in pipeline]
        return plan_cluster(number, self.profile, costs, nodes, machines)


def _slowest(cluster: ClusterPlan) -> float:
    """Return the time of the slowest stage or link, which the search minimises."""
    return max(max(stage.compute_seconds, stage.link_seconds) for stage in cluster.stages)


def _worth(plan: Plan) -> tuple[int, float]:
    """Return the rank of a plan: fewer one-node clusters, then less time to a given loss."""
    return -sum(len(cluster.stages) == 1 for cluster in plan.clusters), plan.loss_rate


class _Overlap(Enum):
    """Answer to the question whether two batches that can be split should overlap."""

    NO = "no"
    PAYS = "pays"
    TOO_LARGE = "too large"
    """It would pay, and does not fit the RAM."""


def _overlap(
    profile: ModelProfile,
    costs: ModelCosts,
    pipelines: Sequence[Pipeline],
    machines: Sequence[NodeCapacity],
) -> _Overlap:
    """Return whether batches that can be split are better trained with a delay, and fit the RAM so.

    Stages must keep all activations of two batches: to recompute them would take what a delay gains.
    """
    if profile.smallest_rows is None or profile.late_reason or costs.training.share < 1:
        return _Overlap.NO
    clusters, fits = [], True
    delayed = costs.delayed()
    delayed = replace(delayed, training=replace(delayed.training, recompute=False))
    for pipeline in pipelines:
        order = [machines[node] for node in pipeline]
        cuts = best_cuts(delayed, order)
        if cuts is None:
            fits, cuts = False, best_cuts(costs, order)
            assert cuts is not None, f"{pipeline} fitted in the search and does not fit now"
        clusters.append(stage_times(costs, cuts, order))
    if not delay_pays(clusters, profile.batch_size // profile.smallest_rows):
        return _Overlap.NO
    return _Overlap.PAYS if fits else _Overlap.TOO_LARGE


def _overlap_note(
    profile: ModelProfile, costs: ModelCosts, overlap: _Overlap, schedule: ScheduleSetting
) -> str:
    """Say why batches overlap in the pipeline, or why not; empty if that is no question."""
    set_by_user = schedule != "auto"
    if profile.smallest_rows is None:
        cause = profile.late_reason or (f"schedule={schedule!r}" if set_by_user else "RAM is short")
        alone = f"; one batch at a time is in the pipeline, because {cause}"
        return "" if costs.training.max_delay else alone
    if overlap is _Overlap.TOO_LARGE:
        return "; two batches that overlap would be faster, but RAM is short"
    if overlap is _Overlap.PAYS:
        return "; too few to keep the stages busy, so that two batches overlap"
    return f"; two batches overlap, because schedule={schedule!r}" if costs.training.max_delay else ""


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
