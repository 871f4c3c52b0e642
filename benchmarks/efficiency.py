"""How much of the slowest stage's rate a pipeline reaches, at the window that Ravnest chose itself.

Nodes of one process, in threads, over the in-memory network, whose links take as long as they are
told. Everything is real (Node, worker, session, window) but the computation: each stage sleeps for
as long as it should compute, and has no optimizer. So the figures show what the schedule loses, not
what the machine does. The slowest stage's rate is that of the same sleeps alone, one after another, in
a process of its own at the same time: what disturbs the machine disturbs both.
The predicted rate is that of the simulation by which the window was chosen, from the times that the
nodes measured. Rates are measured from when the window has settled, which takes seconds of trainings
that last for hours. Run as a script it prints its report.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contenders import Clock
from torch import nn
from workloads import NODE_DATA, Workload, free_addresses, loss_of

from ravnest import Node, Trainer
from ravnest.runtime.control import metrics, node_runtime
from ravnest.runtime.schedule.window import WindowChoice, choose_window
from ravnest.runtime.stage.execution import Gradients, StageExecution
from ravnest.runtime.stage.updates import UpdateRule, Updates
from ravnest.split.module import StageModule
from ravnest.transport.memory import MemoryNetwork
from ravnest.types import MicrobatchId

FORWARD, BACKWARD = 0.010, 0.020
"""Seconds that each stage computes for a micro-batch."""
SETTLING = 6.0
"""Seconds until the window has been chosen a few times and the pipeline is full of it."""
SECONDS = SETTLING + float(os.environ.get("RAVNEST_BENCH_SECONDS", "12"))
REPETITIONS = int(os.environ.get("RAVNEST_BENCH_REPETITIONS", "5"))
WIDTH = 8
DEADLINE = 120.0


def _work(stages: int) -> Workload:
    def model() -> nn.Module:
        layers = [part for _ in range(2 * stages) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        return nn.Sequential(*layers)

    return Workload(
        f"{stages} stages", model, lambda: (torch.rand(4, WIDTH), torch.randint(0, WIDTH, (4,))), 1
    )


@dataclass(frozen=True)
class Reached:
    """One run."""

    rate: float
    """Micro-batches a second."""
    alone: float
    """The same of the sleeps alone, meanwhile."""
    choice: WindowChoice
    staleness: float


class _Sleeping(Trainer):
    """The Root trains for a while and measures itself, once the window has settled."""

    reached: tuple[float, float, float] | None = None

    def prelim_checks(self) -> None:
        """Work until the Root is done; an endless loader has no length to look at."""
        if not self.node.is_root:
            self._finish_call()

    def train(self) -> None:
        """For the given time."""
        self.prelim_checks()
        if not self.node.is_root:
            return
        state = self.node._ensure_started().progress.state
        alone = _sleep_alone()
        clock, begin, staleness = Clock(SECONDS, SETTLING), state.done, []
        for batch in self.train_loader:
            self.node.forward_compute(batch[0])
            clock.mark(state.done - begin)
            staleness.append(state.staleness)
            if clock.over:
                break
        self.reached = clock.rate(), float(alone.communicate()[0]), statistics.median(staleness)


class _NoUpdates(Updates):
    """Counts, as there is nothing to update."""

    def step(self, count: int, total_norm: float | None = None) -> None:
        """An update that takes no time."""
        del count, total_norm
        self.done += 1


_ALONE = """
import sys, time
settling, seconds, forward, backward = map(float, sys.argv[1:])
time.sleep(settling)
begin, count = time.perf_counter(), 0
while time.perf_counter() < begin + seconds:
    time.sleep(forward)
    time.sleep(backward)
    count += 1
sys.stdout.write(str(count / (time.perf_counter() - begin)))
"""


def _sleep_alone() -> subprocess.Popen[bytes]:
    """Sleeps as a stage that nothing holds up, while the pipeline is measured; writes its rate."""
    figures = map(str, (SETTLING, SECONDS - SETTLING, FORWARD, BACKWARD))
    return subprocess.Popen([sys.executable, "-I", "-c", _ALONE, *figures], stdout=subprocess.PIPE)


@contextmanager
def _sleeping() -> Iterator[list[WindowChoice]]:
    """Stages sleep instead of computing; gives the windows that were chosen meanwhile."""
    chosen: list[WindowChoice] = []

    def choose(*args: Any, **kwargs: Any) -> WindowChoice:
        chosen.append(choose_window(*args, **kwargs))
        return chosen[-1]

    real = node_runtime.StageExecution, metrics.choose_window
    node_runtime.StageExecution, metrics.choose_window = SleepingStage, choose  # type: ignore[misc]
    try:
        yield chosen
    finally:
        node_runtime.StageExecution, metrics.choose_window = real  # type: ignore[misc]


class SleepingStage(StageExecution):
    """Takes its time and computes nothing."""

    def __init__(self, module: StageModule, rule: UpdateRule, **options: Any) -> None:
        super().__init__(module, rule, **options)
        self.updates = _NoUpdates(rule, {})

    def forward(
        self, batch: MicrobatchId, version: int, values: Mapping[str, Any], loss_of: Any = None
    ) -> tuple[dict[str, Any], float | None]:
        """Anything of the right shape."""
        del batch, version, values
        time.sleep(FORWARD)
        outputs = {spec.name: torch.zeros(4, WIDTH) for spec in self.module.graph.outputs}
        return outputs, None if loss_of is None else 0.0

    def backward(
        self, batch: MicrobatchId, gradients: Mapping[str, Any], shared: Mapping[str, Any]
    ) -> Gradients:
        """Anything of the right shape."""
        del batch, gradients, shared
        time.sleep(BACKWARD)
        inputs = {s.name: torch.zeros(4, WIDTH) for s in self.module.graph.inputs if s.gradient}
        return Gradients(inputs, {})


def run(work: Workload, folder: Path, names: list[str], delay: float) -> Reached:
    """One run of sleeping stages."""
    network = MemoryNetwork(delay)
    trainers: list[_Sleeping] = []
    loader = work.loader()

    def provide(name: str) -> None:
        with Node(
            name,
            optimizer=torch.optim.SGD,
            optimizer_params={"lr": 1e-3},
            criterion=loss_of,
            labels=loader,
            folder=folder / NODE_DATA,
            loss_filename=folder / "losses.txt",
            progress=False,
            transport=network.transport(),
        ) as node:
            trainer = _Sleeping(node, train_loader=loader)
            if node.is_root:
                trainers.append(trainer)
            trainer.train()

    with _sleeping() as chosen:
        threads = [threading.Thread(target=provide, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
    (trainer,) = trainers
    assert trainer.reached is not None, "the Root did not finish"
    rate, alone, staleness = trainer.reached
    return Reached(rate, alone, chosen[-1], staleness)


def _row(stages: int, delay: float, found: list[Reached]) -> str:
    shares = [each.rate / each.alone for each in found]
    off = statistics.median(abs(each.choice.predicted_rate / each.rate - 1) for each in found)
    windows = sorted({each.choice.window for each in found})
    staleness = statistics.median(each.staleness for each in found)
    return (
        f"| {stages} | {1000 * delay:.0f} | {', '.join(map(str, windows))} | {staleness:.0f} | "
        f"**{statistics.median(shares):.1%}** | {min(shares):.1%} | {off:.1%} |"
    )


def measure() -> str:
    """The report, as Markdown."""
    torch.set_num_threads(1)
    lines = [
        f"Stages of {1000 * (FORWARD + BACKWARD):.0f} ms a micro-batch ({1000 * FORWARD:.0f} forward, "
        f"{1000 * BACKWARD:.0f} backward), an update a micro-batch; medians of {REPETITIONS} runs. The "
        "aims are at least 95% of the slowest stage's rate, and a prediction within 5%.",
        "",
        "| stages | link, ms | W | staleness | of the slowest stage | worst | prediction off by |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for stages in (3, 8):
        with tempfile.TemporaryDirectory() as scratch:
            folder, work = Path(scratch), _work(stages)
            names = work.form(folder, free_addresses(stages))
            found: dict[float, list[Reached]] = {0.0: [], 0.02: []}
            for _ in range(REPETITIONS):
                for delay, reached in found.items():
                    reached.append(run(work, folder, names, delay))
                    print(stages, delay, reached[-1], file=sys.stderr, flush=True)
            lines += [_row(stages, delay, reached) for delay, reached in found.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(measure())
