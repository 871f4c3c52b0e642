"""Whether asynchronous training learns what synchronous training learns from the same samples.

The digits CNN of the demo trains for 30 epochs with three nodes (Node and Trainer in threads, over the
in-memory network, at the window that Ravnest chooses) and in one process. The GPT learns to sort: it
reads digits and has to go on with the same digits in order. Its loss is a language model's, over the
whole sequence; the first half is random, so that nothing gets below the floor. The GPT trains under
virtual time (`virtual.py`): the same machines, stages and optimizers, in a fixed order, so that a run
comes out the same each time. Synchronous training is that of a single process, whatever the stages.
Run as a script it prints its report; arguments choose parts (`digits`, `sorting`).
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from virtual import VirtualPipeline
from workloads import DIGITS, GPT, NODE_DATA, digits, free_addresses

from ravnest import Node, Trainer, set_seed
from ravnest.runtime.schedule.machine import Schedule
from ravnest.runtime.schedule.simulator import LinkCost, StageCost
from ravnest.runtime.schedule.window import choose_window
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.split import split
from ravnest.split.module import StageModule
from ravnest.transport.memory import MemoryNetwork

SEEDS = int(os.environ.get("RAVNEST_BENCH_SEEDS", "5"))
EPOCHS = int(os.environ.get("RAVNEST_BENCH_EPOCHS", "30"))
NODES = 3
DEADLINE = 600.0
DIGITS_OPTIMIZER: dict[str, Any] = {"lr": 1e-3}


# The digits CNN


def _digits_data(seed: int) -> tuple[Any, Any]:
    digits()
    from model import loaders  # noqa: PLC0415

    return loaders(seed)


def single_accuracy(seed: int) -> float:
    """Of one process."""
    train_loader, val_loader = _digits_data(seed)
    set_seed(seed)
    model = digits()
    optimizer = torch.optim.AdamW(model.parameters(), **DIGITS_OPTIMIZER)
    for _ in range(EPOCHS):
        for images, labels in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        hits = [(model(images).argmax(1) == labels).float() for images, labels in val_loader]
    return float(torch.cat(hits).mean())


@dataclass(frozen=True)
class Learned:
    """What three nodes made of it."""

    accuracy: float
    window: int
    staleness: int


def cluster_accuracy(folder: Path, names: Sequence[str], seed: int) -> Learned:
    """Of three nodes, with the same first weights as the single process."""
    set_seed(seed)
    model = digits()
    data = [_digits_data(seed) for _ in names]
    network = MemoryNetwork()
    found: list[Learned] = []

    def provide(name: str, loaders: tuple[Any, Any]) -> None:
        train_loader, val_loader = loaders
        with Node(
            name,
            model=model,
            optimizer=torch.optim.AdamW,
            optimizer_params=DIGITS_OPTIMIZER,
            criterion=nn.functional.cross_entropy,
            labels=train_loader,
            test_labels=val_loader,
            seed=seed,
            folder=folder / NODE_DATA,
            loss_filename=folder / f"losses_{seed}.txt",
            progress=False,
            transport=network.transport(),
        ) as node:
            trainer = Trainer(
                node,
                train_loader=train_loader,
                val_loader=val_loader,
                epochs=EPOCHS,
                val_freq=EPOCHS + 1,
            )
            trainer.train()
            state = node._ensure_started().progress.state
            window, staleness = state.window, state.staleness
            accuracy = trainer.evaluate()
            if node.is_root:
                found.append(Learned(accuracy, window, staleness))

    threads = [
        threading.Thread(target=provide, args=each, daemon=True)
        for each in zip(names, data, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    (learned,) = found
    return learned


def _digits() -> str:
    alone, nodes = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        names = DIGITS.form(folder, free_addresses(NODES))
        os.chdir(folder)  # where figures of validations go
        for seed in range(SEEDS):
            alone.append(single_accuracy(seed))
            nodes.append(cluster_accuracy(folder, names, seed))
            print("digits", seed, alone[-1], nodes[-1], file=sys.stderr, flush=True)
        os.chdir(Path(__file__).parent)
    means = statistics.mean(alone), statistics.mean(each.accuracy for each in nodes)
    lines = [
        f"Digits CNN, {EPOCHS} epochs, AdamW, {SEEDS} seeds: {means[0]:.2%} on average in one process, "
        f"{means[1]:.2%} with {NODES} nodes, {100 * (means[1] - means[0]):+.2f} points. The aim is at "
        "most one point less.",
        "",
        "| seed | one process | nodes | W | staleness |",
        "|--:|--:|--:|--:|--:|",
    ]
    for seed, (one, many) in enumerate(zip(alone, nodes, strict=True)):
        lines.append(f"| {seed} | {one:.2%} | {many.accuracy:.2%} | {many.window} | {many.staleness} |")
    return "\n".join(lines)


# The GPT that sorts

LENGTH, KINDS = 6, 8
WIDTH, LAYERS, BATCH = 32, 4, 32
STEPS = int(os.environ.get("RAVNEST_BENCH_STEPS", "5000"))
SORTING_SEEDS = int(os.environ.get("RAVNEST_BENCH_SORTING_SEEDS", "1"))
PEAK = 1e-3
COST, LINK = StageCost(0.01, 0.02), LinkCost(0.001, 0.001)
FLOOR = (LENGTH - 1) / (2 * LENGTH - 1) * math.log(KINDS)
STAGES = (2, 4, 8)


def sequences(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Digits, then the same in order; and what comes next at each place."""
    made = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        drawn = torch.randint(0, KINDS, (BATCH, LENGTH), generator=made)
        whole = torch.cat([drawn, drawn.sort(1).values], 1)
        yield whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Over all places."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Sorted:
    """One run."""

    loss: float
    """Mean over the last tenth of the updates."""
    staleness: int

    @property
    def in_order(self) -> float:
        """The loss of the places that can be known."""
        return (self.loss - FLOOR) * (2 * LENGTH - 1) / LENGTH


def learn_to_sort(stages: int, schedule: Schedule, window: int, seed: int, **rule: Any) -> Sorted:
    """Train the GPT once; ``rule`` are further settings of the update rule."""
    set_seed(seed)
    model = GPT(KINDS, WIDTH, LAYERS, 2 * LENGTH - 1)
    parts = split(model, (next(sequences(0))[0],), stages=stages, check=False).stages
    modules = [StageModule(p.spec, {k: t.clone() for k, t in p.tensors.items()}) for p in parts]
    pipeline = VirtualPipeline(
        modules,
        UpdateRule(
            torch.optim.AdamW,
            {"lr": PEAK},
            torch.optim.lr_scheduler.OneCycleLR,
            {"max_lr": PEAK, "total_steps": STEPS + 1, "pct_start": 0.15, "cycle_momentum": False},
            scheduler_each_epoch=False,
            **rule,
        ),
        token_loss,
        schedule=schedule,
        window=window,
        cost=COST,
        link=LINK,
    )
    pipeline.train(sequences(seed))
    last = pipeline.losses[-max(1, STEPS // 10) :]
    return Sorted(statistics.fmean(last), max(pipeline.stalenesses))


def _windows(stages: int) -> tuple[int, int]:
    chosen = choose_window(
        [COST] * stages, [LINK] * (stages - 1), update_frequency=1, schedule="async", max_window=64
    )
    return chosen.window, 3 * stages


def _sorting() -> str:
    seeds = range(SORTING_SEEDS)
    sync = [learn_to_sort(2, "sync", 1, seed) for seed in seeds]
    print("sync", sync, file=sys.stderr, flush=True)
    reference = statistics.fmean(run.loss for run in sync)
    lines = [
        f"GPT of {LAYERS} layers of {WIDTH} that sorts {LENGTH} of {KINDS} digits, {STEPS} updates of "
        f"{BATCH} samples, AdamW with warm-up and decay, mean of {SORTING_SEEDS} seeds. The "
        f"floor is {FLOOR:.4f}; synchronous training ends at {reference:.4f}, that is "
        f"{statistics.fmean(run.in_order for run in sync):.4f} for the places that can be known. "
        "The aim is at most 2% more. An update a micro-batch: the worst case for staleness, which "
        "`update_frequency` divides.",
        "",
        "| stages | W | staleness (Root) | async | | known places | `look_ahead` | | known places |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for stages in STAGES:
        for window in _windows(stages):
            cells = []
            for look_ahead in (False, True):
                runs = [
                    learn_to_sort(stages, "async", window, seed, look_ahead=look_ahead) for seed in seeds
                ]
                print(stages, window, look_ahead, runs, file=sys.stderr, flush=True)
                loss = statistics.fmean(run.loss for run in runs)
                known = statistics.fmean(run.in_order for run in runs)
                cells.append(f"{loss:.4f} | {loss / reference - 1:+.1%} | {known:.4f}")
            lines.append(f"| {stages} | {window} | {runs[0].staleness} | {' | '.join(cells)} |")
    return "\n".join(lines)


PARTS = {"digits": _digits, "sorting": _sorting}


def measure(parts: Sequence[str] = tuple(PARTS)) -> str:
    """The report, as Markdown."""
    torch.set_num_threads(1)
    return "\n\n".join(PARTS[part]() for part in parts)


if __name__ == "__main__":
    print(measure(sys.argv[1:] or tuple(PARTS)))
