"""How good the planner's plans are, and how long it takes.

Quality is measured against brute force (all groupings x all orders x all cuts), which shares
nothing with the planner but the cost formulas. Run as a script it prints its report.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ravnest.errors import PlanError
from ravnest.plan.cost import ModelCosts, NodeCapacity, capacities_of
from ravnest.plan.cuts import best_cuts
from ravnest.plan.memory import averaging_copies
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.plan import Plan
from ravnest.plan.planner import make_plan
from ravnest.plan.profile import ModelProfile, TensorProfile, UnitCost
from ravnest.plan.search import EXACT_NODES, find_clusters
from ravnest.types import Address

POOLS = 200
LARGER_POOLS = 3
COMPLETE_POOLS = 20
GROWTH_NODES = (10, 50, 200)
GROWTH_UNITS = (500, 3000)


@dataclass(frozen=True)
class Case:
    """A model and a pool, drawn at random."""

    profile: ModelProfile
    nodes: tuple[NodeConfig, ...]
    update_frequency: int


@dataclass(frozen=True)
class Outcome:
    """The planner's rate, and the genetic search's alone, as shares of the optimum."""

    planned: float
    genetic: float
    tight: bool
    """More clusters would be better, but RAM forbids it."""


def random_profile(rng: random.Random, units: int, *, tied: bool) -> ModelProfile:
    """Units of very unequal cost; with ``tied``, some tensors are used in several units."""
    state = [
        TensorProfile(f"layer{u}.weight", rng.randint(1, 400) * 10_000, rng.random() < 0.9, True, (u,))
        for u in range(units)
    ]
    for number in range(rng.randint(1, 3) if tied else 0):
        users = tuple(sorted(rng.sample(range(units), min(units, rng.randint(2, 3)))))
        state.append(TensorProfile(f"tied{number}", rng.randint(1, 400) * 10_000, True, True, users))
    return ModelProfile(
        units=tuple(
            UnitCost(
                work=rng.uniform(0.1, 3) * 1e9,
                activation_bytes=rng.randint(1, 300) * 10_000,
                workspace_bytes=rng.randint(0, 100) * 10_000,
                crossing_bytes=(crossing := rng.randint(1, 200) * 10_000),
                gradient_bytes=rng.choice((0, crossing, crossing)),
                held_bytes=crossing,
            )
            for _ in range(units)
        ),
        state=tuple(state),
        batch_size=32,
        input_bytes=400_000,
        optimizer_bytes_per_parameter_byte=rng.choice((0.0, 1.0, 2.0)),
    )


def random_nodes(
    rng: random.Random,
    count: int,
    need: float,
    ram: tuple[float, float],
    speeds: Sequence[float] = (3.0, 30.0, 300.0),
) -> tuple[NodeConfig, ...]:
    """Unequal nodes whose RAM is ``need`` times a number in the range ``ram``."""
    speed = rng.choice(speeds)
    mute = rng.random() < 0.15
    return tuple(
        NodeConfig(
            id=number,
            address=Address("10.0.0.1", 8000 + number),
            ram=need * rng.uniform(*ram) / 1e9,
            bandwidth=round(10 ** rng.uniform(0.8, 3), 1),
            compute=None if mute or rng.random() < 0.1 else round(speed * rng.uniform(0.3, 3), 2),
        )
        for number in range(count)
    )


def random_case(rng: random.Random, count: int) -> Case:
    """A pool of ``count`` nodes; in half of the cases their RAM is tight."""
    profile = random_profile(rng, rng.randint(5, 11), tied=rng.random() < 0.4)
    update_frequency = rng.choice((1, 1, 2, 4))
    need = ModelCosts.of(profile, update_frequency, averaging_copies()).smallest_total
    ram = (0.3, 1.6) if rng.random() < 0.5 else (1.5, 6.0)
    return Case(profile, random_nodes(rng, count, need, ram), update_frequency)


# Brute force.


def optimum(case: Case) -> float | None:
    """Most samples a second of all plans; None where no plan fits."""
    costs = _costs(case)
    machines = capacities_of(case.nodes)
    tables = _Tables(costs, len(machines))
    alone = _Tables(costs.alone(), len(machines))
    rates: dict[frozenset[int], float] = {}
    for length in range(1, min(len(machines), costs.units) + 1):
        here = alone if length == len(machines) else tables
        for order in itertools.permutations(range(len(machines)), length):
            seconds = here.seconds([machines[node] for node in order])
            if np.isfinite(seconds):
                key = frozenset(order)
                rates[key] = max(rates.get(key, 0.0), costs.batch_size / seconds)
    best: tuple[int, float] | None = None
    for grouping in _partitions(list(range(len(machines)))):
        if all(cluster in rates for cluster in grouping):
            singles = sum(len(cluster) == 1 for cluster in grouping)
            value = (-singles, sum(rates[cluster] for cluster in grouping))
            best = value if best is None else max(best, value)
    return None if best is None else best[1]


def _costs(case: Case) -> ModelCosts:
    """Of several clusters."""
    return ModelCosts.of(case.profile, case.update_frequency, averaging_copies())


class _Tables:
    """Work and memory of every possible stage, and every way to cut into so many stages."""

    def __init__(self, costs: ModelCosts, longest: int) -> None:
        units = costs.units
        self.link_bytes = costs.link_bytes
        self.work = np.zeros((units + 1, units + 1))
        self.memory = np.full((longest + 1, units + 1, units + 1), np.inf)
        for start, stop in itertools.combinations(range(units + 1), 2):
            self.work[start, stop] = costs.compute_seconds(start, stop, NodeCapacity(1, 1, 1))
            for in_flight in range(1, longest + 1):
                self.memory[in_flight, start, stop] = costs.memory(start, stop, in_flight).total
        self.bounds = {
            length: np.array(
                [(0, *inner, units) for inner in itertools.combinations(range(1, units), length - 1)]
            )
            for length in range(1, min(longest, units) + 1)
        }

    def seconds(self, order: Sequence[NodeCapacity]) -> float:
        bounds = self.bounds[len(order)]
        slowest = np.zeros(len(bounds))
        for k, machine in enumerate(order):
            start, stop = bounds[:, k], bounds[:, k + 1]
            slowest = np.maximum(slowest, self.work[start, stop] / machine.flops)
            slowest[self.memory[len(order) - k, start, stop] > machine.ram] = np.inf
            if k:
                rate = min(machine.bandwidth, order[k - 1].bandwidth) / 8
                slowest = np.maximum(slowest, self.link_bytes[start] / rate)
        return float(slowest.min())


def _partitions(items: list[int]) -> Iterator[list[frozenset[int]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for count in range(len(rest) + 1):
        for others in itertools.combinations(rest, count):
            left = [item for item in rest if item not in others]
            for grouping in _partitions(left):
                yield [frozenset((first, *others)), *grouping]


# Measurements.


def outcome(case: Case) -> Outcome | None:
    """The planner against brute force; None where both find that nothing fits."""
    best = optimum(case)
    try:
        plan = make_plan(case.profile, case.nodes, update_frequency=case.update_frequency)
    except PlanError:
        if best is not None:
            raise
        return None
    if best is None:
        raise AssertionError("the planner fits a model that brute force does not")
    roomy = [replace(node, ram=1000.0) for node in case.nodes]
    larger = make_plan(case.profile, roomy, update_frequency=case.update_frequency)
    return Outcome(
        planned=plan.samples_per_second / best,
        genetic=_genetic_rate(case) / best,
        tight=larger.samples_per_second > 1.001 * plan.samples_per_second,
    )


def _genetic_rate(case: Case) -> float:
    """What the genetic search reaches where the planner would search completely."""
    machines = capacities_of(case.nodes)
    found = find_clusters(_costs(case), machines, None, seed=0, exact_nodes=0)
    if found is None:
        return 0.0
    costs, pipelines = found
    cuts = [best_cuts(costs, [machines[node] for node in pipeline]) for pipeline in pipelines]
    return sum(costs.batch_size / cut.seconds for cut in cuts if cut is not None)


def outcomes(seed: int, sizes: Sequence[int]) -> list[Outcome]:
    """One outcome for each size, of random cases that have a plan."""
    rng = random.Random(seed)
    result = []
    for size in sizes:
        found = None
        while found is None:
            found = outcome(random_case(rng, size))
        result.append(found)
    return result


def quality() -> str:
    """Table of the planner's share of the optimum."""
    lines = [
        "| pools | nodes | RAM binds | planner: mean | min | genetic search alone: mean | min |",
        "|---|---|---|---|---|---|---|",
    ]
    small = [2 + index % 5 for index in range(POOLS)]
    for name, sizes in (("2 to 6", small), ("8", [8] * LARGER_POOLS)):
        found = outcomes(7, sizes)
        figures = [
            *_mean_and_min([o.planned for o in found]),
            *_mean_and_min([o.genetic for o in found]),
        ]
        tight = sum(o.tight for o in found)
        lines.append(f"| {len(found)} | {name} | {tight} | {' | '.join(figures)} |")
    lines.append(_genetic_line())
    return "\n".join(lines)


def _genetic_line() -> str:
    """Too many nodes for brute force: the genetic search against the planner's complete one."""
    rng = random.Random(11)
    shares: list[float] = []
    while len(shares) < COMPLETE_POOLS:
        profile = random_profile(rng, rng.randint(20, 60), tied=rng.random() < 0.4)
        need = ModelCosts.of(profile, 4, averaging_copies()).smallest_total
        ram = (0.3, 1.6) if len(shares) % 2 else (1.5, 6.0)
        case = Case(profile, random_nodes(rng, EXACT_NODES, need, ram), 4)
        try:
            plan = make_plan(case.profile, case.nodes, update_frequency=case.update_frequency)
        except PlanError:
            continue
        shares.append(_genetic_rate(case) / plan.samples_per_second)
    figures = " | ".join(_mean_and_min(shares))
    return f"| {len(shares)} | {EXACT_NODES} | {len(shares) // 2} | complete search | | {figures} |"


def _mean_and_min(shares: Sequence[float]) -> tuple[str, str]:
    return f"{100 * statistics.mean(shares):.2f}%", f"{100 * min(shares):.2f}%"


@dataclass(frozen=True)
class Setting:
    """What binds a large pool."""

    name: str
    ram: tuple[float, float]
    """RAM of a node as a share of what the model needs."""
    bandwidth: float
    """Factor on the bandwidths, for a model of 3,000 units."""


SETTINGS = (
    Setting("compute", (1.5, 6.0), 2.0),
    Setting("links", (1.5, 6.0), 0.01),
    Setting("RAM", (0.1, 0.6), 2.0),
    Setting("RAM and links", (0.1, 0.6), 0.01),
)


def growth() -> str:
    """Table of planning time, and of the rate against what the nodes' compute could do at best."""
    lines = [
        "| units | what binds | nodes | clusters | longest | CPU seconds | times 10 nodes |"
        " of the compute bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for units, setting in itertools.product(GROWTH_UNITS, SETTINGS):
        first: float | None = None
        for count in GROWTH_NODES:
            plan, seconds, share = _timed(units, setting, count)
            first = first or seconds
            longest = max(len(cluster.stages) for cluster in plan.clusters)
            lines.append(
                f"| {units} | {setting.name} | {count} | {len(plan.clusters)} | {longest} |"
                f" {seconds:.1f} | {seconds / first:.1f} | {100 * share:.0f}% |"
            )
    return "\n".join(lines)


def _timed(units: int, setting: Setting, count: int) -> tuple[Plan, float, float]:
    """The plan for a random pool, the seconds it took, and its share of the compute bound."""
    rng = random.Random(count + units)
    profile = random_profile(rng, units, tied=True)
    need = ModelCosts.of(profile, 4, averaging_copies()).smallest_total
    factor = setting.bandwidth * 3000 / units
    nodes = [
        replace(node, bandwidth=node.bandwidth * factor)
        for node in random_nodes(rng, count, need, setting.ram, speeds=(300.0,))
    ]
    begin = time.process_time()
    plan = make_plan(profile, nodes, update_frequency=4)
    seconds = time.process_time() - begin
    work = sum(unit.work for unit in profile.units)
    bound = profile.batch_size * sum(machine.flops for machine in capacities_of(nodes)) / work
    return plan, seconds, plan.samples_per_second / bound


def measure() -> str:
    """The whole report in Markdown."""
    return f"""### Share of the optimum

Predicted samples/s of the plan over that of the best plan there is, found by brute force: all
groupings, orders and cuts. Models of 5 to 11 units, some with tied tensors, unequal nodes. Pools of up
to {EXACT_NODES} nodes are searched completely, larger ones genetically; the last columns show what the
genetic search reaches on the small ones too.

{quality()}

### Time

One thread, random models and pools, RAM from 1.5 to 6 times what the model needs or 0.1 to 0.6 times.
The compute bound is the rate if no node ever waited.

{growth()}
"""


if __name__ == "__main__":
    print(measure())
