"""Loss, memory and time of training with optimizer state in 8 bits, relative to float32.

All tasks of `learning.py` train in one process through the updates of a stage, with AdamW and with SGD
(momentum 0.9), at the learning rates of the other benchmarks (times 10 for SGD). Tensors of the state
from 256 values on are packed here, a block; stages pack those from 4096 values on, of which these small
models have few. Memory is that of a process that updates 16 matrices of 1024 x 1024 with AdamW: the
bytes of the state between updates, and the largest resident set beyond that before the first update
(freed blocks are returned to the system, as in stages whose memory is short). The time is that of an
update alone, without forward and backward passes; the median of 7.
Run as a script to print the report.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any
from unittest import mock

import torch
from learning_tasks import TASKS, Task
from torch import nn

from ravnest.host import map_large_blocks
from ravnest.runtime.stage import optimizer_state
from ravnest.runtime.stage.packed_tensor import PackedTensor
from ravnest.runtime.stage.updates import UpdateRule, Updates
from ravnest.types import StateForm

SEEDS = int(os.environ.get("RAVNEST_BENCH_SEEDS", "3"))
LEAST = 256
"""Values of a tensor from which on its state is packed."""
MATRICES, WIDTH = 16, 1024
UPDATES = 7
FORMS: tuple[StateForm, ...] = ("float32", "int8")
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], float]] = {
    "AdamW": (torch.optim.AdamW, {}, 1.0),
    "SGD, momentum 0.9": (torch.optim.SGD, {"momentum": 0.9}, 10.0),
}
"""Class, settings, and the factor of the learning rate."""


def _loss(task: Task, seed: int, optimizer: str, form: StateForm) -> float:
    """Return the validation loss after training."""
    made, params, factor = OPTIMIZERS[optimizer]
    model = task.first(seed)
    schedule = task.one_cycle(seed)
    schedule["max_lr"] *= factor
    rule = UpdateRule(
        made,
        {"lr": factor * task.rate, **params},
        torch.optim.lr_scheduler.OneCycleLR,
        schedule,
        scheduler_each_epoch=False,
        clip=task.clip,
        state=form,
    )
    updates = Updates(rule, dict(model.named_parameters()))
    model.train()
    for batch in task.batches(seed):
        task.loss(model(*batch[:-1]), batch).backward()
        updates.step(1)
    return task.validation_loss(model, seed)


def _learning() -> list[str]:
    lines = [
        f"Validation loss, mean of {SEEDS} seeds; the change is the mean over the seeds, with the "
        "smallest and the largest.",
        "",
        "| task | optimizer | float32 | int8 | change |",
        "|---|---|--:|--:|--:|",
    ]
    for task in TASKS:
        for optimizer in OPTIMIZERS:
            pairs = [[_loss(task, seed, optimizer, form) for form in FORMS] for seed in range(SEEDS)]
            exact, packed = (statistics.fmean(values) for values in zip(*pairs, strict=True))
            changes = [second / first - 1 for first, second in pairs]
            spread = f"({min(changes):+.1%} to {max(changes):+.1%})"
            mean = statistics.fmean(changes)
            lines.append(
                f"| {task.name} | {optimizer} | {exact:.4f} | {packed:.4f} | {mean:+.1%} {spread} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def _peak() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _bytes_of_state(updates: Updates, keys: list[str]) -> int:
    assert updates.state is not None
    fields = [value for key in keys for value in updates.state.fields(key).values()]
    return sum(value.nbytes for value in fields if isinstance(value, torch.Tensor | PackedTensor))


def _update_once(weight: nn.Parameter, form: StateForm) -> None:
    updates = Updates(UpdateRule(torch.optim.AdamW, {"lr": 1e-3}, state=form), {"weight": weight})
    updates.set_gradients({"weight": torch.ones_like(weight)})
    updates.step(1)


def run_updates(form: StateForm) -> None:
    """Make updates of large matrices; print the bytes of the state, the added peak, and the time."""
    torch.set_num_threads(1)
    map_large_blocks()
    _update_once(nn.Parameter(torch.ones(1)), form)  # what torch loads at first does not count
    weights = {str(n): nn.Parameter(torch.randn(WIDTH, WIDTH)) for n in range(MATRICES)}
    updates = Updates(UpdateRule(torch.optim.AdamW, {"lr": 1e-3}, state=form), weights)
    gradients = {key: torch.randn_like(weight) for key, weight in weights.items()}
    before, seconds = _peak(), []
    for _ in range(UPDATES):
        updates.set_gradients(gradients)
        began = time.perf_counter()
        updates.step(1)
        seconds.append(time.perf_counter() - began)
    print(_bytes_of_state(updates, list(weights)), _peak() - before, statistics.median(seconds))


def _memory() -> list[str]:
    found = {}
    for form in FORMS:
        command = [sys.executable, __file__, form]
        words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        found[form] = [float(word) for word in words]
    weights = MATRICES * WIDTH * WIDTH * 4
    lines = [
        "",
        "| | state, bytes per byte of weights | added peak, bytes per byte of weights | time of an "
        "update |",
        "|---|--:|--:|--:|",
    ]
    base = found["float32"][2]
    lines += [
        f"| {form} | {state / weights:.3f} | {peak / weights:.2f} | {seconds / base:.1f}x |"
        for form, (state, peak, seconds) in found.items()
    ]
    return lines


def measure() -> str:
    """Return the report as Markdown."""
    torch.set_num_threads(1)
    with mock.patch.object(optimizer_state, "PACKED_LEAST", LEAST):
        learning = _learning()
    return "\n".join([*learning, *_memory()])


if __name__ == "__main__":
    chosen: dict[str, StateForm] = {form: form for form in FORMS}
    if sys.argv[1:]:
        run_updates(chosen[sys.argv[1]])
    else:
        print(measure())
