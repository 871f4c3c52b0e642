"""Explanation of why no plan exists: the most informative reason, with numbers and remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ravnest.plan.cost import ModelCosts, NodeCapacity, capacities_of
from ravnest.plan.memory import FloatArray, size
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.profile import ModelProfile
from ravnest.plan.search import find_clusters

PROBED_NODES = 8
"""Largest pool for which the search also finds out what would fit."""
FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Multiples of the RAM that are tried to find out what would fit."""
SHOWN_PAIRS = 3
"""Pairs of nodes that a reason names."""
MORE_RAM = "nodes with more RAM or an optimizer with less state"


@dataclass(frozen=True)
class Infeasible:
    """The nodes cannot train the model as requested."""

    reason: str
    """Explanation for the user: what is needed, what the nodes offer, and what helps."""
    needed_bytes: float | None = None
    """Memory that is missing somewhere: of the whole model, a stage or a unit; None if RAM is enough."""
    offered_bytes: float | None = None
    """Memory that the nodes offer for it."""
    cut_off: bool = False
    """True if there would be a plan if all nodes could connect to each other."""


def cut_off(reasons: Sequence[str]) -> Infeasible:
    """Explain that no plan exists because pairs of nodes cannot connect; one sentence for each."""
    more = f"; and {len(reasons) - SHOWN_PAIRS} more pairs" if len(reasons) > SHOWN_PAIRS else ""
    return Infeasible("; ".join(reasons[:SHOWN_PAIRS]) + more, cut_off=True)


def explain_infeasible(
    profile: ModelProfile,
    several: ModelCosts,
    nodes: Sequence[NodeConfig],
    clusters: int | None,
    source: str,
) -> Infeasible:
    """Explain why a search found no plan.

    ``several`` are the costs with several clusters, at the smallest share of a batch.
    """
    machines = capacities_of(nodes)
    costs = several if clusters is not None and clusters > 1 else several.alone()
    return (
        _total_too_small(costs, machines, source)
        or _node_too_small(costs, nodes, clusters)
        or _unit_too_large(costs, profile, machines, source)
        or _too_many_clusters(costs, machines, clusters, source)
        or _no_cut(costs, machines, clusters, source)
    )


def lightest_stage(costs: ModelCosts, nodes: int, clusters: int | None) -> float:
    """Return the least memory of any stage: the last unit as a Leaf, or one unit with two in flight."""
    if costs.units == 1 or nodes in (1, clusters):
        return costs.smallest_total
    singles = _unit_memory(costs, in_flight=2)
    return min(costs.least_memory(costs.units - 1, costs.units, 1), float(singles[:-1].min()))


def _total_too_small(
    costs: ModelCosts, machines: Sequence[NodeCapacity], source: str
) -> Infeasible | None:
    offered = sum(machine.ram for machine in machines)
    if offered >= costs.smallest_total:
        return None
    helps = _without_batch(costs).smallest_total <= offered
    return Infeasible(
        f"the model needs {size(costs.smallest_total)} to train {_batch(costs)};"
        f" {_pool(machines, source)} {size(offered)}. What helps: more nodes,"
        f" {_smaller_batch(helps)}{MORE_RAM}.",
        costs.smallest_total,
        offered,
    )


def _node_too_small(
    costs: ModelCosts, nodes: Sequence[NodeConfig], clusters: int | None
) -> Infeasible | None:
    """Report nodes that cannot hold any stage; a plan must use every node."""
    need = lightest_stage(costs, len(nodes), clusters)
    small = [node for node in nodes if node.ram * 1e9 < need]
    if not small:
        return None
    names = ", ".join(f"node {node.id} ({size(node.ram * 1e9)})" for node in small[:4])
    names += f" and {len(small) - 4} more" if len(small) > 4 else ""
    verb = "is" if len(small) == 1 else "are"
    least = lightest_stage(_without_batch(costs), len(nodes), clusters)
    helps = least <= min(node.ram * 1e9 for node in small)
    return Infeasible(
        f"{names} {verb} too small for any stage: the smallest stage needs {size(need)}"
        f" {_batch(costs)}. What helps: {_smaller_batch(helps)}leaving such nodes out or more RAM.",
        need,
        small[0].ram * 1e9,
    )


def _unit_memory(costs: ModelCosts, in_flight: int) -> FloatArray:
    return np.array([costs.least_memory(unit, unit + 1, in_flight) for unit in range(costs.units)])


def _unit_too_large(
    costs: ModelCosts, profile: ModelProfile, machines: Sequence[NodeCapacity], source: str
) -> Infeasible | None:
    needs = _unit_memory(costs, in_flight=1)
    largest = max(machine.ram for machine in machines)
    if needs.max() <= largest:
        return None
    unit = int(needs.argmax())
    helps = _without_batch(costs).least_memory(unit, unit + 1, 1) <= largest
    tensors = [tensor for tensor in profile.state if unit in tensor.units]
    name = max(tensors, key=lambda tensor: tensor.bytes).name if tensors else ""
    return Infeasible(
        f"unit {unit} of the model{f' (with {name})' if name else ''} cannot be cut further and"
        f" needs {size(float(needs[unit]))} to train {_batch(costs)}; the largest of"
        f" {_counted(machines, source)} has {size(largest)}."
        f"{_sentence(profile.whole_reason)} What helps: {_smaller_batch(helps)}{MORE_RAM}.",
        float(needs[unit]),
        largest,
    )


def _too_many_clusters(
    costs: ModelCosts, machines: Sequence[NodeCapacity], clusters: int | None, source: str
) -> Infeasible | None:
    if clusters is None:
        return None
    possible = _possible_clusters(costs, machines, clusters)
    if possible is None:
        return None
    verb = "cluster fits" if possible == 1 else "clusters fit"
    if possible > clusters:
        longest = -(-len(machines) // clusters)
        return Infeasible(
            f"clusters={clusters} does not fit: a pipeline of {longest} stages needs more memory than"
            f" these nodes have. {possible} {verb}."
        )
    offered = sum(machine.ram for machine in machines)
    return Infeasible(
        f"clusters={clusters} does not fit: each cluster holds the whole model, at least"
        f" {size(costs.smallest_total)} {_batch(costs)}, and {_pool(machines, source)}"
        f" {size(offered)}. {possible} {verb}.",
        clusters * costs.smallest_total,
        offered,
    )


def _possible_clusters(costs: ModelCosts, machines: Sequence[NodeCapacity], clusters: int) -> int | None:
    """Return a number of clusters that fits: the next lower one for a small pool, else any."""
    if len(machines) <= PROBED_NODES:
        for fewer in range(clusters - 1, 0, -1):
            if _fits(costs, machines, fewer):
                return fewer
    found = next(find_clusters(costs, machines, None, seed=0), None)
    return None if found is None else len(found[1])


def _fits(costs: ModelCosts, machines: Sequence[NodeCapacity], clusters: int | None) -> bool:
    return any(True for _ in find_clusters(costs, machines, clusters, seed=0))


def _no_cut(
    costs: ModelCosts, machines: Sequence[NodeCapacity], clusters: int | None, source: str
) -> Infeasible:
    offered = sum(machine.ram for machine in machines)
    factor = _factor_that_fits(costs, machines, clusters)
    enough = f" About {factor:g} times the RAM on each node would be enough." if factor else ""
    kept = "the activations of its " + ("batch" if costs.training.part == 1 else "micro-batches")
    helps = _fits(_without_batch(costs), machines, clusters)
    return Infeasible(
        f"the model needs {size(costs.smallest_total)} to train {_batch(costs)} and"
        f" {_pool(machines, source)} {size(offered)}, but no cut was found that gives every node a"
        f" stage that fits: a stage also keeps {kept}.{enough} What helps: fewer nodes,"
        f" {_smaller_batch(helps)}{MORE_RAM}.",
        None if factor is None else factor * offered,
        offered,
    )


def _factor_that_fits(
    costs: ModelCosts, machines: Sequence[NodeCapacity], clusters: int | None
) -> float | None:
    if len(machines) > PROBED_NODES:
        return None
    for factor in FACTORS:
        larger = [replace(machine, ram=machine.ram * factor) for machine in machines]
        if _fits(costs, larger, clusters):
            return factor
    return None


def _without_batch(costs: ModelCosts) -> ModelCosts:
    """Return the costs of a batch so small that its activations do not count."""
    return replace(costs, training=replace(costs.training, share=0.0, part=0.0))


def _sentence(reason: str) -> str:
    """Return a reason as a sentence that follows another; empty if there is none."""
    return f" {reason[0].upper()}{reason[1:]}." if reason else ""


def _smaller_batch(helps: bool) -> str:
    return "a smaller batch, " if helps else ""


def _batch(costs: ModelCosts) -> str:
    """Name the batch for which memory is planned, and the share of it that is kept."""
    share = costs.training.part if costs.training.recompute else costs.training.share
    kept = f" with the activations of 1/{1 / share:.0f} of it at a time" if 0 < share < 1 else ""
    return f"at batch {costs.batch_size}{kept}"


def _counted(machines: Sequence[NodeCapacity], source: str) -> str:
    """Return the number of nodes in words: nodes of a file, or a server's providers without one."""
    count = len(machines)
    ending = "s" if count > 1 else ""
    return f"the {count} node{ending} of {source}" if source else f"{count} provider{ending}"


def _pool(machines: Sequence[NodeCapacity], source: str) -> str:
    return f"{_counted(machines, source)} offer{'s' if len(machines) == 1 else ''}"
