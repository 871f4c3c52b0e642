"""What clusters that average are worth, and what averaging costs.

Run as a script it prints its report; arguments choose parts.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from averaged_nodes import Taken
from contenders import Seat
from pipeline import Team
from workloads import DIGITS, free_addresses

REPETITIONS = int(os.environ.get("RAVNEST_BENCH_REPETITIONS", "9"))
SECONDS = float(os.environ.get("RAVNEST_BENCH_SECONDS", "4"))
NEVER = 10**9
_NODE = Path(__file__).with_name("averaged_nodes.py")

# What averaging takes from training

EPOCH = 11
"""Updates of an epoch in each of the demo's two clusters."""
FACTORS = {NEVER: "never", EPOCH: "once an epoch (11 updates)", 5: "every 5 updates"}


class Clusters:
    """Two clusters of processes that average every so many updates."""

    def __init__(self, teams: Sequence[Team]) -> None:
        self._teams = teams

    def run(self) -> list[Taken]:
        """Train for a while; what each Root measured."""
        for team in self._teams:
            team.order(SECONDS)
        return [Taken(**team.answer()) for team in self._teams]

    def close(self) -> None:
        """Let all end: in the last round they wait for each other."""
        for team in self._teams:
            team.dismiss()
        for team in self._teams:
            team.close()


@contextmanager
def clusters_of(nodes: int, reduce_factor: int) -> Iterator[Clusters]:
    """Two clusters of so many nodes each."""
    with tempfile.TemporaryDirectory() as scratch:
        names = DIGITS.form_clusters(Path(scratch), free_addresses(2 * nodes), 2)
        seats = [
            [Seat(DIGITS.name, scratch, name, reduce_factor=reduce_factor) for name in cluster]
            for cluster in names
        ]
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
    found: dict[int, list[list[Taken]]] = {factor: [] for factor in FACTORS}
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


def _cost_row(nodes: int, factor: int, runs: list[list[Taken]], without: list[list[Taken]]) -> str:
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
        f"processes of one thread on loopback, {REPETITIONS} runs of {SECONDS:.0f} s in turns. The aim "
        "is at most 2%. Stopped is the share of its time that the thread that computes spends on "
        "averages; CPU is that of the Roots' processes for a sample. More processes than cores make "
        "the rate uncertain; its ratio is the median of neighbours, with the middle half of them.",
        "",
        "| nodes | averages | rounds/s | samples/s | against never | middle half | CPU | stopped |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    return "\n".join([*lines, *_cost_rows(1), *_cost_rows(2)])


PARTS = {"cost": _cost}


def measure(parts: Sequence[str] = tuple(PARTS)) -> str:
    """The report, as Markdown."""
    torch.set_num_threads(1)
    return "\n\n".join(PARTS[part]() for part in parts)


if __name__ == "__main__":
    print(measure(sys.argv[1:] or tuple(PARTS)))
