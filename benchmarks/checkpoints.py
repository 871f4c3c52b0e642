"""Cost of checkpoints: throughput, pause, memory and traffic.

Pipelines of three processes on loopback, with one thread each, train the same model with AdamW: one
without checkpoints, one with the default settings (a checkpoint per minute), and one with as many
checkpoints as the nodes allow themselves. They take turns; the numbers are medians of ratios of
neighbouring runs. The machine has fewer cores than processes, so that everything that happens in the
background (digests, replicas, their reception) costs throughput too. The cost of one checkpoint follows
from the runs with many; at the default rate there is one per minute. It is shown as time by which
training is longer, and as processor time of all three processes, which depends less on what else runs
on the machine; the share of it at one per minute is that of all cores. "Pause" is the time for which a
stage stops, "memory" the largest resident memory of a node without that of files, and its difference
from the same node without checkpoints. The last table shows the bytes that are sent for a replica if the
optimizer changes only half of the parameters. On slow links, replicas share each machine's link with
activations and gradients: "longest gap" is the longest time between two updates, "replica" the time in
which the slowest stage sends one. In a long run on slow links, the time that a checkpoint costs is that
by which the updates beside it took longer than as many others just before and after it. Run as a script
to print the report; arguments choose tables (`loopback`, `links`, `long`) and models by the beginnings
of their names.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

import psutil
from checkpoint_nodes import FROZEN, Counted, Stored
from contenders import Seat
from lan import Lan, possible
from pipeline import MEGABITS, PORT, Team
from workloads import MEDIUM_GPT, MLP, Workload, free_addresses

STAGES = 3
REPETITIONS = int(os.environ.get("RAVNEST_BENCH_REPETITIONS", "7"))
SECONDS = float(os.environ.get("RAVNEST_BENCH_SECONDS", "15"))
GOAL = 0.02
RARE, OFTEN = 1.0, 0.5 / 60
"""Minutes between checkpoints: by default, and as often as their cost allows."""
SETTLING = 2.0
"""Seconds after a run in which its last checkpoint is stored, before the next one begins."""
LINK_REPETITIONS = int(os.environ.get("RAVNEST_BENCH_LINK_REPETITIONS", "3"))
LINK_SECONDS = float(os.environ.get("RAVNEST_BENCH_LINK_SECONDS", "75"))
"""Longer than the time between two checkpoints."""
LINK_SETTLING = 12.0
"""The same as ``SETTLING`` on slow links."""
LONG_SECONDS = float(os.environ.get("RAVNEST_BENCH_LONG_SECONDS", "1200"))
"""Several times as long as the time between two checkpoints on slow links."""
NEIGHBOURS = 60
"""Updates before and after a checkpoint with which those beside it are compared."""
SAMPLED = 0.05
_NODE = Path(__file__).with_name("checkpoint_nodes.py")


@dataclass(frozen=True)
class Run:
    """One run of a team."""

    rate: float
    """Samples per second."""
    checkpoints: int
    samples: float
    """Samples, from the beginning to the end of the run."""
    cpu: float
    """Processor time of all processes in the run."""
    gap: float
    """Longest time between two updates."""


class Measured(Team):
    """Processes of one team, with the largest memory of each."""

    def __init__(self, seats: Sequence[Seat], lan: Lan | None = None) -> None:
        """``lan``: the machines on which the processes run; None: all on this one."""
        command = [sys.executable, str(_NODE)]
        places = [[] if lan is None else lan.inside(place) for place in range(len(seats))]
        super().__init__(
            [
                [*place, *command, json.dumps(asdict(seat))]
                for place, seat in zip(places, seats, strict=True)
            ]
        )
        self.memory = [0 for _ in seats]

    def measure(self, seconds: float, settling: float = SETTLING) -> Run:
        """Train for this long, and watch the memory."""
        over = threading.Event()
        watching = threading.Thread(target=self._watch, args=(over,))
        watching.start()
        before = self._cpu()
        try:
            self.order(seconds)
            found = Stored(**self.answer())
        finally:
            over.set()
            watching.join()
        time.sleep(settling)
        return Run(found.samples, found.checkpoints, found.trained, self._cpu() - before, found.gap)

    def _cpu(self) -> float:
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return sum(each.user + each.system for each in times)

    def _watch(self, over: threading.Event) -> None:
        processes = [psutil.Process(pid) for pid in self.pids]
        while not over.wait(SAMPLED):
            for place, process in enumerate(processes):
                memory = process.memory_info()
                self.memory[place] = max(self.memory[place], memory.rss - memory.shared)


@dataclass(frozen=True)
class Result:
    """Runs of one model."""

    work: Workload
    without: list[Run]
    rare: list[Run]
    often: list[Run]
    counted: list[Counted]
    """Checkpoints of the team with many, by stage."""
    memory: list[tuple[int, int]]
    """Largest memory of each stage without checkpoints and with many."""

    @property
    def seconds(self) -> float:
        """Seconds of training that a checkpoint costs: the median over pairs of runs."""
        return statistics.median(
            (1 - b.rate / a.rate) * SECONDS / b.checkpoints for a, b in self._pairs()
        )

    @property
    def cpu(self) -> float:
        """Processor time of a checkpoint at all nodes together: the median over pairs of runs."""
        return statistics.median(
            (b.cpu - a.cpu * b.samples / a.samples) / b.checkpoints for a, b in self._pairs()
        )

    def _pairs(self) -> list[tuple[Run, Run]]:
        pairs = zip(self.without, self.often, strict=True)
        return [pair for pair in pairs if pair[1].checkpoints]

    def row(self) -> str:
        """Return a row of the table."""
        count = statistics.median(each.checkpoints for each in self.often)
        cores = os.cpu_count() or 1
        return (
            f"| {self.work.name} | {_median(self.without):.0f} "
            f"| {_ratio(self.rare, self.without):.3f} "
            f"| {_ratio(self.often, self.without):.3f} with {count:.0f} in {SECONDS:.0f} s "
            f"| {self.seconds:.2f} s | **{self.seconds / 60:.1%}** "
            f"| {self.cpu:.2f} s | **{self.cpu / 60 / cores:.1%}** |"
        )

    def stages(self) -> list[str]:
        """Return a row for each stage."""
        rows = []
        for stage, (counted, (before, after)) in enumerate(zip(self.counted, self.memory, strict=True)):
            pause = statistics.median(counted.pauses)
            rows.append(
                f"| {self.work.name} | {stage} | {counted.sizes[-1] / 1e6:.1f} MB "
                f"| {1000 * pause:.0f} ms, at most {1000 * max(counted.pauses):.0f} ms "
                f"| {statistics.median(counted.sent) / 1e6:.1f} MB | {before / 1e6:.0f} MB "
                f"| {(after - before) / 1e6:+.1f} MB |"
            )
        return rows


def _median(runs: Sequence[Run]) -> float:
    return statistics.median(each.rate for each in runs)


def _ratio(runs: Sequence[Run], others: Sequence[Run]) -> float:
    return statistics.median(a.rate / b.rate for a, b in zip(runs, others, strict=True))


@contextmanager
def team(seats: Sequence[Seat], lan: Lan | None = None) -> Iterator[Measured]:
    """Run a team for the duration of the context."""
    processes = Measured(seats, lan)
    try:
        yield processes
    finally:
        processes.close()


def _counted(folder: Path, seats: Sequence[Seat]) -> list[Counted]:
    texts = [(folder / f"stored_{seat.team}_{seat.name}.json").read_text() for seat in seats]
    return [Counted(**json.loads(text)) for text in texts]


def compare(work: Workload) -> Result:
    """Train with and without checkpoints in turns."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch, name) for name in ("without", "rare", "often")}
        minutes = {"without": None, "rare": RARE, "often": OFTEN}
        seats = {}
        for name, folder in folders.items():
            names = work.form(folder, free_addresses(STAGES))
            seat = Seat(work.name, str(folder), checkpoint_minutes=minutes[name], team=name)
            seats[name] = [replace(seat, name=node) for node in names]
        found: dict[str, list[Run]] = {name: [] for name in folders}
        with ExitStack() as stack:
            teams = {name: stack.enter_context(team(each)) for name, each in seats.items()}
            for each in teams.values():
                each.measure(min(SECONDS, 5.0))  # warm-up
            for repetition in range(REPETITIONS):
                for name in list(teams) if repetition % 2 else reversed(teams):
                    found[name].append(teams[name].measure(SECONDS))
                print(work.name, {k: v[-1] for k, v in found.items()}, file=sys.stderr, flush=True)
            memory = list(zip(teams["without"].memory, teams["often"].memory, strict=True))
        counted = _counted(folders["often"], seats["often"])
    return Result(work, found["without"], found["rare"], found["often"], counted, memory)


@dataclass(frozen=True)
class Slow:
    """Runs of one model on slow links."""

    work: Workload
    without: list[Run]
    default: list[Run]
    counted: list[Counted]
    """Checkpoints of the team that takes them, by stage."""

    @property
    def sides(self) -> tuple[list[Run], list[Run]]:
        """Runs without checkpoints and with the default settings."""
        return self.without, self.default

    def row(self) -> str:
        """Return a row of the table."""
        ratios = [b.rate / a.rate for a, b in zip(self.without, self.default, strict=True)]
        cpu = [1000 * statistics.median(run.cpu / run.samples for run in side) for side in self.sides]
        count = len(self.counted[0].seconds)
        replica = max(statistics.median(each.seconds) for each in self.counted)
        return (
            f"| {self.work.name} | {_median(self.without):.0f} | **{statistics.median(ratios):.3f}** "
            f"| {min(ratios):.3f} to {max(ratios):.3f} | {count} "
            f"| {cpu[0]:.2f} | {cpu[1]:.2f} "
            f"| {_gaps(self.without)} | {_gaps(self.default)} | {replica:.0f} s |"
        )


def _gaps(runs: Sequence[Run]) -> str:
    gaps = [run.gap for run in runs]
    return f"{statistics.median(gaps):.2f} s, at most {max(gaps):.2f} s"


def compare_on_links(work: Workload) -> Slow:
    """Train with the default settings and without checkpoints in turns, on slow links."""
    found: dict[str, list[Run]] = {"without": [], "default": []}
    with tempfile.TemporaryDirectory() as scratch:
        with Lan(STAGES, MEGABITS) as lan, ExitStack() as stack:
            teams: dict[str, Measured] = {}
            for name, minutes in (("without", None), ("default", RARE)):
                addresses = [f"{host}:{PORT + len(teams)}" for host in lan.hosts]
                names = work.form(Path(scratch, name), addresses, MEGABITS)
                assert names == sorted(names), "the Root is node_0 in a pool of equal nodes"
                seat = Seat(work.name, str(Path(scratch, name)), checkpoint_minutes=minutes, team=name)
                seats = [replace(seat, name=node) for node in names]
                teams[name] = stack.enter_context(team(seats, lan))
            for each in teams.values():
                each.measure(5.0)  # warm-up
            for repetition in range(LINK_REPETITIONS):
                for name in list(teams) if repetition % 2 else reversed(teams):
                    found[name].append(teams[name].measure(LINK_SECONDS, LINK_SETTLING))
                print(work.name, {k: v[-1] for k, v in found.items()}, file=sys.stderr, flush=True)
        counted = _counted(Path(scratch, "default"), seats)
    print(*((each.seconds, each.delayed) for each in counted), file=sys.stderr, flush=True)
    return Slow(work, found["without"], found["default"], counted)


def links(models: Sequence[str] = ()) -> str:
    """Return the report on slow links as Markdown."""
    if not possible():
        return f"Links of {MEGABITS} Mbit/s were not measured: that needs root and iproute2."
    results = [compare_on_links(work) for work in _chosen(models)]
    lines = [
        f"In network namespaces with links of {MEGABITS} Mbit/s, {LINK_REPETITIONS} pairs of runs of "
        f"{LINK_SECONDS:.0f} s in turns, which are longer than the time between two checkpoints:",
        "",
        "| model | without, samples/s | default settings, relative to it (below 1 is slower) "
        "| all pairs | checkpoints in all runs | CPU ms/sample without | with | longest gap without "
        "| with | replica |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        *(result.row() for result in results),
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Cost:
    """Time that one checkpoint took."""

    began: float
    """Seconds since the start of the run."""
    lasted: float
    """Seconds until all nodes had stored it."""
    excess: float
    """Seconds by which the updates beside it took longer than others."""


def costs(updates: Sequence[tuple[float, bool]]) -> list[Cost]:
    """Return what the checkpoints of a run took, from the times of its updates at the Root."""
    gaps = [(b - a, storing) for (a, _), (b, storing) in pairwise(updates)]
    found: list[Cost] = []
    place = 0
    for storing, group in groupby(gaps, key=lambda gap: gap[1]):
        beside = [seconds for seconds, _ in group]
        begin, place = place, place + len(beside)
        others = [*gaps[max(begin - NEIGHBOURS, 0) : begin], *gaps[place : place + NEIGHBOURS]]
        quiet = [seconds for seconds, other in others if not other]
        if storing and quiet:
            excess = sum(beside) - len(beside) * statistics.fmean(quiet)
            found.append(Cost(updates[begin][0] - updates[0][0], sum(beside), excess))
    return found


def long(models: Sequence[str] = ()) -> str:
    """Return the report of one long run with the default settings on slow links as Markdown."""
    if not possible():
        return "A long run was not measured: that needs root and iproute2."
    lines = [
        f"One run of {LONG_SECONDS:.0f} s with the default settings, links of {MEGABITS} Mbit/s:",
        "",
        "| model | samples/s | checkpoints: after, stored in, cost | all of them, of the time |",
        "|---|--:|---|--:|",
    ]
    for work in _chosen(models):
        run, updates = _train_long(work)
        found = costs(updates)
        each = "; ".join(f"{c.began:.0f} s, {c.lasted:.0f} s, {c.excess:.1f} s" for c in found)
        share = sum(c.excess for c in found) / (updates[-1][0] - updates[0][0])
        lines.append(f"| {work.name} | {run.rate:.0f} | {each} | **{share:.1%}** |")
    return "\n".join(lines)


def _train_long(work: Workload) -> tuple[Run, list[tuple[float, bool]]]:
    with tempfile.TemporaryDirectory() as scratch:
        with Lan(STAGES, MEGABITS) as lan:
            names = work.form(Path(scratch), [f"{host}:{PORT}" for host in lan.hosts], MEGABITS)
            seat = Seat(work.name, scratch, checkpoint_minutes=RARE, team="long")
            seats = [replace(seat, name=node) for node in names]
            with team(seats, lan) as processes:
                run = processes.measure(LONG_SECONDS)
        return run, _counted(Path(scratch), seats)[0].updates


def frozen(work: Workload) -> list[str]:
    """Return rows about replicas if the optimizer has half of the parameters."""
    with tempfile.TemporaryDirectory() as scratch:
        names = work.form(Path(scratch), free_addresses(STAGES))
        seats = [Seat(work.name, scratch, name, checkpoint_minutes=OFTEN, team=FROZEN) for name in names]
        with team(seats) as processes:
            for _ in range(3):
                processes.measure(4.0)
        counted = _counted(Path(scratch), seats)
    return [
        f"| {work.name} | {stage} | {each.sizes[-1] / 1e6:.1f} MB | {each.sent[0] / 1e6:.1f} MB "
        f"| {statistics.median(each.sent[1:]) / 1e6:.1f} MB |"
        for stage, each in enumerate(counted)
    ]


def _chosen(models: Sequence[str]) -> list[Workload]:
    """Return the models whose names begin like this; all if there is no beginning."""
    return [w for w in (MEDIUM_GPT, MLP) if not models or any(w.name.startswith(m) for m in models)]


def loopback(models: Sequence[str] = ()) -> str:
    """Return the report on loopback as Markdown."""
    chosen = _chosen(models)
    results = [compare(work) for work in chosen]
    lines = [
        f"Medians of {REPETITIONS} runs of {SECONDS:.0f} s. The goal is a cost of at most {GOAL:.0%} at "
        "the default rate.",
        "",
        "| model | without, samples/s | default settings, relative to it (below 1 is slower) "
        "| many checkpoints | time of one | at one per minute | processor time of one "
        "| at one per minute |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        *(result.row() for result in results),
        "",
        "| model | stage | a checkpoint | pause | sent for a replica | memory without | more with |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *(row for result in results for row in result.stages()),
        "",
        "Replicas if the optimizer changes half of the parameters:",
        "",
        "| model | stage | a checkpoint | first replica | later ones |",
        "|---|--:|--:|--:|--:|",
        *(row for work in chosen for row in frozen(work)),
    ]
    return "\n".join(lines)


TABLES = {"loopback": loopback, "links": links, "long": long}


def measure(arguments: Sequence[str] = ()) -> str:
    """Return the report as Markdown; arguments choose tables and models."""
    tables = [name for name in TABLES if name in arguments] or ["loopback", "links"]
    models = [each for each in arguments if each not in TABLES]
    return "\n\n".join(TABLES[name](models) for name in tables)


if __name__ == "__main__":
    print(measure(sys.argv[1:]))
