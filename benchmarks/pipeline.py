"""Samples per second of real pipelines: one process per stage, one thread each.

Three contenders train the same weights on the same batches: Ravnest's nodes, torch's own pipeline
schedule (`torch.distributed.pipelining.Schedule1F1B` on gloo) with the same stages, and the unsplit
model in one process. Ravnest has its default schedule: `sync` where batches can be split, so that all
contenders learn the same. Compared with torch, both split each batch into the same micro-batches. The
batches of the digits CNN are not split (batch norm), so that its schedule is `async`. Contenders take
turns, start-up is left out, and the numbers are medians of ratios of neighbouring runs. The CPU time of
all processes together, with ramp-up and drain, depends less on other load of the machine. In namespaces
each process has its own link to a switch, limited to 100 Mbit/s in each direction (veth and tbf);
Ravnest's traffic is encrypted there, gloo's is not. Run as a script to print the report; arguments
choose tables (`single`, `loopback`, `links`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from contenders import Rate, Seat
from lan import Lan, possible
from workloads import DIGITS, MLP, SMALL_GPT, Workload, free_addresses

STAGES = 3
REPETITIONS = int(os.environ.get("RAVNEST_BENCH_REPETITIONS", "7"))
SECONDS = float(os.environ.get("RAVNEST_BENCH_SECONDS", "6"))
MEGABITS = 100
PORT = 29700
_CONTENDERS = Path(__file__).with_name("contenders.py")
_PATIENCE = 20.0


class Team:
    """Processes of one contender; the first of them measures."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE if first else subprocess.DEVNULL,
                stdout=subprocess.PIPE if first else subprocess.DEVNULL,
                text=True,
            )
            for first, command in zip([True, *[False] * len(commands)], commands, strict=False)
        ]

    @property
    def pids(self) -> list[int]:
        """Names of the processes, the Root first."""
        return [process.pid for process in self._processes]

    def run(self, seconds: float) -> Rate:
        """Train for this long."""
        begin = self._cpu_seconds()
        self.order(seconds)
        rate = Rate(**self.answer())
        used = self._cpu_seconds() - begin
        return replace(rate, cpu=1000 * used / max(rate.trained, 1))

    def _cpu_seconds(self) -> float:
        """Return the CPU time of all processes so far."""
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return sum(each.user + each.system for each in times)

    def order(self, seconds: float) -> None:
        """Start to train for this long."""
        first = self._processes[0]
        assert first.stdin is not None
        print(seconds, file=first.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Return the result of the last request when it is done."""
        first = self._processes[0]
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("{"):  # a node also prints there which peers it waits for
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"{first.args!r} ended with code {first.wait()}")

    def dismiss(self) -> None:
        """Send no more requests."""
        first = self._processes[0]
        assert first.stdin is not None
        first.stdin.close()

    def close(self) -> None:
        """Wait for the processes to end; kill those that do not."""
        self.dismiss()
        for process in self._processes:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True)
class Race:
    """Rates of two contenders, run by run."""

    ravnest: list[Rate]
    other: list[Rate]

    @property
    def ratio(self) -> float:
        """Median of the ratios of neighbouring runs, under the same conditions."""
        pairs = zip(self.ravnest, self.other, strict=True)
        return statistics.median(a.samples / b.samples for a, b in pairs)

    def row(self, name: str, required: float) -> str:
        """Return a row of the table."""
        rates = [statistics.median(r.samples for r in side) for side in (self.ravnest, self.other)]
        ratios = [a.samples / b.samples for a, b in zip(self.ravnest, self.other, strict=True)]
        cpu = [statistics.median(r.cpu for r in side) for side in (self.ravnest, self.other)]
        window = statistics.median(r.window for r in self.ravnest)
        staleness = statistics.median(r.staleness for r in self.ravnest)
        return (
            f"| {name} | {rates[0]:.0f} | {rates[1]:.0f} | **{self.ratio:.2f}** | {min(ratios):.2f} to "
            f"{max(ratios):.2f} | {required:.1f} | {cpu[0]:.2f} | {cpu[1]:.2f} | {window:.0f} "
            f"| {staleness:.0f} |"
        )


@contextmanager
def team(contender: str, seats: Sequence[Seat], lan: Lan | None = None) -> Iterator[Team]:
    """Run the processes of a contender for the duration of the context."""
    commands = [
        [
            *([] if lan is None else lan.inside(place)),
            sys.executable,
            str(_CONTENDERS),
            contender,
            json.dumps(asdict(seat)),
        ]
        for place, seat in enumerate(seats)
    ]
    processes = Team(commands)
    try:
        yield processes
    finally:
        processes.close()


def race(work: Workload, other: str, lan: Lan | None = None) -> Race:
    """Train Ravnest and another contender in turns."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        if lan is None:
            addresses, store = free_addresses(STAGES), free_addresses(1)[0]
            names = work.form(folder, addresses)
        else:
            addresses = [f"{host}:{PORT}" for host in lan.hosts]
            store = f"{lan.hosts[0]}:{PORT + 1}"
            names = work.form(folder, addresses, MEGABITS)
        device = "lo" if lan is None else lan.device
        seats = [Seat(work.name, scratch, name, store, device) for name in names]
        # Each node runs on the machine that has its address.
        order = [int(name.removeprefix("node_")) for name in names]
        assert lan is None or order == sorted(order), "the Root is node_0 in a pool of equal nodes"
        teams = [
            stack.enter_context(team("ravnest", seats, lan)),
            stack.enter_context(team(other, seats if other == "torch" else seats[:1], lan)),
        ]
        found: list[list[Rate]] = [[], []]
        for each in teams:
            each.run(SECONDS)  # warm-up
        for repetition in range(REPETITIONS):
            for which in (0, 1) if repetition % 2 else (1, 0):
                found[which].append(teams[which].run(SECONDS))
            rates = (f"{side[-1].samples:.0f} ({side[-1].cpu:.2f})" for side in found)
            print(work.name, *rates, file=sys.stderr, flush=True)
    return Race(*found)


_HEAD = (
    "| model | Ravnest, samples/s | {0}, samples/s | ratio (above 1: Ravnest is faster) | all runs "
    "| required | Ravnest, CPU ms/sample | {0}, CPU ms/sample | W | staleness |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def _single() -> str:
    title = "Three nodes on loopback, compared with one process with one thread:"
    return f"{title}\n\n{_HEAD.format('one process')}\n{race(DIGITS, 'single').row(DIGITS.name, 0.5)}"


def _loopback() -> str:
    rows = [race(work, "torch").row(work.name, 1.0) for work in (MLP, SMALL_GPT)]
    title = f"Three stages on loopback and Schedule1F1B, {MLP.micro_batches} micro-batches per batch:"
    return "\n".join([f"{title}\n\n{_HEAD.format('1F1B')}", *rows])


def _links() -> str:
    if not possible():
        return f"Links of {MEGABITS} Mbit/s were not measured: that needs root and iproute2."
    rows = []
    for work in (MLP, SMALL_GPT):
        with Lan(STAGES, MEGABITS) as lan:
            rows.append(race(work, "torch", lan).row(work.name, 1.2))
    title = f"The same in network namespaces with links of {MEGABITS} Mbit/s:"
    return "\n".join([f"{title}\n\n{_HEAD.format('1F1B')}", *rows])


TABLES = {"single": _single, "loopback": _loopback, "links": _links}


def measure(tables: Sequence[str] = tuple(TABLES)) -> str:
    """Return the report as Markdown."""
    return "\n\n".join(TABLES[table]() for table in tables)


if __name__ == "__main__":
    print(measure(sys.argv[1:] or tuple(TABLES)))
