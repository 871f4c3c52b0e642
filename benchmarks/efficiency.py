"""Rate of a pipeline relative to its slowest stage, with the schedule `sync`.

The nodes are threads of one process, over the in-memory network with the given link delays. Everything
is real (Node, worker thread, messages) except the computation: each stage sleeps for its computing
time, and has no optimizer. The numbers therefore show the losses of the schedule, not of the machine.
The rate of the slowest stage is measured with the same sleeps alone, one after another, in a separate
process at the same time, so that disturbances affect both. Ramp-up is left out. Weight gradients are
four sleeps, as of four layers, between which the schedule can interrupt them; the prediction does not
interrupt them. "Bound" is the best that any schedule without delayed gradients can reach with these
times, "predicted" is what the simulator predicts for the real schedule; then for both, with the times
that threads and messages take in addition: between two forwards in a row at the Root, and from the end
of a forward to the arrival of its outputs at the next stage, besides the link's delay (medians). Run
as a script to print the report; arguments are numbers of micro-batches per stage, and
RAVNEST_BENCH_PASS_SECONDS is the time of each pass.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from contenders import Clock
from schedule_bound import least_cycle
from torch import nn
from workloads import NODE_DATA, Workload, free_addresses, loss_of

from ravnest import Node, Trainer
from ravnest.runtime.control import node_runtime
from ravnest.runtime.schedule.simulator import LinkCost, Scenario, StageCost, steady_rate
from ravnest.runtime.stage.execution import LossPart, StageExecution
from ravnest.runtime.stage.updates import UpdateRule, Updates
from ravnest.runtime.stage.worker import Worker
from ravnest.split.module import StageModule
from ravnest.transport.base import Link
from ravnest.transport.memory import MemoryNetwork
from ravnest.types import MicrobatchId
from ravnest.wire.messages import Forward, Message

FORWARD = BACKWARD = WEIGHTS = float(os.environ.get("RAVNEST_BENCH_PASS_SECONDS", "0.010"))
"""Seconds of each stage per micro-batch: forward, gradients of inputs, gradients of weights."""
PER_STAGE = tuple(map(int, sys.argv[1:])) if __name__ == "__main__" and sys.argv[1:] else (4, 5, 6)
"""Micro-batches in a batch, per stage."""
LAYERS = 4
"""Layers of a stage: weight gradients are interrupted between two of them."""
DELAYS = (0.0, 0.020)
"""Delays of the links in each direction, in seconds."""
GOAL = 0.92
SETTLING = 2.0
"""Seconds until the pipeline is full."""
SECONDS = SETTLING + float(os.environ.get("RAVNEST_BENCH_SECONDS", "10"))
REPETITIONS = int(os.environ.get("RAVNEST_BENCH_REPETITIONS", "3"))
WIDTH = 8
DEADLINE = 120.0


def _work(stages: int, count: int) -> Workload:
    def model() -> nn.Module:
        layers = [part for _ in range(2 * stages) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        return nn.Sequential(*layers)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(count, WIDTH), torch.randint(0, WIDTH, (count,))

    return Workload(f"{stages} stages", model, batch, count)


@dataclass(frozen=True)
class Overheads:
    """Seconds that the runtime takes in addition to sleeps and delays."""

    computation: float = 0.0
    message: float = 0.0


def expected_shares(stages: int, delay: float, count: int, overheads: Overheads) -> tuple[float, float]:
    """Return the bound and the simulator's prediction, relative to the rate of a stage alone."""
    own, hop = overheads.computation, delay + overheads.message
    cost = StageCost(FORWARD + own, BACKWARD + own, weights=WEIGHTS + own)
    root = StageCost(FORWARD + own, BACKWARD + WEIGHTS + own)
    costs = (root,) + (cost,) * (stages - 1)
    links = (LinkCost(hop, hop),) * (stages - 1)
    rate = steady_rate(Scenario(costs, links, count, update_size=count, schedule="sync"), rounds=12)
    alone = FORWARD + BACKWARD + WEIGHTS
    return count * alone / least_cycle(costs, links, count), rate * alone


@dataclass(frozen=True)
class Reached:
    """Result of one run, in micro-batches per second."""

    rate: float
    alone: float
    """Rate of the sleeps alone, at the same time."""
    overheads: Overheads


class _Sleeping(Trainer):
    """Trainer whose Root trains for a while and measures itself."""

    reached: tuple[float, float] | None = None
    """Rate, and that of the sleeps alone."""

    def prelim_checks(self) -> None:
        """Work until the Root is done; an endless loader has no length."""
        if not self.node.is_root:
            self._finish_call()

    def train(self) -> None:
        """Train for the given time."""
        self.prelim_checks()
        if not self.node.is_root:
            return
        state = self.node._ensure_started().progress.state
        alone = _sleep_alone()
        clock, begin = Clock(SECONDS, SETTLING), state.done
        for batch in self.train_loader:
            self.node.forward_compute(batch[0])
            clock.mark((state.done - begin) * len(batch[0]))
            if clock.over:
                break
        self.reached = clock.rate(), float(alone.communicate()[0])


class _NoUpdates(Updates):
    """Counter of updates; there is nothing to update."""

    def step(self, count: int, total_norm: float | None = None) -> None:
        """Count an update, which takes no time."""
        del count, total_norm
        self.done += 1


_ALONE = """
import sys, time
settling, seconds, *sleeps = map(float, sys.argv[1:])
time.sleep(settling)
begin, count = time.perf_counter(), 0
while time.perf_counter() < begin + seconds:
    for each in sleeps:
        time.sleep(each)
    count += 1
sys.stdout.write(str(count / (time.perf_counter() - begin)))
"""


def _sleep_alone() -> subprocess.Popen[bytes]:
    """Start a process that sleeps like an undisturbed stage and prints its rate."""
    layers = [WEIGHTS / LAYERS] * LAYERS
    arguments = map(str, (SETTLING, SECONDS - SETTLING, FORWARD, BACKWARD, *layers))
    return subprocess.Popen([sys.executable, "-I", "-c", _ALONE, *arguments], stdout=subprocess.PIPE)


@contextmanager
def _sleeping() -> Iterator[None]:
    """Make stages sleep instead of computing, and note when their inputs arrive."""
    real, on_message = node_runtime.StageExecution, Worker.on_message

    def noted(self: Worker, link: Link, message: Message) -> None:
        if isinstance(message.head, Forward):
            arrival = link.local.stage, message.head.microbatch.index
            SleepingStage.arrivals[arrival] = time.perf_counter()
        on_message(self, link, message)

    node_runtime.StageExecution = SleepingStage  # type: ignore[misc]
    Worker.on_message = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        node_runtime.StageExecution = real  # type: ignore[misc]
        Worker.on_message = on_message  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Forward:
    """A forward with the times at which it began and ended."""

    stage: int
    index: int
    began: float
    ended: float


class SleepingStage(StageExecution):
    """Stage that sleeps instead of computing."""

    forwards: ClassVar[list[_Forward]] = []
    """Forwards of all stages."""
    arrivals: ClassVar[dict[tuple[int, int], float]] = {}
    """Times at which inputs arrived, by stage and micro-batch."""

    def __init__(self, module: StageModule, rule: UpdateRule, **options: Any) -> None:
        super().__init__(module, rule, **options)
        self.updates = _NoUpdates(rule, {})
        self.layers_left: dict[MicrobatchId, int] = {}
        """Layers whose weight gradients are missing, where that is not all of them."""

    def forward(
        self,
        microbatch: MicrobatchId,
        version: int,
        values: Mapping[str, Any],
        loss_part: LossPart | None = None,
        *,
        late: bool = False,
        costly: bool = False,
    ) -> tuple[dict[str, Any], float | None]:
        """Return a tensor of the right shape."""
        del version, values, late, costly
        began = time.perf_counter()
        time.sleep(FORWARD)
        self.forwards.append(_Forward(self.index, microbatch.index, began, time.perf_counter()))
        outputs = {spec.name: torch.zeros(1, WIDTH) for spec in self.module.graph.outputs}
        return outputs, None if loss_part is None else 0.0

    def backward(
        self, microbatch: MicrobatchId, gradients: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return a tensor of the right shape."""
        del microbatch, gradients
        time.sleep(BACKWARD if self.defers else BACKWARD + WEIGHTS)
        return {s.name: torch.zeros(1, WIDTH) for s in self.module.graph.inputs if s.gradient}

    def weight_gradients(
        self, microbatch: MicrobatchId, interrupted: Callable[[], bool] = lambda: False
    ) -> bool:
        """Take the time of the deferred weight gradients, those of one layer after the other."""
        left = self.layers_left.get(microbatch, LAYERS)
        while left:
            time.sleep(WEIGHTS / LAYERS)
            left -= 1
            if left and interrupted():
                self.layers_left[microbatch] = left
                return False
        self.layers_left.pop(microbatch, None)
        return True


def _overheads(count: int, delay: float) -> Overheads:
    """Return the medians over the last run."""
    forwards, arrivals = SleepingStage.forwards, SleepingStage.arrivals
    at_root = [forward for forward in forwards if forward.stage == 0]
    gaps = [b.began - a.ended for a, b in itertools.pairwise(at_root) if b.index % count]
    hops = [
        arrived - each.ended - delay
        for each in forwards
        if (arrived := arrivals.get((each.stage + 1, each.index))) is not None
    ]
    return Overheads(statistics.median(gaps), statistics.median(hops))


def run(work: Workload, folder: Path, names: list[str], delay: float) -> Reached:
    """Run sleeping stages once."""
    network = MemoryNetwork(delay)
    SleepingStage.forwards.clear()
    SleepingStage.arrivals.clear()
    trainers: list[_Sleeping] = []
    loader = work.loader()

    def provide(name: str) -> None:
        with Node(
            name,
            optimizer=torch.optim.SGD,
            optimizer_params={"lr": 1e-3},
            criterion=loss_of,
            labels=loader,
            schedule="sync",
            micro_batches=work.micro_batches,
            folder=folder / NODE_DATA,
            loss_filename=folder / "losses.txt",
            progress=False,
            transport=network.transport(),
        ) as node:
            trainer = _Sleeping(node, train_loader=loader)
            if node.is_root:
                trainers.append(trainer)
            trainer.train()

    with _sleeping(), contextlib.redirect_stdout(io.StringIO()):
        threads = [threading.Thread(target=provide, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
    (trainer,) = trainers
    assert trainer.reached is not None, "the Root did not finish"
    overheads = _overheads(work.micro_batches, delay)
    return Reached(*trainer.reached, overheads)


def _row(stages: int, delay: float, count: int, found: list[Reached]) -> str:
    shares = [each.rate / each.alone for each in found]
    overheads = Overheads(
        statistics.median(each.overheads.computation for each in found),
        statistics.median(each.overheads.message for each in found),
    )
    expected = (
        *expected_shares(stages, delay, count, Overheads()),
        *expected_shares(stages, delay, count, overheads),
    )
    return (
        f"| {stages} | {1000 * delay:.0f} | {count} | **{statistics.median(shares):.1%}** | "
        f"{min(shares):.1%} | {' | '.join(f'{share:.1%}' for share in expected)} | "
        f"{1000 * overheads.computation:.2f} and {1000 * overheads.message:.1f} ms |"
    )


def measure() -> str:
    """Return the report as Markdown."""
    torch.set_num_threads(1)
    lines = [
        f"Stages of {1000 * (FORWARD + BACKWARD + WEIGHTS):.0f} ms per micro-batch "
        f"({1000 * FORWARD:.0f} forward, {1000 * BACKWARD:.0f} for gradients of inputs, "
        f"{1000 * WEIGHTS:.0f} for gradients of weights), one update per batch, no clipping; medians of "
        f"{REPETITIONS} runs. The goal is at least {GOAL:.0%} of the slowest stage's rate.",
        "",
        "| stages | link, ms | micro-batches per batch | relative to the slowest stage | worst "
        "| bound | predicted | bound with overheads | predicted with overheads | overheads |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for stages, per_stage in itertools.product((3, 8), PER_STAGE):
        with tempfile.TemporaryDirectory() as scratch:
            count = per_stage * stages
            folder, work = Path(scratch), _work(stages, count)
            names = work.form(folder, free_addresses(stages))
            for delay in DELAYS:
                reached = [run(work, folder, names, delay) for _ in range(REPETITIONS)]
                lines.append(_row(stages, delay, count, reached))
                print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    print(measure())
