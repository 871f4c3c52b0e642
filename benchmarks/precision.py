"""Validation loss of mixed precision, `precision="bf16"`, against float32 and against autocast.

Three small tasks of `learning_tasks.py` train in one process in float32, in one process under
`torch.autocast("cpu", dtype=torch.bfloat16)`, and as a pipeline of three processes with
`precision="bf16"` and `schedule="sync"`. All start from the same weights and see the same batches. The
trained weights are evaluated in float32.
Run as a script to print the table; arguments choose tasks by the first word of their names.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from learning import SEEDS, Pipeline
from learning_tasks import TASKS, Task

STAGES = 3
FIRST_WORDS = ("GPT,", "BERT-like", "CNN")


def train_alone(task: Task, seed: int, *, autocast: bool) -> float:
    """Return the validation loss of one process."""
    torch.set_num_threads(1)
    model = task.first(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, **task.one_cycle(seed))
    for batch in task.batches(seed):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = task.loss(model(*batch[:-1]), batch)
        optimizer.zero_grad()
        loss.backward()
        if task.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        scheduler.step()
    return task.validation_loss(model, seed)


def train_pipeline(task: Task) -> tuple[list[float], int]:
    """Return the validation losses of a pipeline by seed, and the micro-batches of a batch."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline = Pipeline(task, STAGES, Path(folder), precision="bf16")
        losses = [pipeline.train(seed, schedule="sync") for seed in range(SEEDS)]
        return losses, pipeline.microbatches


def report(tasks: Sequence[Task]) -> str:
    """Train the tasks and return a table."""
    lines = [
        '| task | micro-batches | float32 | one process, autocast | 3 stages, `precision="bf16"` |',
        "|---|--:|--:|--:|--:|",
    ]
    for task in tasks:
        float32, autocast = (
            [train_alone(task, seed, autocast=on) for seed in range(SEEDS)] for on in (False, True)
        )
        pipeline, microbatches = train_pipeline(task)
        found = (statistics.fmean(losses) for losses in (float32, autocast, pipeline))
        lines.append(f"| {task.name} | {microbatches} | " + " | ".join(f"{x:.4f}" for x in found) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    chosen = tuple(sys.argv[1:]) or FIRST_WORDS
    print(report([task for task in TASKS if task.name.startswith(chosen)]))
