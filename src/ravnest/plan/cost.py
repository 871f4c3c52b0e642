"""What a cut costs: time and memory of any stage on any machine, time of any link.

Every other module of the planner asks here, one stage at a time (to explain) or a grid of stages at
once (to search).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from ravnest.plan.memory import FloatArray, MemorySettings, StageLoad, StageMemory, stage_memory
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.profile import ModelProfile, TensorProfile
from ravnest.plan.ranges import DistinctBytes, IntArray, RangeMax, RangeSum

NOMINAL_COMPUTE = 50.0
"""GFLOP/s of every node where no node gives a figure: about what a few CPU cores reach. The plan
is the same for any value as long as compute is the bottleneck; predicted times are not."""


@dataclass(frozen=True)
class NodeCapacity:
    """A node as the planner sees it. Equal machines are interchangeable."""

    ram: float
    """Bytes."""
    bandwidth: float
    """Bits a second, each way."""
    flops: float
    """Floating-point operations a second."""


def assumed_compute(nodes: Sequence[NodeConfig]) -> float:
    """GFLOP/s of a node without a figure: the median of those that have one, else nominal."""
    given = [node.compute for node in nodes if node.compute is not None]
    return median(given) if given else NOMINAL_COMPUTE


def capacities_of(nodes: Sequence[NodeConfig]) -> tuple[NodeCapacity, ...]:
    """The nodes in units of the planner."""
    assumed = assumed_compute(nodes)
    return tuple(
        NodeCapacity(
            ram=node.ram * 1e9,
            bandwidth=node.bandwidth * 1e6,
            flops=(assumed if node.compute is None else node.compute) * 1e9,
        )
        for node in nodes
    )


@dataclass(frozen=True)
class ModelCosts:
    """A profile, prepared so that any stage and any cut can be looked up at once.

    Cut ``c`` lies in front of unit ``c``; 0 and ``units`` are the model's own ends.
    """

    units: int
    batch_size: int
    training: MemorySettings
    work: RangeSum
    activations: RangeSum
    gradients: RangeSum
    """Of parameters, each at the last unit that uses it, where backward makes it; none where
    several micro-batches add to the same gradients."""
    backward: RangeMax
    """Of activations up to a unit, its workspace and less the gradients up to it."""
    largest: RangeMax
    state: DistinctBytes
    trainable: DistinctBytes
    incoming: FloatArray
    """For each cut, the bytes that a stage behind it keeps of what comes in."""
    leaving: FloatArray
    """For each cut, the bytes that go forward over it; the model's outputs at the end."""
    returning: FloatArray
    """For each cut, the bytes of gradients that go back over it."""
    link_bytes: FloatArray
    """For each cut, the bytes of the busier direction for one micro-batch."""

    @classmethod
    def of(cls, profile: ModelProfile, update_frequency: int = 1, averaging: float = 0.0) -> ModelCosts:
        """Prepare a profile; ``averaging`` as in ``MemorySettings``."""
        units = profile.units
        leaving = np.array([0, *(unit.crossing_bytes for unit in units)], dtype=np.float64)
        returning = np.array([0, *(unit.gradient_bytes for unit in units)], dtype=np.float64)
        incoming = np.array([profile.input_bytes, *(unit.held_bytes for unit in units)], np.float64)
        leaving[-1] = returning[-1] = 0
        tied = _tied_bytes(profile) / update_frequency
        link_bytes = np.maximum(leaving, returning) + tied
        leaving[-1] = profile.output_bytes
        activations = RangeSum.of([unit.activation_bytes for unit in units])
        trained = [tensor for tensor in profile.state if tensor.trainable]
        fresh = trained if update_frequency == 1 else []
        gradients = RangeSum.of(_by_last_unit(fresh, len(units)))
        workspace = np.array([unit.workspace_bytes for unit in units], dtype=np.float64)
        return cls(
            units=len(units),
            batch_size=profile.batch_size,
            training=MemorySettings(
                update_frequency,
                profile.optimizer_bytes_per_parameter_byte,
                profile.update_copies,
                averaging,
            ),
            work=RangeSum.of([unit.work for unit in units]),
            activations=activations,
            gradients=gradients,
            backward=RangeMax.of(workspace + (activations.prefix - gradients.prefix)[1:]),
            largest=RangeMax.of(_largest(trained, len(units))),
            state=DistinctBytes.of(profile.state, len(units)),
            trainable=DistinctBytes.of(trained, len(units)),
            incoming=incoming,
            leaving=leaving,
            returning=returning,
            link_bytes=link_bytes,
        )

    def alone(self) -> ModelCosts:
        """The same for a cluster that has none to average with."""
        return replace(self, training=replace(self.training, averaging=0.0))

    def load_grid(self, starts: IntArray, stops: IntArray) -> StageLoad[FloatArray]:
        """Load of each start (row) with each stop (column); both ascend."""
        shape = (len(starts), len(stops))
        returning = self.returning[starts][:, None] + self.returning[stops][None, :]
        before = (self.activations.prefix - self.gradients.prefix)[starts][:, None]
        return StageLoad(
            state=self.state.grid(starts, stops),
            trainable=self.trainable.grid(starts, stops),
            largest=self.largest.grid(starts, stops),
            activations=self.activations.grid(starts, stops),
            incoming=np.broadcast_to(self.incoming[starts][:, None], shape),
            transfer=self.leaving[stops][None, :] + returning,
            backward=self.backward.grid(starts, stops) - before,
        )

    def memory_grid(self, starts: IntArray, stops: IntArray, in_flight: int) -> FloatArray:
        """Bytes of each stage; infinite where a start is not before its stop."""
        total = stage_memory(self.load_grid(starts, stops), in_flight, self.training).total
        total[starts[:, None] >= stops[None, :]] = np.inf
        return total

    def inner_memory_grid(self, starts: IntArray, stops: IntArray, in_flight: int) -> FloatArray:
        """The same without what enters and leaves: no more, and it only grows with the stage."""
        load = self.load_grid(starts, stops)
        nothing = np.zeros((1, 1))
        load = replace(load, incoming=nothing, transfer=nothing)
        return stage_memory(load, in_flight, self.training).total

    def memory(self, start: int, stop: int, in_flight: int) -> StageMemory[float]:
        """Memory of one stage, by purpose."""
        grid = self.load_grid(np.array([start]), np.array([stop]))
        load = StageLoad(
            state=float(grid.state[0, 0]),
            trainable=float(grid.trainable[0, 0]),
            largest=float(grid.largest[0, 0]),
            activations=float(grid.activations[0, 0]),
            incoming=float(grid.incoming[0, 0]),
            transfer=float(grid.transfer[0, 0]),
            backward=float(grid.backward[0, 0]),
        )
        return stage_memory(load, in_flight, self.training)

    def compute_seconds(self, start: int, stop: int, machine: NodeCapacity) -> float:
        """Forward and backward of one micro-batch through a stage."""
        return float(self.work.prefix[stop] - self.work.prefix[start]) / machine.flops

    def link_seconds(self, cut: int, one: NodeCapacity, other: NodeCapacity) -> float:
        """One micro-batch over a cut: both directions at once, at the slower machine's rate."""
        return float(self.link_bytes[cut]) * link_seconds_per_byte(one, other)

    @property
    def smallest_total(self) -> float:
        """Bytes that no cluster can do without: the whole model as a single stage."""
        return self.memory(0, self.units, in_flight=1).total


def link_seconds_per_byte(one: NodeCapacity, other: NodeCapacity) -> float:
    """Links are full duplex and as fast as the slower end."""
    return 8 / min(one.bandwidth, other.bandwidth)


def _by_last_unit(tensors: Sequence[TensorProfile], units: int) -> list[float]:
    """Bytes of the tensors whose last use is in each unit."""
    found = [0.0] * units
    for tensor in tensors:
        found[tensor.units[-1]] += tensor.bytes
    return found


def _largest(tensors: Sequence[TensorProfile], units: int) -> list[float]:
    """Bytes of the largest tensor that each unit uses."""
    found = [0.0] * units
    for tensor in tensors:
        for unit in tensor.units:
            found[unit] = max(found[unit], tensor.bytes)
    return found


def _tied_bytes(profile: ModelProfile) -> FloatArray:
    """For each cut, bytes of the trained tensors that units on both sides of it share.

    Once an update their gradients go back over it to the owner and their new value comes forward.
    """
    change = np.zeros(len(profile.units) + 2)
    for tensor in profile.state:
        if tensor.trainable and len(tensor.units) > 1:
            change[tensor.units[0] + 1] += tensor.bytes
            change[tensor.units[-1] + 1] -= tensor.bytes
    return np.cumsum(change)[:-1]
