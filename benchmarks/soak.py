"""Memory, threads, files and sockets of nodes over a long run in which a neighbour is killed regularly.

One cluster of three nodes trains as real processes. The node in the middle is killed again and again,
and is started again as ``ravnest launch --restart`` does. The other two live through all of it. Their
figures are sampled every few seconds. A figure is flat if the median of the second half of the run
exceeds that of the first half by no more than the tolerance; the first tenth, in which allocators and
caches fill, is left out.

Run as a script: ``python benchmarks/soak.py --minutes 30``. It writes the samples to ``soak.csv``
(``--csv``), prints the comparison, and ends with code 1 if a figure grows or the run goes wrong.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path

import psutil
from chaos_run import run
from chaos_values import ChaosRun
from fault_plan import Fault, FaultKind, FaultPlan, Moment
from fork_server import ForkServer

INTERVAL = 3.0
"""Seconds between two samples."""
KILLS_EVERY = 15.0
"""Seconds of training between two kills."""
PACE = 0.05
"""Seconds between two updates."""
WARM_UP = 0.1
"""Part of the run that is left out."""
LEAST_SAMPLES = 10
"""Samples of a node without which nothing is said about it."""


@dataclass(frozen=True)
class Sample:
    """Figures of one process at one time."""

    seconds: float
    node: str
    pid: int
    rss: float
    """Resident memory in MB."""
    threads: int
    files: int
    """Open descriptors that are not sockets."""
    sockets: int


@dataclass(frozen=True)
class Tolerance:
    """Growth of a figure that counts as flat."""

    share: float
    """As a share of the figure."""
    least: float
    """At least so much, in the unit of the figure."""

    def allowed(self, figure: float) -> float:
        """Return the largest growth of a figure."""
        return max(self.share * figure, self.least)


TOLERANCES = {
    "rss": Tolerance(0.05, 8.0),
    "threads": Tolerance(0.0, 2.0),
    "files": Tolerance(0.0, 2.0),
    "sockets": Tolerance(0.0, 2.0),
}


@dataclass(frozen=True)
class Growth:
    """Comparison of the two halves of a run."""

    node: str
    figure: str
    first: float
    """Median of the first half."""
    second: float

    @property
    def flat(self) -> bool:
        """True if the figure has not grown by more than the tolerance."""
        return self.second - self.first <= TOLERANCES[self.figure].allowed(self.first)


def growth(samples: Sequence[Sample]) -> list[Growth]:
    """Compare the halves of a run, for each process that lived from its begin to its end."""
    end = max((sample.seconds for sample in samples), default=0.0)
    found: list[Growth] = []
    for node in sorted({sample.node for sample in samples}):
        own = [sample for sample in samples if sample.node == node]
        if len({sample.pid for sample in own}) > 1 or len(own) < LEAST_SAMPLES:
            continue
        begin = WARM_UP * end
        middle = (begin + end) / 2
        first = [sample for sample in own if begin <= sample.seconds < middle]
        second = [sample for sample in own if sample.seconds >= middle]
        found += [
            Growth(
                node,
                figure,
                statistics.median(getattr(sample, figure) for sample in first),
                statistics.median(getattr(sample, figure) for sample in second),
            )
            for figure in TOLERANCES
        ]
    return found


@dataclass
class Sampler:
    """Thread that samples the processes of a run; ``with`` runs it."""

    begin: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    _processes: dict[str, psutil.Process] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Callable[[str, int], None]:
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        return self._started

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _started(self, name: str, pid: int) -> None:
        self._processes[name] = psutil.Process(pid)

    def _work(self) -> None:
        while not self._over.wait(INTERVAL):
            for name, process in list(self._processes.items()):
                sample = self._sample(name, process)
                if sample is not None:
                    self.samples.append(sample)

    def _sample(self, name: str, process: psutil.Process) -> Sample | None:
        try:
            descriptors = process.num_fds()
            sockets = sum(
                link.readlink().name.startswith("socket:")
                for link in Path(f"/proc/{process.pid}/fd").iterdir()
                if link.is_symlink()
            )
            return Sample(
                round(time.monotonic() - self.begin, 1),
                name,
                process.pid,
                round(process.memory_info().rss / 1e6, 1),
                process.num_threads(),
                descriptors - sockets,
                sockets,
            )
        except (psutil.Error, OSError):  # it has just ended
            return None


def plan_soak(settings: ChaosRun, victim: int, every: float) -> FaultPlan:
    """Return kills of one node at regular intervals, in seconds of undisturbed training."""
    step = int(every / settings.pace)
    moments = range(step, settings.total - step, step)
    return FaultPlan(
        0, tuple(Fault(FaultKind.KILL, victim, Moment(float(at), in_updates=True)) for at in moments)
    )


def main() -> None:
    """Run, write the samples, print the comparison."""
    options = _options()
    updates = max(int(options.minutes * 60 / PACE), 400)
    settings = ChaosRun(
        clusters=1,
        nodes=3,
        updates=updates,
        pace=PACE,
        checkpoint_updates=40,
        limit=600.0 + 3 * 60 * options.minutes,
    )
    plan = plan_soak(settings, 1, options.every)
    sampler = Sampler()
    with (
        tempfile.TemporaryDirectory() as scratch,
        ForkServer(("chaos_node",)) as server,
        sampler as started,
    ):
        result = run(settings, plan, Path(options.keep or scratch) / "soak", server, started)
    _write(Path(options.csv), sampler.samples)
    found = growth(sampler.samples)
    print(report(found))
    print(
        f"{len(result.recoveries)} kills, {result.restarts} restarts, "
        f"{result.seconds / 60:.1f} minutes, {len(sampler.samples)} samples in {options.csv}"
    )
    if not result.good:
        print(f"the run went wrong: {result.hang} {result.failures} {result.corrupt}")
    sys.exit(0 if result.good and found and all(each.flat for each in found) else 1)


def report(found: Sequence[Growth]) -> str:
    """Return the comparison as Markdown."""
    lines = ["| node | figure | first half | second half | allowed | |", "|---|---|--:|--:|--:|---|"]
    for each in found:
        allowed = TOLERANCES[each.figure].allowed(each.first)
        verdict = "flat" if each.flat else "GROWS"
        lines.append(
            f"| {each.node} | {each.figure} | {each.first:.1f} | {each.second:.1f} | +{allowed:.1f} | "
            f"{verdict} |"
        )
    return "\n".join(lines)


def _write(path: Path, samples: Sequence[Sample]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(each.name for each in fields(Sample))
        writer.writerows(map(astuple, samples))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="length without the kills")
    parser.add_argument("--every", type=float, default=KILLS_EVERY, help="seconds between two kills")
    parser.add_argument("--csv", default="soak.csv", help="file for the samples")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the files of the run, with the logs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
