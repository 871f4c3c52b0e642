"""Loss of clusters that average by the mean and by the trimmed mean, with and without a lying cluster.

Tasks of `learning.py` train in four clusters, which are models in one process here, as in
`cluster_learning.py`: each has a quarter of the data, and they are averaged every 10 updates and at the
end. All clusters train honestly, but the last one sends wrong values in every round. All lies have the
scale of the parameters, so that the checks of sizes do not notice them: the sign flipped; noise of the
same root mean square for each tensor; the initial weights, as from a cluster that does not train.
Run as a script to print the report.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from cluster_learning import Cluster, Weights
from learning_tasks import TASKS, Task
from replicas import shares
from torch.utils.data import DataLoader

from ravnest.store.robust_mean import trim_of, trimmed_mean

SEEDS = int(os.environ.get("RAVNEST_BENCH_SEEDS", "3"))
CLUSTERS = 4
INTERVAL = 10
"""Updates between rounds."""
EPOCHS = 2
"""Factor of the epochs of each task, as in ``cluster_learning.py``."""
NAMES = ("GPT", "BERT-like", "CNN")

Mean = Callable[[Sequence[torch.Tensor]], torch.Tensor]
Lie = Callable[[Weights, Weights], Weights]
"""Function of a cluster's weights and of the initial ones."""


def plain(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean."""
    return torch.stack(list(values)).mean(0)


def trimmed(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the trimmed mean, computed as nodes compute it."""
    flat = [each.flatten().numpy() for each in values]
    return torch.from_numpy(trimmed_mean(flat, trim_of(len(flat)))).view(values[0].shape)


def _noise(weights: Weights, _: Weights) -> Weights:
    draw = torch.Generator().manual_seed(7)
    return {
        key: torch.randn(value.shape, generator=draw) * (value.norm() / math.sqrt(max(value.numel(), 1)))
        for key, value in weights.items()
    }


MEANS: dict[str, Mean] = {"mean": plain, "trimmed mean": trimmed}
LIES: dict[str, Lie | None] = {
    "none": None,
    "the sign flipped": lambda weights, _: {key: -value for key, value in weights.items()},
    "noise": _noise,
    "the initial weights": lambda _, first: first,
}


@dataclass(frozen=True)
class Training:
    """Settings of one training."""

    task: Task
    mean: Mean
    lie: Lie | None

    def loss(self) -> float:
        """Return the mean validation loss over the seeds."""
        return statistics.fmean(self._train(seed) for seed in range(SEEDS))

    def _train(self, seed: int) -> float:
        task = self.task
        data, first = task.data(seed)[0], task.first(seed)
        updates = max(1, len(data) // (CLUSTERS * task.batch)) * task.epochs
        members = []
        for number, share in enumerate(shares(data, CLUSTERS, seed)):
            order = torch.Generator().manual_seed(1000 * seed + number)
            loader = DataLoader(share, task.batch, shuffle=True, generator=order, drop_last=True)
            members.append(Cluster(task, copy.deepcopy(first), loader, updates, task.rate))
        initial = members[0].weights()
        for update in range(1, updates + 1):
            for member in members:
                member.update()
            if update % INTERVAL == 0 or update == updates:
                self._average(members, initial)
        return task.validation_loss(members[0].model, seed)

    def _average(self, members: Sequence[Cluster], initial: Weights) -> None:
        states = [member.weights() for member in members]
        if self.lie is not None:
            states[-1] = self.lie(states[-1], initial)
        found = {key: self.mean([state[key] for state in states]) for key in initial}
        for member in members:
            member.model.load_state_dict(found, strict=False)


def measure() -> str:
    """Return the report as Markdown."""
    torch.set_num_threads(1)
    tasks = [task for task in TASKS if task.name.split()[0].strip(",") in NAMES]
    lines = [
        f"Validation loss after the same updates, mean of {SEEDS} seeds; {CLUSTERS} clusters.",
        "",
        f"| task | the last cluster sends | {' | '.join(MEANS)} |",
        "|---|---|" + "--:|" * len(MEANS),
    ]
    for task in (replace(each, epochs=EPOCHS * each.epochs) for each in tasks):
        for said, lie in LIES.items():
            cells = " | ".join(f"{Training(task, mean, lie).loss():.3f}" for mean in MEANS.values())
            lines.append(f"| {task.name} | {'what it has' if lie is None else said} | {cells} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    print(measure())
