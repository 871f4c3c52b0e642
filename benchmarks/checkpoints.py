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
optimizer changes only half of the parameters. Run as a script to print the report; arguments choose
models by the beginnings of their names.
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
from pathlib import Path

import psutil
from checkpoint_nodes import FROZEN, Counted, Stored
from contenders import Seat
from pipeline import Team
from workloads import MEDIUM_GPT, MLP, Workload, free_addresses

STAGES = 3
REPETITIONS = int(os.environ.get("RAVNEST_BENCH_REPETITIONS", "7"))
SECONDS = float(os.environ.get("RAVNEST_BENCH_SECONDS", "15"))
GOAL = 0.02
RARE, OFTEN = 1.0, 0.5 / 60
"""Minutes between checkpoints: by default, and as often as their cost allows."""
SETTLING = 2.0
"""Seconds after a run in which its last checkpoint is stored, before the next one begins."""
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


class Measured(Team):
    """Processes of one team, with the largest memory of each."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        command = [sys.executable, str(_NODE)]
        super().__init__([[*command, json.dumps(asdict(seat))] for seat in seats])
        self.memory = [0 for _ in seats]

    def measure(self, seconds: float) -> Run:
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
        time.sleep(SETTLING)
        return Run(found.samples, found.checkpoints, found.trained, self._cpu() - before)

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
def team(seats: Sequence[Seat]) -> Iterator[Measured]:
    """Run a team for the duration of the context."""
    processes = Measured(seats)
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


def measure(models: Sequence[str] = ()) -> str:
    """Return the report as Markdown."""
    chosen = [w for w in (MEDIUM_GPT, MLP) if not models or any(w.name.startswith(m) for m in models)]
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


if __name__ == "__main__":
    print(measure(sys.argv[1:]))
