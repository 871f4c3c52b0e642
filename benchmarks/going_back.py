"""Cost of clusters that go back to a checkpoint: validation loss with and without catching up.

The tasks of `learning.py` train in three clusters, for five times their epochs, and average every 10
updates. Again and again a cluster, drawn at random, goes back to a checkpoint (weights, optimizer,
position in the data), as after the loss of a node; the others train on. "Going on" is a cluster that
trains from its checkpoint and averages at the next round with the weight of its samples. "Catching up"
is what Ravnest does: the cluster first takes the average of the others. All clusters make all their
updates, so that those that go back take longer. Clusters are models in one process here, as in
`cluster_learning.py`. Run as a script to print the report; arguments choose tasks by the first word of
their names.
"""

from __future__ import annotations

import copy
import os
import random
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from learning_tasks import TASKS, Task
from replicas import shares
from torch import nn
from torch.utils.data import DataLoader

SEEDS = int(os.environ.get("RAVNEST_BENCH_SEEDS", "2"))
EPOCHS = int(os.environ.get("RAVNEST_BENCH_EPOCHS", "5"))
"""Factor of the epochs of each task: clusters make few updates otherwise."""
CLUSTERS = 3
INTERVAL = 10
"""Updates between rounds."""
NEAR_ZERO = 0.01
"""Undisturbed loss below which differences to it say nothing: the table has losses then."""
LAST_LOSS = 0.9
"""Share of the training after which no cluster goes back."""

Returning = Literal["going on", "catching up"]


@dataclass(frozen=True)
class Losses:
    """How often a cluster goes back, and how far, in updates."""

    every: int
    back: int


LOSSES = (Losses(every=30, back=15), Losses(every=50, back=40))


@dataclass(frozen=True)
class Saved:
    """State of a cluster at an update."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    updates: int
    samples: int
    rounds: int


class Cluster:
    """Model of a cluster with its batches, optimizer and newest checkpoints."""

    def __init__(self, task: Task, model: nn.Module, batches: Sequence[Any], keep: int) -> None:
        self.model = model
        self.updates = 0
        self.samples = 0
        """Samples since the last average."""
        self.rounds = 0
        """Rounds so far, of which this one has the average."""
        self.all_updates = len(batches)
        self._task = task
        self._batches = batches
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, fused=True)
        self._scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, max_lr=task.rate, total_steps=self.all_updates + 1, cycle_momentum=False
        )
        self._saved: deque[Saved] = deque(maxlen=keep)

    @property
    def trains(self) -> bool:
        """True until all updates are made."""
        return self.updates < self.all_updates

    def update(self) -> None:
        """Make one update."""
        batch, task = self._batches[self.updates], self._task
        self._saved.append(self._state())
        self._optimizer.zero_grad()
        task.loss(self.model(*batch[:-1]), batch).backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), task.clip)
        self._optimizer.step()
        self._scheduler.step()
        self.updates += 1
        self.samples += len(batch[0])

    def go_back(self) -> None:
        """Continue from the oldest kept checkpoint."""
        state = self._saved[0]
        self._saved.clear()
        self.model.load_state_dict(state.weights)
        self._optimizer.load_state_dict(copy.deepcopy(state.optimizer))
        self._scheduler.load_state_dict(copy.deepcopy(state.scheduler))
        self.updates, self.samples, self.rounds = state.updates, state.samples, state.rounds

    def _state(self) -> Saved:
        return Saved(
            {key: value.clone() for key, value in self.model.state_dict().items()},
            copy.deepcopy(self._optimizer.state_dict()),
            copy.deepcopy(self._scheduler.state_dict()),
            self.updates,
            self.samples,
            self.rounds,
        )


def _average(members: Sequence[Cluster], weights: Sequence[float]) -> None:
    """Give all clusters the weighted mean; they are up to date then."""
    total = sum(weights)
    states = [member.model.state_dict() for member in members]
    found = {
        key: torch.stack([s[key] * (w / total) for s, w in zip(states, weights, strict=True)]).sum(0)
        for key, value in states[0].items()
        if value.is_floating_point()
    }
    newest = max(member.rounds for member in members) + 1
    for member in members:
        member.model.load_state_dict(found, strict=False)
        member.samples, member.rounds = 0, newest


def _train(task: Task, seed: int, losses: Losses | None, returning: Returning) -> float:
    """Return the validation loss of the last average."""
    draw = random.Random(seed)
    first = task.first(seed)
    members = []
    for number, share in enumerate(shares(task.data(seed)[0], CLUSTERS, seed)):
        order = torch.Generator().manual_seed(1000 * seed + number)
        loader = DataLoader(share, task.batch, shuffle=True, generator=order, drop_last=True)
        batches = [batch for _ in range(task.epochs) for batch in loader]
        keep = 1 if losses is None else losses.back
        members.append(Cluster(task, copy.deepcopy(first), batches, keep))
    last = LAST_LOSS * min(member.all_updates for member in members)
    steps = 0
    while any(member.trains for member in members):
        steps += 1
        for member in members:
            if member.trains:
                member.update()
        newest = max(member.rounds for member in members)
        lags = [returning == "catching up" and member.rounds < newest for member in members]
        if steps % INTERVAL == 0 or any(lags):
            counted = zip(members, lags, strict=True)
            weights = [0.0 if behind else float(member.samples) for member, behind in counted]
            _average(members, weights if sum(weights) else [1.0] * CLUSTERS)
        lost = losses is not None and steps % losses.every == 0
        if lost and max(member.updates for member in members) < last:
            draw.choice(members).go_back()
    _average(members, [1.0] * CLUSTERS)
    return task.validation_loss(members[0].model, seed)


def _loss(task: Task, losses: Losses | None = None, returning: Returning = "going on") -> float:
    return statistics.fmean(_train(task, seed, losses, returning) for seed in range(SEEDS))


def measure(names: Sequence[str] = ()) -> str:
    """Return the report as Markdown; ``names`` are first words of tasks, by default all."""
    torch.set_num_threads(1)
    tasks = [
        replace(task, epochs=EPOCHS * task.epochs)
        for task in TASKS
        if not names or task.name.split()[0].strip(",") in names
    ]
    ways: tuple[Returning, ...] = ("going on", "catching up")
    columns = [f"{way}: {each.back} updates back, every {each.every}" for each in LOSSES for way in ways]
    lines = [
        f"Validation loss of an undisturbed training, mean of {SEEDS} seeds, and differences to it; "
        "losses instead of differences where it is near 0.",
        "",
        f"| task | undisturbed | {' | '.join(columns)} |",
        "|---|--:|" + "--:|" * len(columns),
    ]
    ratios = []
    for task in tasks:
        alone = _loss(task)
        found = [_loss(task, each, way) for each in LOSSES for way in ways]
        relative = [loss / alone for loss in found]
        if alone >= NEAR_ZERO:
            ratios.append(relative)
        cells = _cells(relative) if alone >= NEAR_ZERO else " | ".join(f"{x:.5f}" for x in found)
        lines.append(f"| {task.name} | {alone:.5f} | {cells} |")
        print(lines[-1], file=sys.stderr, flush=True)
    if ratios:
        means = [statistics.geometric_mean(column) for column in zip(*ratios, strict=True)]
        lines.append(f"| geometric mean | | {_cells(means)} |")
    return "\n".join(lines)


def _cells(ratios: Sequence[float]) -> str:
    return " | ".join(f"{ratio - 1:+.1%}" for ratio in ratios)


if __name__ == "__main__":
    print(measure(sys.argv[1:]))
