"""Cost model: time and memory of any stage on any machine, time of any link.

All other modules of the planner use it, for one stage at a time (to explain a plan) or for a grid of
stages at once (to search).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import median

import numpy as np

from ravnest.plan.links import UNMEASURED, LinkFigures, measured_bandwidth
from ravnest.plan.memory import (
    FloatArray,
    MemoryRange,
    MemorySettings,
    StageLoad,
    StageMemory,
    kept_batches,
    memory_range,
    slowdown,
    stage_memory,
)
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.profile import ModelProfile, TensorProfile
from ravnest.plan.ranges import DistinctBytes, IntArray, RangeMax, RangeSum

NOMINAL_COMPUTE = 50.0
"""GFLOP/s assumed for every node if no node states its compute: about what a few CPU cores reach.
While compute is the bottleneck the plan does not depend on this value; the predicted times do."""


@dataclass(frozen=True)
class NodeCapacity:
    """A node's RAM, bandwidth and speed, in the planner's units; called a machine in the search.

    Machines with equal capacities are interchangeable.
    """

    ram: float
    """Bytes."""
    bandwidth: float
    """Bits per second, in each direction."""
    flops: float
    """Floating-point operations per second."""
    node: int | None = None
    """Id of a node with measured links, which no other machine can replace; None for all others."""


def assumed_compute(nodes: Sequence[NodeConfig]) -> float:
    """Return the GFLOP/s assumed for nodes that do not state it: the others' median, or a constant."""
    given = [node.compute for node in nodes if node.compute is not None]
    return median(given) if given else NOMINAL_COMPUTE


def capacities_of(
    nodes: Sequence[NodeConfig], links: LinkFigures = UNMEASURED
) -> tuple[NodeCapacity, ...]:
    """Return the capacities of the nodes; measured links replace the bandwidth that they state."""
    assumed = assumed_compute(nodes)
    bandwidth = measured_bandwidth({node.id: node.bandwidth for node in nodes}, links)
    return tuple(
        NodeCapacity(
            ram=node.ram * 1e9,
            bandwidth=bandwidth[node.id] * 1e6,
            flops=(assumed if node.compute is None else node.compute) * 1e9,
            node=node.id if node.id in links.nodes else None,
        )
        for node in nodes
    )


@dataclass(frozen=True)
class ModelCosts:
    """A model profile, prepared for constant-time queries about any stage and any cut.

    Cut ``c`` lies in front of unit ``c``; 0 and ``units`` are the model's ends.
    """

    units: int
    batch_size: int
    training: MemorySettings
    work: RangeSum
    activations: RangeSum
    gradients: RangeSum
    """Bytes of parameter gradients, at the last unit that uses the parameter, where backward creates
    them; zero if several micro-batches accumulate into the same gradients."""
    backward: RangeMax
    """Bytes of the activations up to a unit plus its workspace, minus the gradients up to it."""
    deferred: RangeSum
    """Bytes that deferred weight gradients keep."""
    deferring: RangeMax
    """``backward`` minus the deferred bytes up to the unit."""
    largest: RangeMax
    """Bytes of the largest trained tensor that each unit uses, or its temporaries if they are more."""
    owned: RangeSum
    """Bytes of trained tensors, at the first unit that uses them."""
    largest_owned: RangeMax
    """Bytes of the largest trained tensor whose first use is in each unit."""
    state: DistinctBytes
    trainable: DistinctBytes
    incoming: FloatArray
    """For each cut, the bytes of its inputs that the stage behind it keeps."""
    leaving: FloatArray
    """For each cut, the bytes that the stage in front of it keeps because they are sent."""
    crossing: FloatArray
    """For each cut, the bytes of activations that cross it, or the model's inputs; 0 behind the last
    unit."""
    returning: FloatArray
    """For each cut, the bytes of gradients that cross it in backward."""
    shared: FloatArray
    """For each start and stop of a stage, the bytes of tied weights, or of their gradients, that it has
    at once besides its own."""
    link_bytes: FloatArray
    """For each cut, the bytes per batch in the direction with more traffic."""
    links: LinkFigures = UNMEASURED
    """Measured links of the pool."""

    @classmethod
    def of(
        cls,
        profile: ModelProfile,
        update_frequency: int = 1,
        averaging: float = 0.0,
        share: float = 1.0,
        part: float = 1.0,
        *,
        max_delay: int | None = None,
        recompute: bool = True,
    ) -> ModelCosts:
        """Prepare a profile; the other arguments are those of ``MemorySettings``.

        Without ``max_delay``, a batch that cannot be split is trained with a delay of one update, if
        gradients may be late.
        """
        units = profile.units
        crossing = np.array([0, *(unit.crossing_bytes for unit in units)], dtype=np.float64)
        leaving = np.array([0, *(unit.sent_bytes for unit in units)], dtype=np.float64)
        returning = np.array([0, *(unit.gradient_bytes for unit in units)], dtype=np.float64)
        incoming = np.array([profile.input_bytes, *(unit.held_bytes for unit in units)], np.float64)
        crossing[0] = max(profile.example_bytes, profile.input_bytes)
        crossing[-1] = returning[-1] = leaving[-1] = 0
        tied = _tied_bytes(profile)
        link_bytes = np.maximum(crossing, returning) + tied / update_frequency
        link_bytes[[0, -1]] = 0
        activations = RangeSum.of([unit.activation_bytes for unit in units])
        trained = [tensor for tensor in profile.state if tensor.trainable]
        splits, sync = profile.smallest_rows is not None, bool(profile.late_reason)
        accumulates = splits or update_frequency > 1
        gradients = RangeSum.of(_by_last_unit([] if accumulates else trained, len(units)))
        workspace = [unit.passing_bytes if accumulates else unit.workspace_bytes for unit in units]
        workspace[-1] = max(workspace[-1], profile.loss_bytes)
        moments = np.array(workspace, np.float64) + (activations.prefix - gradients.prefix)[1:]
        deferred = RangeSum.of([unit.deferred_bytes for unit in units])
        return cls(
            units=len(units),
            batch_size=profile.batch_size,
            training=MemorySettings(
                profile.optimizer_bytes_per_parameter_byte,
                profile.update_copies,
                averaging,
                max_delay=int(not splits and not sync) if max_delay is None else max_delay,
                share=share,
                part=part,
                accumulates=accumulates,
                recompute=recompute,
            ),
            work=RangeSum.of([unit.work for unit in units]),
            activations=activations,
            gradients=gradients,
            backward=RangeMax.of(moments),
            deferred=deferred,
            deferring=RangeMax.of(moments - deferred.prefix[1:]),
            largest=RangeMax.of(
                np.maximum(_largest(trained, len(units)), [unit.fixed_bytes for unit in units])
            ),
            owned=RangeSum.of(_by_first_unit(trained, len(units))),
            largest_owned=RangeMax.of(_largest(trained, len(units), first=True)),
            state=DistinctBytes.of(profile.state, len(units)),
            trainable=DistinctBytes.of(trained, len(units)),
            incoming=incoming,
            leaving=leaving,
            crossing=crossing,
            returning=returning,
            shared=_arriving_bytes(profile),
            link_bytes=link_bytes,
        )

    def alone(self) -> ModelCosts:
        """Return the costs for a single cluster, which does not average."""
        return replace(self, training=replace(self.training, averaging=0.0))

    def delayed(self) -> ModelCosts:
        """Return the costs if gradients may be one update late."""
        return replace(self, training=replace(self.training, max_delay=1))

    def load_grid(self, starts: IntArray, stops: IntArray) -> StageLoad[FloatArray]:
        """Return the load of each start (row) with each stop (column); both are ascending."""
        shape = (len(starts), len(stops))
        returning = self.returning[starts][:, None] + self.returning[stops][None, :]
        before = (self.activations.prefix - self.gradients.prefix)[starts][:, None]
        behind = self.deferred.prefix[stops][None, :]
        root = starts[:, None] == 0
        backward = np.where(
            root, self.backward.grid(starts, stops), self.deferring.grid(starts, stops) + behind
        )
        return StageLoad(
            state=self.state.grid(starts, stops),
            trainable=self.trainable.grid(starts, stops),
            owned=self.owned.grid(starts, stops),
            largest=self.largest.grid(starts, stops),
            largest_owned=self.largest_owned.grid(starts, stops),
            activations=self.activations.grid(starts, stops),
            deferred=np.where(root, 0.0, self.deferred.grid(starts, stops)),
            incoming=np.broadcast_to(self.incoming[starts][:, None], shape),
            inputs=np.broadcast_to(self.crossing[starts][:, None], shape),
            leaving=np.broadcast_to(self.leaving[stops][None, :], shape),
            outputs=np.broadcast_to(self.crossing[stops][None, :], shape),
            returning=returning,
            sent_back=np.broadcast_to(self.returning[starts][:, None], shape),
            shared=self.shared[np.ix_(starts, stops)],
            backward=backward - before,
            undeferred=self.backward.grid(starts, stops) - before,
        )

    def memory_grid(self, starts: IntArray, stops: IntArray, behind: int) -> MemoryRange[FloatArray]:
        """Return the bytes of each stage; infinite where the start is not before the stop."""
        found = memory_range(self.load_grid(starts, stops), behind, self.training)
        for total in (found.least, found.most):
            total[starts[:, None] >= stops[None, :]] = np.inf
        return found

    def seconds_grid(
        self, work: FloatArray, needs: MemoryRange[FloatArray], machine: NodeCapacity, behind: int
    ) -> FloatArray:
        """Return the times of stages with the recomputation that the machine's RAM makes necessary.

        Infinite for stages that do not fit.
        """
        factor = slowdown(needs, machine.ram, behind, self.training)
        fits = np.isfinite(factor)
        seconds: FloatArray = np.where(fits, work / machine.flops * np.where(fits, factor, 1), np.inf)
        return seconds

    def inner_memory_grid(self, starts: IntArray, stops: IntArray, behind: int) -> FloatArray:
        """Return a lower bound of the memory that grows with the stage.

        It leaves out inputs and outputs, and deferred weight gradients, which a Root does not have.
        """
        load = self.load_grid(starts, stops)
        nothing = np.zeros((1, 1))
        load = replace(
            load,
            incoming=nothing,
            inputs=nothing,
            leaving=nothing,
            outputs=nothing,
            returning=nothing,
            sent_back=nothing,
            shared=nothing,
            deferred=nothing,
            backward=load.undeferred,
        )
        return memory_range(load, behind, self.training).least

    def load(self, start: int, stop: int) -> StageLoad[float]:
        """Return the load of one stage."""
        grid = self.load_grid(np.array([start]), np.array([stop]))
        return StageLoad(**{each.name: float(getattr(grid, each.name)[0, 0]) for each in fields(grid)})

    def memory(
        self, start: int, stop: int, behind: int, kept: float | None = None, *, defers: bool = True
    ) -> StageMemory[float]:
        """Return the memory of one stage, by purpose; the arguments are those of ``stage_memory``."""
        return stage_memory(self.load(start, stop), behind, self.training, kept, defers=defers)

    def defers(self, start: int, stop: int, behind: int, ram: float) -> bool:
        """Return whether a stage may defer weight gradients; not if that makes it fit ``ram``."""
        several = self.training.part < self.training.in_flight(behind)
        return several or bool(self.memory(start, stop, behind).total <= ram)

    def least_memory(self, start: int, stop: int, behind: int) -> float:
        """Return the bytes of one stage that recomputes, or does not defer, all that it can."""
        return memory_range(self.load(start, stop), behind, self.training).least

    def kept_batches(self, start: int, stop: int, behind: int, ram: float) -> float:
        """Return the batches whose activations a stage keeps at once within ``ram``."""
        needs = memory_range(self.load(start, stop), behind, self.training)
        return kept_batches(needs, ram, behind, self.training)

    def compute_seconds(self, start: int, stop: int, machine: NodeCapacity) -> float:
        """Return the time of forward and backward of one batch through a stage that keeps all."""
        return float(self.work.prefix[stop] - self.work.prefix[start]) / machine.flops

    def stage_seconds(self, start: int, stop: int, machine: NodeCapacity, behind: int) -> float:
        """Return the time of one batch with the recomputation that the machine's RAM makes necessary."""
        starts, stops = np.array([start]), np.array([stop])
        needs = self.memory_grid(starts, stops, behind)
        return float(self.seconds_grid(self.work.grid(starts, stops), needs, machine, behind)[0, 0])

    def link_seconds(self, cut: int, one: NodeCapacity, other: NodeCapacity) -> float:
        """Return the time of one batch over a cut: both directions at once, at the slower rate."""
        return float(self.link_grid(np.array([cut]), one, other)[0])

    def link_grid(self, cuts: IntArray, one: NodeCapacity, other: NodeCapacity) -> FloatArray:
        """Return the time of one batch over each cut; infinite if the machines cannot connect."""
        if one.node is not None and other.node is not None and self.links.fails(one.node, other.node):
            return np.full(len(cuts), np.inf)
        return self.link_bytes[cuts] * (8 / self._link_rate(one, other))

    def link_delay(self, one: NodeCapacity, other: NodeCapacity) -> float | None:
        """Return the delay of a link; None if too little was measured."""
        if one.node is None or other.node is None:
            return None
        return self.links.delay(one.node, other.node)

    def _link_rate(self, one: NodeCapacity, other: NodeCapacity) -> float:
        """Return the bits/s of a link: the measured ones, or those of its slower end."""
        if one.node is not None and other.node is not None:
            measured = self.links.link(one.node, other.node)
            if measured is not None:
                return measured.rate * 1e6
            limit = self.links.relay_limit(one.node, other.node)
            if limit is not None:
                return min(one.bandwidth, other.bandwidth, limit * 1e6)
        return min(one.bandwidth, other.bandwidth)

    @property
    def smallest_total(self) -> float:
        """Least bytes that any cluster needs: the whole model as a single stage."""
        return self.least_memory(0, self.units, behind=1)


def _by_first_unit(tensors: Sequence[TensorProfile], units: int) -> list[float]:
    """Return, for each unit, the bytes of the tensors whose first use is there."""
    found = [0.0] * units
    for tensor in tensors:
        found[tensor.units[0]] += tensor.bytes
    return found


def _by_last_unit(tensors: Sequence[TensorProfile], units: int) -> list[float]:
    """Return, for each unit, the bytes of the tensors whose last use is there."""
    found = [0.0] * units
    for tensor in tensors:
        found[tensor.units[-1]] += tensor.bytes
    return found


def _largest(tensors: Sequence[TensorProfile], units: int, *, first: bool = False) -> list[float]:
    """Return, for each unit, the bytes of the largest tensor that it uses, or uses first."""
    found = [0.0] * units
    for tensor in tensors:
        for unit in tensor.units[:1] if first else tensor.units:
            found[unit] = max(found[unit], tensor.bytes)
    return found


def _tied_bytes(profile: ModelProfile) -> FloatArray:
    """Return, for each cut, the bytes of trained tensors that units on both sides share.

    Once per update their gradients go back to the owner and their new value comes forward.
    """
    change = np.zeros(len(profile.units) + 2)
    for tensor in profile.state:
        if tensor.trainable and len(tensor.units) > 1:
            change[tensor.units[0] + 1] += tensor.bytes
            change[tensor.units[-1] + 1] -= tensor.bytes
    return np.cumsum(change)[:-1]


def _arriving_bytes(profile: ModelProfile) -> FloatArray:
    """Return, for each start and stop of a stage, the bytes of tied weights that arrive at once.

    A stage keeps the gradients that later stages send for its own weights. Weights and gradients of
    other stages pass through it one after the other: one arrives while another one leaves.
    """
    size = len(profile.units) + 1
    tied = [tensor for tensor in profile.state if tensor.trainable and len(tensor.units) > 1]
    if not tied:
        return np.broadcast_to(np.zeros(1), (size, size))
    kept, largest, second = np.zeros((3, size, size))
    for tensor in tied:
        before = np.searchsorted(tensor.units, np.arange(size))  # uses in front of each cut
        starts, stops = before[:, None], before[None, :]
        later = stops < len(tensor.units)
        kept += tensor.bytes * ((starts < stops) & later)
        passing = tensor.bytes * ((starts == stops) & (starts > 0) & later)
        second = np.maximum(second, np.minimum(largest, passing))
        largest = np.maximum(largest, passing)
    return kept + largest + second
