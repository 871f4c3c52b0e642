"""The plan: the units of each node, with predicted memory and time, and the rings between clusters."""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.plan.memory import StageMemory
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.rings import Ring
from ravnest.types import Role, Schedule


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
    """Samples in a micro-batch; None: batches are not split."""
    split_reason: str
    """Why batches are split like this, or not split."""
    in_flight: int
    """Most micro-batches in flight; the memory of the stages is planned for it."""
    delay_fits: bool = False
    """Two whole batches and two versions of the weights fit the memory of the stages."""


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

    @property
    def samples_per_second(self) -> float:
        """Predicted rate of all clusters together."""
        return sum(cluster.samples_per_second for cluster in self.clusters)

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
