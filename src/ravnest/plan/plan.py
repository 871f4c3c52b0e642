"""The plan: the units of each node, with predicted memory and time, and the rings between clusters."""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.plan.cluster_cost import samples_factor
from ravnest.plan.links import MeasuredLink
from ravnest.plan.memory import StageMemory
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.profile import RowCut
from ravnest.plan.rings import Ring
from ravnest.plan.schedule_choice import DELAY_COST
from ravnest.types import Role, Schedule

TIGHT = 2 / 3
"""Share of a node's RAM from which its planned memory counts as tight."""


@dataclass(frozen=True)
class StagePlan:
    """One stage on its node."""

    node: NodeConfig
    cluster: int
    index: int
    """Position in the pipeline; the Root is 0."""
    role: Role
    start: int
    stop: int
    """The stage holds the units ``start`` to ``stop - 1``."""
    memory: StageMemory[float]
    """Predicted memory."""
    compute_seconds: float
    """Predicted time of forward and backward for one batch."""
    link_seconds: float
    """Predicted time of one batch on the link to the next stage; 0 for the last stage."""
    kept: int | None = None
    """Most micro-batches whose activations the node keeps at once; the others are recomputed. None: all
    in flight."""
    defers: bool = True
    """Weight gradients may be computed after the gradients of the inputs are sent; False if RAM is too
    short for what that keeps."""
    link: MeasuredLink | None = None
    """Measured figures of the link to the next stage; None if it was not measured."""

    @property
    def tight(self) -> bool:
        """True if the planned memory is most of what the node has."""
        return bool(self.memory.total > TIGHT * self.node.ram * 1e9)


@dataclass(frozen=True)
class ClusterPlan:
    """One pipeline that holds the whole model."""

    id: int
    stages: tuple[StagePlan, ...]
    """In pipeline order, Root first."""
    seconds: float
    """Predicted time between batches."""
    samples_per_second: float
    """Predicted rate."""
    bottleneck: str
    """Description of the slowest stage or link."""
    microbatches: int
    """Micro-batches per batch."""
    microbatch_rows: int | None
    """Samples in a micro-batch; None: batches are never split."""
    split_reason: str
    """Why batches are split like this, or not split."""
    in_flight: int
    """Most micro-batches in flight; the memory of the stages is planned for it."""
    largest_rows: int
    """Samples in a micro-batch at most; the memory of the stages is planned for it."""
    delay_fits: bool = False
    """Two whole batches and two versions of the weights fit the memory of the stages."""
    loss_chunks: int = 1
    """Chunks of positions in which the last stage computes logits and loss; 1: as a whole."""


@dataclass(frozen=True)
class Plan:
    """Clusters, stages and rings for one model and one pool of nodes."""

    clusters: tuple[ClusterPlan, ...]
    """By ascending id. Cluster 0 has node 0; each next cluster has the lowest remaining node."""
    rings: tuple[Ring, ...]
    batch_size: int
    update_frequency: int
    seed: int
    schedule: Schedule
    """Schedule for ``schedule="auto"``."""
    smallest_rows: int
    """Samples that a micro-batch must have."""
    splittable: bool = True
    """True if a batch can be split without a change of the result."""
    row_cuts: tuple[RowCut, ...] = ()
    """Tensors that are cut along their rows, because no plan exists otherwise."""

    @property
    def samples_per_second(self) -> float:
        """Predicted rate of all clusters together."""
        return sum(cluster.samples_per_second for cluster in self.clusters)

    @property
    def loss_rate(self) -> float:
        """Predicted rate, divided by the samples that it takes for a given loss.

        Relative to the samples of one process: clusters and late gradients need more. Whole batches are
        trained with late gradients wherever they fit the memory, so that this is no difference there.
        """
        late = self.splittable and self.schedule == "async"
        needed = samples_factor(len(self.clusters)) * (DELAY_COST if late else 1.0)
        return self.samples_per_second / needed

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of each cluster in pipeline order, Root first."""
        return tuple(tuple(s.node.id for s in cluster.stages) for cluster in self.clusters)

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """All stages by ascending node id."""
        stages = (stage for cluster in self.clusters for stage in cluster.stages)
        return tuple(sorted(stages, key=lambda stage: stage.node.id))

    def stage_of(self, node_id: int) -> StagePlan:
        """Return the node's stage; ``KeyError`` if the plan does not have the node."""
        for cluster in self.clusters:
            for stage in cluster.stages:
                if stage.node.id == node_id:
                    return stage
        raise KeyError(f"the plan has no node {node_id}")

    def previous(self, node_id: int) -> StagePlan | None:
        """Return the stage that sends activations to this node; None for a Root."""
        return self._neighbour(node_id, -1)

    def next(self, node_id: int) -> StagePlan | None:
        """Return the stage that receives this node's activations; None for the last of its cluster."""
        return self._neighbour(node_id, 1)

    def rings_of(self, node_id: int) -> tuple[Ring, ...]:
        """Return the rings that the node is a member of."""
        return tuple(ring for ring in self.rings if ring.member(node_id) is not None)

    def _neighbour(self, node_id: int, step: int) -> StagePlan | None:
        stage = self.stage_of(node_id)
        stages = self.clusters[stage.cluster].stages
        index = stage.index + step
        return stages[index] if 0 <= index < len(stages) else None
