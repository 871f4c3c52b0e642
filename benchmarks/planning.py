"""Quality of the planner's plans, and planning time.

Quality is measured against brute force (all groupings x all orders x all cuts), which shares only the
cost formulas with the planner. Run as a script to print the report.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ravnest.plan.cost import ModelCosts, NodeCapacity, capacities_of
from ravnest.plan.cuts import best_cuts
from ravnest.plan.infeasible import Infeasible
from ravnest.plan.links import UNMEASURED, LinkFigures, MeasuredLink
from ravnest.plan.memory import MemoryRange, averaging_copies, slowdown
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
    """Random model and pool."""

    profile: ModelProfile
    nodes: tuple[NodeConfig, ...]
    update_frequency: int
    links: LinkFigures = UNMEASURED


@dataclass(frozen=True)
class Outcome:
    """Rates of the planner and of the genetic search alone, relative to the optimum."""

    planned: float
    genetic: float
    tight: bool
    """True if more RAM would allow a faster plan."""


def random_profile(rng: random.Random, units: int, *, tied: bool) -> ModelProfile:
    """Return a model of units with very unequal costs; with ``tied``, some units share tensors."""
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
                sent_bytes=crossing,
                passing_bytes=rng.randint(0, 100) * 10_000,
                deferred_bytes=rng.randint(0, 300) * 10_000,
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
    """Return unequal nodes whose RAM is ``need`` times a number in the range ``ram``."""
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
    """Return a pool of ``count`` nodes; in half of the cases their RAM is scarce."""
    profile = random_profile(rng, rng.randint(5, 11), tied=rng.random() < 0.4)
    update_frequency = rng.choice((1, 1, 2, 4))
    need = ModelCosts.of(profile, update_frequency, averaging_copies()).smallest_total
    ram = (0.3, 1.6) if rng.random() < 0.5 else (1.5, 6.0)
    return Case(profile, random_nodes(rng, count, need, ram), update_frequency)


def with_links(rng: random.Random, case: Case) -> Case:
    """Return the case with measured links: about half of the pairs, and some that cannot connect."""
    pairs, failing = {}, {}
    for pair in itertools.combinations((node.id for node in case.nodes), 2):
        draw = rng.random()
        if draw < 0.5:
            pairs[pair] = MeasuredLink(round(10 ** rng.uniform(0.5, 3), 1), 0.01)
        elif draw < 0.6:
            failing[pair] = f"{pair} cannot connect"
    return replace(case, links=LinkFigures(pairs, failing))


# Brute force.


def optima(case: Case) -> dict[int, tuple[int, float]]:
    """Return the most samples per second of all plans, by number of clusters; empty if no plan fits.

    The first number is minus that of one-node clusters, which are avoided whatever the rate.
    """
    costs = _costs(case)
    machines = capacities_of(case.nodes, case.links)
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
    best: dict[int, tuple[int, float]] = {}
    for grouping in _partitions(list(range(len(machines)))):
        if all(cluster in rates for cluster in grouping):
            singles = sum(len(cluster) == 1 for cluster in grouping)
            value = (-singles, sum(rates[cluster] for cluster in grouping))
            best[len(grouping)] = max(best.get(len(grouping), value), value)
    return best


def _costs(case: Case) -> ModelCosts:
    """Return the best rate of several clusters."""
    costs = ModelCosts.of(case.profile, case.update_frequency, averaging_copies())
    return replace(costs, links=case.links)


class _Tables:
    """Work and memory of every possible stage, and all cuts into a number of stages."""

    def __init__(self, costs: ModelCosts, longest: int) -> None:
        units = costs.units
        self.link_bytes = costs.link_bytes
        self.links = costs.links
        self.work = np.zeros((units + 1, units + 1))
        self.training = costs.training
        self.least = np.full((longest + 1, units + 1, units + 1), np.inf)
        self.most = self.least.copy()
        for start, stop in itertools.combinations(range(units + 1), 2):
            self.work[start, stop] = costs.compute_seconds(start, stop, NodeCapacity(1, 1, 1))
            for in_flight in range(1, longest + 1):
                needs = costs.memory_grid(np.array([start]), np.array([stop]), in_flight)
                self.least[in_flight, start, stop] = needs.least[0, 0]
                self.most[in_flight, start, stop] = needs.most[0, 0]
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
            behind = len(order) - k
            needs = MemoryRange(self.least[behind, start, stop], self.most[behind, start, stop])
            factor = slowdown(needs, machine.ram, behind, self.training)
            slowest = np.maximum(slowest, self.work[start, stop] / machine.flops * factor)
            if k:
                slowest = np.maximum(slowest, self._link(start, order[k - 1], machine))
        return float(slowest.min())

    def _link(self, cut: np.ndarray, one: NodeCapacity, other: NodeCapacity) -> np.ndarray:
        rate = min(one.bandwidth, other.bandwidth)
        if one.node is not None and other.node is not None:
            pair = (min(one.node, other.node), max(one.node, other.node))
            if pair in self.links.failing:
                return np.full(len(cut), np.inf)
            if pair in self.links.pairs:
                rate = self.links.pairs[pair].rate * 1e6
        return self.link_bytes[cut] * 8 / rate


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
    """Compare the planner with brute force; None if both find that nothing fits."""
    best = optima(case)
    options = {"update_frequency": case.update_frequency, "links": case.links}
    plan = make_plan(case.profile, case.nodes, **options)
    if isinstance(plan, Infeasible):
        if best:
            raise AssertionError(f"brute force finds a plan, but {plan.reason}")
        return None
    if not best:
        raise AssertionError("the planner found a plan where brute force found none")
    roomy = [replace(node, ram=1000.0) for node in case.nodes]
    larger = make_plan(case.profile, roomy, **options)
    assert isinstance(larger, Plan)
    return Outcome(
        planned=rate(plan) / best[len(plan.clusters)][1],
        genetic=_genetic_rate(case) / max(best.values())[1],
        tight=rate(larger) > 1.001 * rate(plan),
    )


def rate(plan: Plan) -> float:
    """Return the samples per second of the slowest stages and links, which the search maximises."""
    return sum(
        plan.batch_size / max(max(s.compute_seconds, s.link_seconds) for s in cluster.stages)
        for cluster in plan.clusters
    )


def _genetic_rate(case: Case) -> float:
    """Return the best rate of the genetic search in a pool that the planner searches exhaustively."""
    machines = capacities_of(case.nodes, case.links)
    found = find_clusters(_costs(case), machines, None, seed=0, exact_nodes=0)
    rates = [_rate(costs, machines, pipelines) for costs, pipelines in found]
    return max(rates)[1] if rates else 0.0


def _rate(
    costs: ModelCosts, machines: Sequence[NodeCapacity], pipelines: Sequence[Sequence[int]]
) -> tuple[int, float]:
    """Return minus the number of one-node clusters, and samples per second."""
    cuts = [best_cuts(costs, [machines[node] for node in pipeline]) for pipeline in pipelines]
    total = sum(costs.batch_size / cut.seconds for cut in cuts if cut is not None)
    return -sum(len(pipeline) == 1 for pipeline in pipelines), total


def outcomes(seed: int, sizes: Sequence[int], *, measured: bool = False) -> list[Outcome]:
    """Return one outcome per size, of random cases that have a plan; ``measured``: with links."""
    rng = random.Random(seed)
    result = []
    for size in sizes:
        found = None
        while found is None:
            case = random_case(rng, size)
            found = outcome(with_links(rng, case) if measured else case)
        result.append(found)
    return result


def quality() -> str:
    """Return the table of rates relative to the optimum."""
    lines = [
        "| pools | nodes | RAM is the limit | planner: mean | min | genetic search alone: mean | min |",
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
    """Return the row for pools too large for brute force: the genetic search and the exhaustive one."""
    rng = random.Random(11)
    shares: list[float] = []
    while len(shares) < COMPLETE_POOLS:
        profile = random_profile(rng, rng.randint(20, 60), tied=rng.random() < 0.4)
        need = ModelCosts.of(profile, 4, averaging_copies()).smallest_total
        ram = (0.3, 1.6) if len(shares) % 2 else (1.5, 6.0)
        case = Case(profile, random_nodes(rng, EXACT_NODES, need, ram), 4)
        machines = capacities_of(case.nodes)
        found = find_clusters(_costs(case), machines, None, seed=0)
        rates = [_rate(costs, machines, pipelines) for costs, pipelines in found]
        if rates:
            shares.append(_genetic_rate(case) / max(rates)[1])
    figures = " | ".join(_mean_and_min(shares))
    return f"| {len(shares)} | {EXACT_NODES} | {len(shares) // 2} | exhaustive search | | {figures} |"


def _mean_and_min(shares: Sequence[float]) -> tuple[str, str]:
    return f"{100 * statistics.mean(shares):.2f}%", f"{100 * min(shares):.2f}%"


@dataclass(frozen=True)
class Setting:
    """Bottleneck of a large pool."""

    name: str
    ram: tuple[float, float]
    """RAM of a node relative to what the model needs."""
    bandwidth: float
    """Factor on the bandwidths, for a model of 3,000 units."""


SETTINGS = (
    Setting("compute", (1.5, 6.0), 2.0),
    Setting("links", (1.5, 6.0), 0.01),
    Setting("RAM", (0.1, 0.6), 2.0),
    Setting("RAM and links", (0.1, 0.6), 0.01),
)


def growth() -> str:
    """Return the table of planning times, and of rates relative to the compute bound."""
    lines = [
        "| units | bottleneck | nodes | clusters | longest | CPU seconds | relative to 10 nodes |"
        " relative to the compute bound |",
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
    """Return the plan for a random pool, its planning time, and its share of the compute bound."""
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
    assert isinstance(plan, Plan)
    work = sum(unit.work for unit in profile.units)
    bound = profile.batch_size * sum(machine.flops for machine in capacities_of(nodes)) / work
    return plan, seconds, rate(plan) / bound


def measure() -> str:
    """Return the report as Markdown."""
    return f"""### Share of the optimum

Predicted samples/s of the plan, relative to the best plan with the same number of clusters that brute
force finds among all groupings, orders and cuts; of the genetic search, relative to the best with any
number. Models of 5 to 11 units, some with tied tensors; unequal nodes. Pools of up to
{EXACT_NODES} nodes are searched exhaustively, larger ones with the genetic search; the last columns show
the genetic search on the small pools.

{quality()}

### Time

One thread, random models and pools, RAM of 1.5 to 6 times the model's memory, or 0.1 to 0.6 times.
The compute bound is the rate if no node ever waits.

{growth()}
"""


if __name__ == "__main__":
    print(measure())
