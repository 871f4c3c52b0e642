"""Cost of gradients that are one update late, and what corrections save.

One process computes gradients as an `async` pipeline of three stages does: the first two thirds of the
parameters are those of the update before, the last third (the Leaf's) are the newest. Corrections:
the last change of the weights is repeated (times 0.9), the step that AdamW's state describes is added
(what `look_ahead` does), the gradient is corrected for the change of the weights (delay compensation,
Zheng et al. 2017), or the old weights are not kept, and the backward pass uses the newest weights minus
the mean of their last changes instead (the discrepancy correction of PipeMare, Yang et al. 2021; its
learning rate is the usual one for a delay of one update). Run as a script to print the report;
arguments choose tasks by the first word of their names.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from learning_tasks import TASKS, Task
from torch import nn

SEEDS = int(os.environ.get("RAVNEST_BENCH_SEEDS", "3"))
ONE_LATE = (1, 1, 0)
"""Updates by which the gradients of each stage are late in an `async` pipeline of three stages."""

Correction = Literal["none", "last change", "optimizer state", "compensation", "discrepancy"]
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)
_INERTIA = 0.9
_DECAY = math.exp(-2)
"""Share of the earlier changes in their mean, raised to 1 / delay (PipeMare's default)."""
Observe = Callable[[int, nn.Module], None]
"""Function that is called with the number of updates and the model."""
Curve = list[tuple[float, float]]
"""Times (or numbers of updates) and validation losses."""
POINTS = 40
"""Validations in a run."""
SHARES = (0.6, 0.8)
"""Shares of the updates after which one process has the losses to reach."""


@dataclass
class _Delayed:
    """Weights of one parameter that forwards use, oldest first."""

    parameter: nn.Parameter
    delay: int
    used: deque[torch.Tensor] = field(default_factory=deque)
    last: torch.Tensor | None = None
    change: torch.Tensor | None = None
    """Mean of the last changes."""

    def note_change(self, weight: torch.Tensor) -> None:
        """Add the change to ``weight`` to the mean."""
        if self.last is not None:
            before = torch.zeros_like(weight) if self.change is None else self.change
            self.change = before.lerp(weight - self.last, 1 - _DECAY ** (1 / self.delay))


def train_delayed(
    task: Task,
    seed: int,
    delays: Sequence[int] = (0,),
    correction: Correction = "none",
    observe: Observe | None = None,
) -> float:
    """Return the validation loss if the gradients of each stage are late by ``delays`` updates.

    Stages have equal numbers of parameter tensors.
    """
    model = task.first(seed)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=task.rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, **task.one_cycle(seed))
    late = [delays[number * len(delays) // len(parameters)] for number in range(len(parameters))]
    delayed = [
        _Delayed(parameter, delay, deque(maxlen=delay + 1))
        for parameter, delay in zip(parameters, late, strict=True)
        if delay
    ]
    for number, batch in enumerate(task.batches(seed)):
        newest = [each.parameter.detach().clone() for each in delayed]
        for each in delayed:
            each.used.append(_forward_weights(each, optimizer, correction))
            each.parameter.data.copy_(each.used[0])
        optimizer.zero_grad()
        loss = task.loss(model(*batch[:-1]), batch)
        for each, weight in zip(delayed, newest, strict=True):
            if correction == "discrepancy" and each.change is not None:
                each.parameter.data.copy_(weight - each.delay * each.change)
        loss.backward()
        for each, weight in zip(delayed, newest, strict=True):
            if correction == "compensation" and each.parameter.grad is not None:
                gradient = each.parameter.grad
                gradient += gradient * gradient * (weight - each.used[0])
            each.parameter.data.copy_(weight)
        if task.clip is not None:
            nn.utils.clip_grad_norm_(parameters, task.clip)
        optimizer.step()
        scheduler.step()
        if observe is not None:
            observe(number + 1, model)
    return task.validation_loss(model, seed)


def _forward_weights(
    each: _Delayed, optimizer: torch.optim.Optimizer, correction: Correction
) -> torch.Tensor:
    weight = each.parameter.detach().clone()
    each.note_change(weight)
    before, each.last = each.last, weight
    if correction == "last change" and before is not None:
        return weight + _INERTIA * (weight - before)
    state = optimizer.state.get(each.parameter)
    if correction == "optimizer state" and state:
        return weight + _adam_step(state, optimizer.param_groups[0])
    return weight


def _adam_step(state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    (first, second), count = group["betas"], float(state["step"])
    size = (state["exp_avg_sq"] / (1 - second**count)).sqrt() + group["eps"]
    return -group["lr"] / (1 - first**count) * state["exp_avg"] / size


def time_to(curve: Curve, loss: float) -> float:
    """Return the time at which the loss is first below ``loss``, interpolated; infinite if never."""
    before, higher = 0.0, math.inf
    for now, lower in curve:
        if lower <= loss:
            if math.isinf(higher):
                return now
            return before + (now - before) * (higher - loss) / max(higher - lower, 1e-12)
        before, higher = now, lower
    return math.inf


def learning_curve(task: Task, seed: int, delays: Sequence[int] = (0,)) -> Curve:
    """Return validation losses by numbers of updates, with the prediction if gradients are late."""
    every = max(1, task.epochs * len(task.loaders(seed)[0]) // POINTS)
    curve = Curve()

    def observe(update: int, model: nn.Module) -> None:
        if update % every == 0:
            curve.append((update, task.validation_loss(model, seed)))
            model.train()

    train_delayed(task, seed, delays, "optimizer state", observe)
    return curve


def cost_in_samples(task: Task, seed: int) -> list[float]:
    """Return the samples to reach each loss with a delay, as a multiple of those without."""
    alone, late = learning_curve(task, seed), learning_curve(task, seed, ONE_LATE)
    targets = [alone[int(len(alone) * share) - 1][1] for share in SHARES]
    return [time_to(late, target) / time_to(alone, target) for target in targets]


def _cost_row(task: Task) -> str:
    costs = zip(*(cost_in_samples(task, seed) for seed in range(SEEDS)), strict=True)
    cells = [
        ", ".join("not reached" if math.isinf(cost) else f"{cost:.2f}" for cost in sorted(each))
        for each in costs
    ]
    return f"| {task.name} | {' | '.join(cells)} |"


def measure(tasks: Sequence[str] = ()) -> str:
    """Return the report as Markdown; ``tasks`` are first words of names, by default all."""
    torch.set_num_threads(1)
    lines = [
        f"Mean validation loss of {SEEDS} seeds and its difference to no delay.",
        "",
        f"| task | no delay | one update late | {' | '.join(CORRECTIONS[1:])} |",
        "|---" + "|--:" * (len(CORRECTIONS) + 1) + "|",
    ]
    chosen = [task for task in TASKS if not tasks or task.name.split()[0].strip(",") in tasks]
    for task in chosen:
        alone = statistics.fmean(train_delayed(task, seed) for seed in range(SEEDS))
        cells = []
        for correction in CORRECTIONS:
            losses = [train_delayed(task, seed, ONE_LATE, correction) for seed in range(SEEDS)]
            loss = statistics.fmean(losses)
            cells.append(f"{loss:.4f} ({loss / alone - 1:+.1%})")
        lines.append(f"| {task.name} | {alone:.4f} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    lines += [
        "",
        "Samples to the loss that one process has after 60% and 80% of its updates, one update late "
        "with the optimizer's state, as a multiple of those without delay; each seed:",
        "",
        "| task | 60% | 80% |",
        "|---|--:|--:|",
        *(_cost_row(task) for task in chosen),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(measure(sys.argv[1:]))
