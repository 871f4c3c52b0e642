"""Cost of each codec in CPU time, its savings on the wire, and its effect on learning.

Speed is measured for float32 values, in uncompressed bytes per second of CPU time, in one thread. Bytes
and losses come from training in three stages, one whole batch after another, whose values travel over
real links of the in-memory network: `sent_bytes` counts frames, headers and acknowledgements.
Losses are means over the last tenth of the updates, relative to the same training without compression.
Any change of the arithmetic, however small, leads to a different trajectory: the row `nudged` is
uncompressed training whose initial weights are changed by a random 0.1%, and shows which differences
are noise. At 100 Mbit/s, pipelines of processes in network namespaces take turns, uncompressed and
`int8`. Run as a script to print the report; arguments choose parts (`speed`, `learning`, `links`).
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from contenders import Rate, Seat
from lan import Lan, possible
from pipeline import MEGABITS, REPETITIONS, SECONDS, STAGES, team
from sorting import KINDS, LAYERS, LENGTH, WIDTH, sequences, token_loss
from torch import nn
from workloads import GPT, SMALL_GPT, THIN_GPT, Workload, digits

from ravnest import set_seed
from ravnest.runtime.stage.execution import LossPart, StageExecution
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.split import split
from ravnest.split.module import StageModule
from ravnest.transport.base import Link
from ravnest.transport.memory import MemoryNetwork
from ravnest.types import Address, MicrobatchId
from ravnest.wire.codecs import CODECS, Codec
from ravnest.wire.layout import TensorLayout
from ravnest.wire.messages import (
    PROTOCOL,
    AnyHead,
    Backward,
    Forward,
    Goodbye,
    Hello,
    Message,
)

SEEDS = int(os.environ.get("RAVNEST_BENCH_COMPRESSION_SEEDS", "12"))
SORTING_SEEDS = int(os.environ.get("RAVNEST_BENCH_COMPRESSION_SORTING_SEEDS", "2"))
EPOCHS = int(os.environ.get("RAVNEST_BENCH_COMPRESSION_EPOCHS", "10"))
STEPS = int(os.environ.get("RAVNEST_BENCH_COMPRESSION_STEPS", "2000"))
ROUNDS = 15
SIZES = (1 << 20, 4 << 20, 16 << 20)
PORTS = (29710, 29720)
NUDGE = 1e-3
LOSSY = [name for name in CODECS if name != "raw"]
_RUN = "0" * 32


# Speed


def _speed() -> str:
    lines = ["| codec | tensor | encode, GB/s | decode, GB/s | bytes |", "|---|--:|--:|--:|--:|"]
    for size in SIZES:
        tensor = torch.randn(size // 4)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in LOSSY}
        for _ in range(ROUNDS):
            for name in LOSSY:
                _rates(CODECS[name], tensor)  # allocate first: page faults cost more than a codec
                found[name].append(_rates(CODECS[name], tensor))
        for name, rates in found.items():
            encode, decode = (statistics.median(column) for column in zip(*rates, strict=True))
            ratio = size / CODECS[name].nbytes(TensorLayout(tensor.dtype, tuple(tensor.shape), (1,)))
            lines.append(
                f"| {name} | {size >> 20} MiB | {encode:.1f} | {decode:.1f} | {ratio:.2f} x fewer |"
            )
    return "\n".join(lines) + "\n\n`int8` is required to reach 1 GB/s in each direction."


def _rates(codec: Codec, tensor: torch.Tensor) -> tuple[float, float]:
    layout = TensorLayout(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
    begin = time.thread_time()
    payload = codec.encode(tensor, layout).payload
    middle = time.thread_time()
    codec.decode(payload, layout)
    end = time.thread_time()
    return tensor.nbytes / (middle - begin) / 1e9, tensor.nbytes / (end - middle) / 1e9


# Bytes and losses


class _Inbox:
    def __init__(self) -> None:
        self.messages: SimpleQueue[Message] = SimpleQueue()

    def on_message(self, link: Link, message: Message) -> None:
        self.messages.put(message)

    def on_lost(self, link: Link, reason: str) -> None:
        raise AssertionError(reason)


class Wires:
    """Links between neighbouring stages; the sender waits for each value to arrive."""

    def __init__(self, stages: int, codec: str) -> None:
        network = MemoryNetwork()
        self._transports = [network.transport() for _ in range(stages)]
        self._links: dict[tuple[int, int], Link] = {}
        self._inboxes = [_Inbox() for _ in range(stages)]
        hellos = [Hello(PROTOCOL, "plan", place, 0, place, codec=codec) for place in range(stages)]
        for near in range(stages - 1):
            far = near + 1
            made: SimpleQueue[Link] = SimpleQueue()
            address = self._transports[far].serve(
                Address("127.0.0.1", 0), _always(hellos[far]), self._inboxes[far], made.put
            )
            self._links[near, far] = self._transports[near].dial(
                address, hellos[near], self._inboxes[near], deadline=10
            )
            self._links[far, near] = made.get(timeout=10)

    def carry(self, source: int, target: int, values: dict[str, Any]) -> dict[str, Any]:
        """Send values from one stage to its neighbour and return what arrives."""
        microbatch = MicrobatchId(0, 0)
        forward = target > source
        head: AnyHead = Forward(_RUN, microbatch, 1) if forward else Backward(_RUN, microbatch)
        self._links[source, target].send(Message(head, values))
        return dict(self._inboxes[target].messages.get(timeout=10).values)

    def close(self) -> tuple[int, int]:
        """Return the total bytes sent and the number of clamped values."""
        links = self._links
        found = sum(k.sent_bytes for k in links.values()), sum(k.clamped for k in links.values())
        for (source, _), link in links.items():
            link.send(Message(Goodbye(source)))
        for transport in self._transports:
            transport.close()
        return found


def _always(hello: Hello) -> Callable[[Hello], Hello]:
    return lambda _peer: hello


@dataclass(frozen=True)
class Trained:
    """Result of one run."""

    loss: float
    sent: int
    clamped: int


@dataclass(frozen=True)
class Task:
    """Task to learn."""

    name: str
    make: Callable[[], nn.Module]
    samples: Callable[[int], Iterable[tuple[torch.Tensor, torch.Tensor]]]
    """Return the data of a seed."""
    loss_of: Callable[[Any, Any], torch.Tensor]
    updates: int
    seeds: int


def _digits_samples(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    digits()
    from model import loaders  # noqa: PLC0415

    loader, _ = loaders(seed)
    for _ in range(EPOCHS):
        yield from loader


def _sorting_samples(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _, sample in zip(range(STEPS), sequences(seed), strict=False):
        yield sample


def train(task: Task, codec: str, seed: int, nudge: float = 0.0) -> Trained:
    """Train once."""
    set_seed(seed)
    model = task.make()
    example = next(iter(task.samples(0)))[0]
    parts = split(model, (example,), stages=STAGES, check=False).stages
    modules = [StageModule(p.spec, {k: t.clone() for k, t in p.tensors.items()}) for p in parts]
    with torch.no_grad():
        for parameter in (p for module in modules for p in module.parameters()):
            parameter.add_(parameter * torch.randn_like(parameter), alpha=nudge)
    schedule = {"max_lr": 1e-3, "total_steps": task.updates + 1, "cycle_momentum": False}
    rule = UpdateRule(
        torch.optim.AdamW,
        {"lr": 1e-3},
        torch.optim.lr_scheduler.OneCycleLR,
        schedule,
        scheduler_each_epoch=False,
    )
    wires = Wires(STAGES, codec)
    stages = [StageExecution(module, rule, seed=0, stash=False) for module in modules]
    losses = [
        _train_batch(stages, wires, task, MicrobatchId(0, number), batch)
        for number, batch in enumerate(task.samples(seed))
    ]
    sent, clamped = wires.close()
    last = losses[-max(1, len(losses) // 10) :]
    return Trained(statistics.fmean(last), sent, clamped)


def _train_batch(
    stages: Sequence[StageExecution],
    wires: Wires,
    task: Task,
    number: MicrobatchId,
    batch: tuple[torch.Tensor, torch.Tensor],
) -> float:
    """Train on one whole batch in all stages and return its loss."""
    *earlier, leaf = stages
    (entry,) = stages[0].module.graph.inputs
    values: dict[str, Any] = {entry.name: batch[0]}
    for stage in earlier:
        outputs, _ = stage.forward(number, stage.updates.done, values)
        values = wires.carry(stage.index, stage.index + 1, outputs)
    part = LossPart(lambda outputs: task.loss_of(leaf.output(outputs), batch[1]))
    _, loss = leaf.forward(number, leaf.updates.done, values, part)
    gradients: dict[str, torch.Tensor] = {}
    for stage in reversed(stages):
        gradients = stage.backward(number, gradients)
        if stage.index > 0:
            gradients = wires.carry(stage.index, stage.index - 1, gradients)
    for stage in stages:
        stage.step(1)
    assert loss is not None
    return loss


def _learning() -> str:
    sorting = f"GPT that sorts, {LAYERS} layers of {WIDTH}, {STEPS} updates"
    tasks = [
        Task(
            f"digits CNN, {EPOCHS} epochs",
            digits,
            _digits_samples,
            nn.functional.cross_entropy,
            sum(1 for _ in _digits_samples(0)),
            SEEDS,
        ),
        Task(
            sorting,
            lambda: GPT(KINDS, WIDTH, LAYERS, 2 * LENGTH - 1),
            _sorting_samples,
            token_loss,
            STEPS,
            SORTING_SEEDS,
        ),
    ]
    return "\n\n".join(_table(task) for task in tasks)


def _table(task: Task) -> str:
    found: dict[str, list[Trained]] = {name: [] for name in ("raw", "nudged", *LOSSY)}
    for seed in range(task.seeds):
        for name, runs in found.items():
            nudged = name == "nudged"
            runs.append(train(task, "raw" if nudged else name, seed, NUDGE if nudged else 0.0))
            print(task.name, seed, name, runs[-1], file=sys.stderr, flush=True)
    sent = statistics.fmean(run.sent for run in found["raw"])
    loss = statistics.fmean(run.loss for run in found["raw"])
    lines = [
        f"{task.name}, means of {task.seeds} seeds:",
        "",
        "| codec | MB sent | times fewer | required | loss | change | change per seed | clamped |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, runs in found.items():
        size, end = statistics.fmean(r.sent for r in runs), statistics.fmean(r.loss for r in runs)
        due = {"raw": "", "nudged": "", "int8": "3.7"}.get(name, "1.95")
        clamped = sum(run.clamped for run in runs)
        changes = [run.loss / exact.loss - 1 for run, exact in zip(runs, found["raw"], strict=True)]
        lines.append(
            f"| {name} | {size / 1e6:.1f} | {sent / size:.2f} x | {due} | {end:.4f} | "
            f"{end / loss - 1:+.2%} | {min(changes):+.1%} to {max(changes):+.1%} | {clamped} |"
        )
    return "\n".join(lines)


# Slow links


def _links() -> str:
    if not possible():
        return f"Links of {MEGABITS} Mbit/s were not measured: that needs root and iproute2."
    lines = [
        f"Three nodes with links of {MEGABITS} Mbit/s, 8 micro-batches per batch, samples per second:",
        "",
        "| model | uncompressed | int8 | ratio | all | required |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for work, required in ((THIN_GPT, "2.0"), (SMALL_GPT, "")):
        with Lan(STAGES, MEGABITS) as lan:
            plain, small = race(work, lan)
        ratios = [b.samples / a.samples for a, b in zip(plain, small, strict=True)]
        rates = [statistics.median(rate.samples for rate in side) for side in (plain, small)]
        lines.append(
            f"| {work.name} | {rates[0]:.0f} | {rates[1]:.0f} | "
            f"**{statistics.median(ratios):.2f}** | "
            f"{min(ratios):.2f} to {max(ratios):.2f} | {required} |"
        )
    return "\n".join([*lines, "", _NOTE])


_NOTE = """\
Compression helps if the links are the bottleneck. All three nodes share the cores of one machine
here: the larger model needs about as long to compute as to send its tensors, so the gain is smaller."""


def race(work: Workload, lan: Lan) -> list[list[Rate]]:
    """Train uncompressed and with ``int8`` in turns."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        teams = []
        for compression, port in zip((False, "int8"), PORTS, strict=True):
            folder = Path(scratch) / str(port)
            names = work.form(folder, [f"{host}:{port}" for host in lan.hosts], MEGABITS)
            seats = [Seat(work.name, str(folder), name, compression=compression) for name in names]
            teams.append(stack.enter_context(team("ravnest", seats, lan)))
        for each in teams:
            each.run(SECONDS)  # warm-up
        found: list[list[Rate]] = [[], []]
        for repetition in range(REPETITIONS):
            for which in (0, 1) if repetition % 2 else (1, 0):
                found[which].append(teams[which].run(SECONDS))
            print(work.name, *(f"{side[-1].samples:.0f}" for side in found), file=sys.stderr, flush=True)
    return found


PARTS = {"speed": _speed, "learning": _learning, "links": _links}


def measure(parts: Sequence[str] = tuple(PARTS)) -> str:
    """Return the report as Markdown."""
    torch.set_num_threads(1)
    return "\n\n".join(PARTS[part]() for part in parts)


if __name__ == "__main__":
    print(measure(sys.argv[1:] or tuple(PARTS)))
