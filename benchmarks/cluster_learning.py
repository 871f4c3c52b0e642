"""Cost of several clusters at equal samples: validation loss against one process.

The tasks of `learning.py` train in one process and in k clusters, for twice their epochs and with the
same learning-rate schedule. Each cluster has its share of the data and makes 1/k of the updates. A
cluster computes what one process computes, so that clusters are models in one process here, averaged
after every N updates and at the end, all at once (blocking rounds). "Larger batch" is one process with k
times the batch: it makes as many updates as a cluster and has nothing to average.

The first table has the learning rate of one process, and so has the last one: the samples that clusters
need for the loss of one process. In the second, each training has the best of
several learning rates, and the average is also taken with outer momentum as in DiLoCo (Douillard et al.
2023): it does not replace the weights, but moves those of the last round by their change plus a share
of earlier changes (Nesterov's momentum, rate 0.9). The last round is a plain average. Where one process
ends near 0, the table has losses instead of differences. Run as a script to print the report; arguments
choose tasks by the first word of their names.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from learning_tasks import TASKS, Task
from replicas import shares
from torch import nn
from torch.utils.data import DataLoader

SEEDS = int(os.environ.get("RAVNEST_BENCH_SEEDS", "3"))
CLUSTERS = (2, 4)
EPOCHS = int(os.environ.get("RAVNEST_BENCH_EPOCHS", "2"))
"""Factor of the epochs of each task: clusters make few updates otherwise."""
INTERVALS = (5, 20, None)
"""Updates between rounds; None: once per epoch."""
INTERVAL = 10
"""Updates between rounds where learning rates are compared."""
RATES = (1.0, 2.0, 4.0, 8.0)
"""Compared learning rates, as factors of the task's."""
OUTER_RATE, OUTER_MOMENTUM = 0.9, 0.5
SAMPLES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)
"""Tried lengths of trainings, relative to one process, until its loss is reached."""
NEAR_ZERO = 0.01
"""Loss of one process below which differences to it say nothing."""

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Training:
    """Settings of one training."""

    clusters: int = 1
    interval: int | None = None
    """Updates between rounds; None: once per epoch."""
    momentum: float = 0.0
    """Outer momentum; 0 for a plain average."""
    rate: float = 1.0
    """Factor of the task's learning rate."""
    batch: int = 1
    """Factor of the task's batch."""
    samples: float = 1.0
    """Factor of the task's samples; the schedule of the learning rate is stretched with it."""

    def loss(self, task: Task) -> float:
        """Return the mean validation loss over the seeds."""
        return statistics.fmean(_train(task, seed, self) for seed in range(SEEDS))


class Cluster:
    """Model of a cluster with its data and optimizer."""

    def __init__(
        self, task: Task, model: nn.Module, loader: DataLoader[Any], updates: int, rate: float
    ) -> None:
        self.model = model
        self._task = task
        self._loader = loader
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
        self._scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, max_lr=rate, total_steps=updates, cycle_momentum=False
        )
        self._batches = self._endless()

    def update(self) -> None:
        """Make one update."""
        batch, task = next(self._batches), self._task
        self._optimizer.zero_grad()
        task.loss(self.model(*batch[:-1]), batch).backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), task.clip)
        self._optimizer.step()
        self._scheduler.step()

    def weights(self) -> Weights:
        """Return copies of the averaged tensors."""
        return {k: t.clone() for k, t in self.model.state_dict().items() if t.is_floating_point()}

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self._loader


class OuterOptimizer:
    """Average of the clusters, with momentum over rounds; buffers are averaged plainly."""

    def __init__(self, first: nn.Module, momentum: float) -> None:
        self._momentum = momentum
        self._last = {key: weight.detach().clone() for key, weight in first.named_parameters()}
        self._velocity = {key: torch.zeros_like(weight) for key, weight in self._last.items()}

    def average(self, members: Sequence[Cluster], *, final: bool) -> None:
        """Give all clusters the new weights; a final round is a plain average."""
        states = [member.weights() for member in members]
        found = {key: torch.stack([state[key] for state in states]).mean(0) for key in states[0]}
        if self._momentum and not final:
            for key in self._last:
                found[key] = self._moved(key, found[key])
        for member in members:
            member.model.load_state_dict(found, strict=False)

    def _moved(self, key: str, average: torch.Tensor) -> torch.Tensor:
        change = average - self._last[key]
        self._velocity[key].mul_(self._momentum).add_(change)
        self._last[key] += OUTER_RATE * (change + self._momentum * self._velocity[key])
        return self._last[key]


@cache
def _train(task: Task, seed: int, training: Training) -> float:
    """Return the validation loss of the last average."""
    data, first, clusters = task.data(seed)[0], task.first(seed), training.clusters
    batch, rate = task.batch * training.batch, task.rate * training.rate
    per_epoch = max(1, len(data) // (clusters * batch))
    updates = round(per_epoch * task.epochs * training.samples)
    interval = training.interval or per_epoch
    members = []
    for number, share in enumerate(shares(data, clusters, seed)):
        order = torch.Generator().manual_seed(1000 * seed + number)
        loader = DataLoader(share, batch, shuffle=True, generator=order, drop_last=True)
        members.append(Cluster(task, copy.deepcopy(first), loader, updates, rate))
    outer = OuterOptimizer(first, training.momentum)
    for update in range(1, updates + 1):
        for member in members:
            member.update()
        if clusters > 1 and (update % interval == 0 or update == updates):
            outer.average(members, final=update == updates)
    return task.validation_loss(members[0].model, seed)


# The report


@dataclass(frozen=True)
class Figure:
    """Result of a training in the report."""

    loss: float
    rate: float | None = None
    """Factor of the learning rate that was found best."""

    def relative(self, alone: float) -> str:
        """Describe the loss as the difference to one process, or as it is if that ends near 0."""
        shown = f"{self.loss:.4f}" if alone < NEAR_ZERO else f"{self.loss / alone - 1:+.0%}"
        return shown if self.rate is None else f"{shown} ({self.rate:g})"


def _cost(task: Task, clusters: int) -> list[Figure]:
    """Return the results of the first table."""
    rounds = [Training(clusters, interval) for interval in INTERVALS]
    return [Figure(training.loss(task)) for training in (Training(batch=clusters), *rounds)]


def _momentum(task: Task, clusters: int) -> list[Figure]:
    """Return the results of the second table."""
    plain, momentum = (Training(clusters, INTERVAL, momentum=m) for m in (0.0, OUTER_MOMENTUM))
    tuned = (Training(), Training(batch=clusters), plain, momentum)
    given = (plain, replace(plain, rate=2.0), momentum)
    return [
        *(Figure(training.loss(task)) for training in given),
        *(_best(task, training) for training in tuned),
    ]


def _best(task: Task, training: Training) -> Figure:
    losses = {rate: replace(training, rate=rate).loss(task) for rate in RATES}
    best = min(losses, key=lambda rate: losses[rate])
    return Figure(losses[best], best)


def _samples_needed(task: Task, clusters: int) -> float | None:
    """Return the first factor of the samples with which clusters reach the loss of one process."""
    alone = Training().loss(task)
    trainings = (Training(clusters, INTERVAL, samples=factor) for factor in SAMPLES)
    return next((each.samples for each in trainings if each.loss(task) <= alone), None)


def _samples_table(tasks: Sequence[Task]) -> list[str]:
    """Return a table of the samples that clusters need, with a row for each task."""
    lines = [
        "| task |" + "".join(f" {clusters} clusters |" for clusters in CLUSTERS),
        "|---|" + "--:|" * len(CLUSTERS),
    ]
    for task in tasks:
        needed = (_samples_needed(task, clusters) for clusters in CLUSTERS)
        cells = " | ".join(f"> {SAMPLES[-1]:g}" if each is None else f"{each:g}" for each in needed)
        lines.append(f"| {task.name} | {cells} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def _table(
    tasks: Sequence[Task], columns: Sequence[str], results: Callable[[Task, int], list[Figure]]
) -> list[str]:
    """Return a table with a row for each task, and their mean, for each number of clusters."""
    lines = [
        f"| task | clusters | one process | {' | '.join(columns)} |",
        "|---|--:|--:|" + "--:|" * len(columns),
    ]
    for clusters in CLUSTERS:
        ratios: list[list[float]] = []
        for task in tasks:
            alone, figures = Training().loss(task), results(task, clusters)
            cells = " | ".join(figure.relative(alone) for figure in figures)
            lines.append(f"| {task.name} | {clusters} | {alone:.4f} | {cells} |")
            print(lines[-1], file=sys.stderr, flush=True)
            if alone >= NEAR_ZERO:
                ratios.append([figure.loss / alone for figure in figures])
        if ratios:
            means = (statistics.geometric_mean(column) for column in zip(*ratios, strict=True))
            cells = " | ".join(f"**{mean - 1:+.0%}**" for mean in means)
            lines.append(f"| geometric mean | {clusters} | | {cells} |")
    return lines


def measure(names: Sequence[str] = ()) -> str:
    """Return the report as Markdown; ``names`` are first words of tasks, by default all."""
    torch.set_num_threads(1)
    tasks = [
        replace(task, epochs=EPOCHS * task.epochs)
        for task in TASKS
        if not names or task.name.split()[0].strip(",") in names
    ]
    every = [f"every {n} updates" if n else "every epoch" for n in INTERVALS]
    momentum = f"outer momentum {OUTER_MOMENTUM:g}"
    best = [f"best rate: {kind}" for kind in ("one process", "larger batch", "plain average", momentum)]
    factors = ", ".join(f"{rate:g}" for rate in RATES)
    lines = [
        f"Validation loss of one process, mean of {SEEDS} seeds; differences to it at equal samples.",
        "",
        *_table(tasks, ("larger batch", *every), _cost),
        "",
        f"Averages every {INTERVAL} updates. All differences are relative to one process at the task's "
        f"learning rate; the number in brackets is the best factor of that rate among {factors}.",
        "",
        *_table(tasks, ("plain average", "plain average, twice the rate", momentum, *best), _momentum),
        "",
        "Samples with which clusters reach the loss of one process, relative to its samples, at its "
        f"learning rate; averages every {INTERVAL} updates.",
        "",
        *_samples_table(tasks),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(measure(sys.argv[1:]))
