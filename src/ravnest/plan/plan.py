"""The plan: the units of each node, with predicted memory and time, and the rings between clusters."""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.plan.memory import StageMemory, older_versions
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.rings import Ring
from ravnest.types import Role


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
    in_flight: int
    """Most micro-batches whose forward pass is done and whose backward pass is not."""
    memory: StageMemory[float]
    """Predicted memory."""
    compute_seconds: float
    """Predicted time of forward and backward for one micro-batch."""
    link_seconds: float
    """Predicted time of one micro-batch on the link to the next stage; 0 for the last stage."""


@dataclass(frozen=True)
class ClusterPlan:
    """One pipeline that holds the whole model."""

    id: int
    stages: tuple[StagePlan, ...]
    """In pipeline order, Root first."""
    seconds: float
    """Predicted time between micro-batches: the time of the slowest stage or link."""
    samples_per_second: float
    """Predicted rate."""
    bottleneck: str
    """Description of the slowest stage or link."""

    def in_flight_limit(self, update_frequency: int) -> int:
        """Return the most micro-batches in flight that fit every node's memory; the Leaf has one."""
        return min((_most_in_flight(stage, update_frequency) for stage in self.stages[:-1]), default=1)


@dataclass(frozen=True)
class Plan:
    """Clusters, stages and rings for one model and one pool of nodes."""

    clusters: tuple[ClusterPlan, ...]
    """By ascending id. Cluster 0 has node 0; each next cluster has the lowest remaining node."""
    rings: tuple[Ring, ...]
    batch_size: int
    update_frequency: int
    seed: int

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


def _most_in_flight(stage: StagePlan, update_frequency: int) -> int:
    """Return the number of micro-batches in flight that fit the stage's memory."""
    versions = max(older_versions(stage.in_flight, update_frequency), 1)
    each = stage.memory.activations / stage.in_flight
    each += stage.memory.versions / versions / update_frequency
    spare = stage.node.ram * 1e9 - stage.memory.total
    return stage.in_flight + int(max(spare, 0.0) // max(each, 1.0))
