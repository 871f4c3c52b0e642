"""Value of several clusters that average, and the cost of averaging.

The value is measured for `sync` clusters with blocking rounds, each with its share of the data: in one
process, as plain training of one model per cluster (`replicas.py`), which is compared with real
clusters. The costs are measured with real nodes: processes on loopback that train in `async` with
background rounds, or, for bytes, threads over the in-memory network. Run as a script to print the
report; arguments choose parts (`worth`, `cost`, `memory`, `bytes`).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import local_clusters
import torch
from averaged_nodes import EPOCH, Taken
from contenders import Seat
from pipeline import Team
from replicas import DIGITS as DIGITS_CNN
from replicas import SORTING, Lesson, Replicas, learn
from torch import nn
from torch.utils.data import TensorDataset
from workloads import DIGITS, SLIM_MLP, WIDE_MLP, Workload, free_addresses

REPETITIONS = int(os.environ.get("RAVNEST_BENCH_REPETITIONS", "9"))
SECONDS = float(os.environ.get("RAVNEST_BENCH_SECONDS", "4"))
NEVER = 10**9
MEMORY_RUNS = 3
_NODE = Path(__file__).with_name("averaged_nodes.py")

# Value of several clusters

RATE = 1e-3
"""Learning rate of a single cluster."""
REDUCE_FACTOR = 5
UPDATES = {DIGITS_CNN: 1008, SORTING: 2400}
"""Epochs of the single cluster."""
SEEDS = int(os.environ.get("RAVNEST_BENCH_SEEDS", "3"))
LENGTHS = (0.75, 1.0, 1.25, 1.5, 2.0)
"""Lengths of the training of k clusters, as multiples of the epochs of the single cluster."""
CHECKED = 20
"""Updates after which real clusters are compared."""


@dataclass(frozen=True)
class Result:
    """Result of a training."""

    updates: int
    """Updates of each cluster."""
    loss: float
    """Held-out loss; median over the seeds."""


def result_of(lesson: Lesson, clusters: int, updates: int, rate: float) -> Result:
    """Train with warm-up and decay."""
    losses = [
        learn(
            lesson,
            clusters,
            seed,
            rates=_rates(rate, updates),
            reduce_factor=REDUCE_FACTOR,
            every=updates,
        )[-1]
        for seed in range(SEEDS)
    ]
    print(lesson.name, clusters, updates, rate, losses, file=sys.stderr, flush=True)
    return Result(updates, statistics.median(losses))


def _rates(peak: float, updates: int) -> list[float]:
    """Return the learning rates: warm-up over a tenth of the updates, then a cosine to 0."""
    return [
        peak * min(1.0, 10 * (i + 1) / updates) * 0.5 * (1 + math.cos(math.pi * i / updates))
        for i in range(updates)
    ]


def _until(loss: float, lesson: Lesson, clusters: int) -> list[Result]:
    """Train clusters longer and longer, until a training reaches the loss."""
    found: list[Result] = []
    for length in LENGTHS:
        updates = round(length * UPDATES[lesson] / clusters)
        found.append(result_of(lesson, clusters, updates, clusters * RATE))
        if found[-1].loss <= loss:
            break
    return found


def _updates_to(loss: float, found: Sequence[Result]) -> float:
    """Interpolate between the last training that misses the loss and the first that reaches it."""
    if found[-1].loss > loss:
        return math.inf
    if len(found) == 1:
        return found[0].updates
    before, after = found[-2:]
    part = math.log(before.loss / loss) / math.log(before.loss / after.loss)
    return before.updates + part * (after.updates - before.updates)


def _worth_rows(lesson: Lesson) -> list[str]:
    single = result_of(lesson, 1, UPDATES[lesson], RATE)
    rows = [f"| {lesson.name} | 1 | 1 | {single.updates} | {single.loss:.4f} | 1 |"]
    for clusters in (2, 4):
        found = _until(single.loss, lesson, clusters)
        share = _updates_to(single.loss, found) / single.updates
        for run in found:
            reached = f"**{share:.2f}**" if run is found[-1] else ""
            rows.append(f"| | {clusters} | {clusters} | {run.updates} | {run.loss:.4f} | {reached} |")
    for factor in (2, 4):
        alone = result_of(lesson, 1, UPDATES[lesson], factor * RATE)
        rows.append(f"| | 1 | {factor} | {alone.updates} | {alone.loss:.4f} | |")
    return rows


def difference(lesson: Lesson, clusters: int, nodes: int) -> float:
    """Return the largest difference between the parameters of real clusters and replicas."""
    train_set, _ = lesson.data(0)
    data = TensorDataset(*train_set[: CHECKED * lesson.batch * clusters])
    plain = replace(lesson, make=lambda: _without_dropout(lesson.make()), data=lambda _: (data, data))
    replicas = Replicas(plain, clusters, 0, RATE)
    for update in range(1, CHECKED + 1):
        replicas.update()
        if update % REDUCE_FACTOR == 0:
            replicas.average()
    settings = {"optimizer_params": {"lr": RATE}, "reduce_factor": REDUCE_FACTOR}
    trained = local_clusters.train(plain, data, (clusters, nodes), **settings)
    names = [name for name, _ in replicas.models[0].named_parameters()]
    expected = replicas.models[0].state_dict()
    return max(float((s[n] - expected[n]).abs().max()) for s in trained.states for n in names)


def _without_dropout(model: nn.Module) -> nn.Module:
    """Disable dropout: nodes draw their own random numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _worth() -> str:
    off = max(difference(lesson, 2, 2) for lesson in UPDATES)
    same = f"within {off:.0e} of the replicas'" if off else "bitwise equal to those of the replicas"
    lines = [
        "Updates that each of k clusters with shards needs to reach the loss of one cluster. AdamW, "
        f"batches of {DIGITS_CNN.batch}, learning rates with warm-up and decay over the length of each "
        f"training; their peak is {RATE} times the number of clusters. Averages every {REDUCE_FACTOR} "
        f"updates. Held-out loss of the averaged model, median of {SEEDS} seeds; the share is "
        "interpolated between the trainings around it. The targets are about 1/2 and 1/4. The last rows "
        "show a single cluster with the same rates. Parameters of real clusters (2 + 2 nodes) "
        f"are {same} after {CHECKED} updates.",
        "",
        "| | clusters | rate | updates per cluster | loss | share of the updates (below 1 is fewer) |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    return "\n".join([*lines, *(row for lesson in UPDATES for row in _worth_rows(lesson))])


# Cost of averaging in training time

FACTORS = {NEVER: "never", None: "default (once per epoch, at most every 2 s)", 5: "every 5 updates"}


class Clusters:
    """Two clusters of processes that average at a given interval."""

    def __init__(self, teams: Sequence[Team]) -> None:
        self._teams = teams

    def run(self) -> list[Taken]:
        """Train for a while; return the measurements of each Root."""
        for team in self._teams:
            team.order(SECONDS)
        return [Taken(**team.answer()) for team in self._teams]

    def close(self) -> None:
        """End all processes together: in the last round they wait for each other."""
        for team in self._teams:
            team.dismiss()
        for team in self._teams:
            team.close()


@contextmanager
def clusters_of(
    nodes: int, reduce_factor: int | None, work: Workload = DIGITS, compression: bool | str = False
) -> Iterator[Clusters]:
    """Start two clusters with this many nodes each."""
    with tempfile.TemporaryDirectory() as scratch:
        names = work.form_clusters(Path(scratch), free_addresses(2 * nodes), 2)
        settings: dict[str, Any] = {
            "schedule": "async",
            "reduce_factor": reduce_factor,
            "compression": compression,
        }
        seats = [[Seat(work.name, scratch, name, **settings) for name in cluster] for cluster in names]
        commands = [
            [[sys.executable, str(_NODE), json.dumps(asdict(seat))] for seat in cluster]
            for cluster in seats
        ]
        clusters = Clusters([Team(each) for each in commands])
        try:
            yield clusters
        finally:
            clusters.close()


def _cost_rows(nodes: int) -> list[str]:
    found: dict[int | None, list[list[Taken]]] = {factor: [] for factor in FACTORS}
    with ExitStack() as stack:
        running = {f: stack.enter_context(clusters_of(nodes, f)) for f in FACTORS}
        for each in running.values():
            each.run()  # to warm up
        for repetition in range(REPETITIONS):
            order = list(FACTORS)
            for factor in order[repetition % 3 :] + order[: repetition % 3]:
                found[factor].append(running[factor].run())
            shown = (f"{sum(t.samples for t in runs[-1]):.0f}" for runs in found.values())
            print(nodes, *shown, file=sys.stderr, flush=True)
    return [_cost_row(nodes, factor, found[factor], found[NEVER]) for factor in FACTORS]


def _cost_row(
    nodes: int, factor: int | None, runs: list[list[Taken]], without: list[list[Taken]]
) -> str:
    rates = [sum(t.samples for t in run) for run in runs]
    ratios = sorted(
        rate / sum(t.samples for t in other) for rate, other in zip(rates, without, strict=True)
    )
    cpu = statistics.median(
        sum(t.cpu for t in run) / sum(t.cpu for t in other)
        for run, other in zip(runs, without, strict=True)
    )
    stopped = statistics.median(statistics.fmean(t.stopped for t in run) for run in runs)
    rounds = statistics.median(max(t.rounds for t in run) / run[0].seconds for run in runs)
    cells = [f"{nodes} + {nodes}", FACTORS[factor], f"{rounds:.1f}", f"{statistics.median(rates):.0f}"]
    if factor == NEVER:
        return f"| {' | '.join(cells)} | 1 | | 1 | |"
    quarter = len(ratios) // 4
    return (
        f"| {' | '.join(cells)} | **{statistics.median(ratios):.3f}** | {ratios[quarter]:.3f} to "
        f"{ratios[-1 - quarter]:.3f} | {cpu:.3f} | **{stopped:.2%}** |"
    )


def _cost() -> str:
    lines = [
        "Training time that background averaging takes: the digits CNN in two clusters, all nodes "
        f"processes of one thread on loopback, epochs of {EPOCH} updates, {REPETITIONS} runs of "
        f"{SECONDS:.0f} s in turns. The target "
        "is at most 2%. Stopped is the share of its time that the worker thread spends on averaging; "
        "CPU is the time of the Roots' processes per sample. With more processes than cores the rate "
        "is uncertain; its ratio is the median of neighbouring runs, with their middle half.",
        "",
        "| nodes | averages | rounds/s | samples/s | relative to none | middle half | CPU | stopped |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    return "\n".join([*lines, *_cost_rows(1), *_cost_rows(2)])


# Memory of rounds


def _peak(clusters: Clusters) -> int:
    """Return the peak memory of the processes of both clusters, after some rounds."""
    return max(taken.peak for _ in range(MEMORY_RUNS) for taken in clusters.run())


def _memory() -> str:
    lines = [
        "The most memory of a node's process with averages every 2 updates, less that without, against "
        "its weights: two clusters of a node each. Plans count 2 and, compressed, 4 times the weights.",
        "",
        "| model | weights, MB | compression | more, MB | of the weights |",
        "|---|--:|---|--:|--:|",
    ]
    for work, compression in itertools.product((SLIM_MLP, WIDE_MLP), (False, "int8")):
        with clusters_of(1, NEVER, work, compression) as clusters:
            without = _peak(clusters)
        with clusters_of(1, 2, work, compression) as clusters:
            more = _peak(clusters) - without
        size = sum(weight.nbytes for weight in work.model().parameters())
        lines.append(
            f"| {work.name} | {size / 1e6:.0f} | {compression or 'none'} | {more / 1e6:.0f} | "
            f"**{more / size:.1f}** |"
        )
    return "\n".join(lines)


# Bytes that a node sends


def _bytes() -> str:
    train_set, _ = DIGITS_CNN.data(0)
    data = TensorDataset(*train_set[: 8 * 2 * DIGITS_CNN.batch])
    state = DIGITS_CNN.first(0).state_dict().values()
    size = sum(tensor.nbytes for tensor in state if tensor.is_floating_point())
    lines = [
        "Bytes that a node sends in a round, against those that it averages: the digits CNN, a node "
        "a cluster. A ring of m members takes 2 (m - 1) / m, whatever their number.",
        "",
        "| clusters | bytes sent in a round by each node | of its parameters | 2 (m - 1) / m |",
        "|--:|--:|--:|--:|",
    ]
    for clusters in (2, 4, 8):
        settings = {"optimizer_params": {"lr": RATE}, "reduce_factor": 1}
        rounds = local_clusters.train(DIGITS_CNN, data, (clusters, 1), **settings).rounds
        sent = rounds["sent_bytes"] / rounds["averaged"] / clusters
        lines.append(
            f"| {clusters} | {sent:.0f} | **{sent / size:.3f}** | {2 * (clusters - 1) / clusters:.3f} |"
        )
    return "\n".join(lines)


PARTS = {"worth": _worth, "cost": _cost, "memory": _memory, "bytes": _bytes}


def measure(parts: Sequence[str] = tuple(PARTS)) -> str:
    """Return the report as Markdown."""
    torch.set_num_threads(1)
    return "\n\n".join(PARTS[part]() for part in parts)


if __name__ == "__main__":
    print(measure(sys.argv[1:] or tuple(PARTS)))
