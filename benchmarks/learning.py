"""Validation loss of pipelines relative to one process, at equal samples and equal initial weights.

Six small tasks train in one process, with Ravnest at its defaults (`schedule="auto"`) and with
`schedule="async"`: a byte-level GPT with tied weights on Python's own standard library, a sine
regression, a BERT-like classifier with an attention mask, the demo's CNN with batch norm and a ViT on
scikit-learn's digits, and an LSTM tagger. All use AdamW with warm-up and decay (OneCycle) per update;
the GPT clips its gradients. Each node is a process; they are connected over loopback. They
state a low computing speed, so that the plan splits batches as it does for models whose steps take
seconds. Batch norm couples the samples of a batch, so that its batches are not split and `auto` chooses
`async`; there the effect of `look_ahead` is measured too. Each run is evaluated in one process from the
merged stages.
Run as a script to print the report; arguments choose tasks by the first word of their names.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from delay import train_delayed
from learning_tasks import TASKS, Task
from workloads import NODE_DATA, free_addresses

from ravnest import Node, Trainer, clusterize, model_fusion

SEEDS = int(os.environ.get("RAVNEST_BENCH_SEEDS", "3"))
STAGES = (3, 8)
DEADLINE = 900.0
"""Seconds after which a training is given up."""
GIGAFLOPS = 0.2
"""Stated computing speed of the nodes."""
SPLIT_GOAL, WHOLE_GOAL = 0.01, 0.05
"""Largest accepted relative difference to one process, of batches that are split and that are not."""

_CONTEXT = multiprocessing.get_context("forkserver")  # imports torch once for all processes
_CONTEXT.set_forkserver_preload(["ravnest.runtime.node", "sklearn.datasets"])


class Pipeline:
    """Stages of a task's model on disk, trained once per call of ``train``."""

    def __init__(self, task: Task, stages: int, folder: Path, **options: Any) -> None:
        """Split the model for ``stages`` equal nodes; ``options`` are keywords of ``clusterize``."""
        self._task, self._folder = task, folder
        node_data = folder / NODE_DATA
        node_data.mkdir(parents=True)
        benchmarks = {"ram": 4, "bandwidth": 1000, "compute": GIGAFLOPS}
        nodes = {
            str(number): {"IP": address, "benchmarks": benchmarks}
            for number, address in enumerate(free_addresses(stages))
        }
        (node_data / "node_configs.json").write_text(json.dumps(nodes), encoding="utf-8")
        example = next(iter(task.loaders(0)[0]))[:-1]
        with contextlib.redirect_stdout(io.StringIO()):
            plan = clusterize(task.first(0), tuple(example), clusters=1, folder=node_data, **options)
        (cluster,) = plan.clusters
        self._names = [f"node_{stage.node.id}" for stage in cluster.stages]
        self.schedule = plan.schedule
        """Schedule of ``auto``."""
        self.microbatches = cluster.microbatches
        """Micro-batches of a batch."""

    def train(self, seed: int, **settings: Any) -> float:
        """Return the validation loss of nodes in processes; ``settings`` are keywords of the nodes."""
        arguments = TASKS.index(self._task), seed, self.microbatches, settings, self._folder
        children = [_CONTEXT.Process(target=run_node, args=(*arguments, n)) for n in self._names]
        try:
            for child in children:
                child.start()
            for child in children:
                child.join(DEADLINE)
        finally:
            for child in children:
                child.kill()
        codes = [child.exitcode for child in children]
        assert not any(codes), f"exit codes {codes}"
        return self._loss(seed)

    def _loss(self, seed: int) -> float:
        """Return the validation loss of the merged stages."""
        trained = self._task.first(seed)
        path = model_fusion(0, folder=self._folder / "trained")
        trained.load_state_dict(torch.load(path, weights_only=True))
        return self._task.validation_loss(trained, seed)


def run_node(
    number: int, seed: int, microbatches: int, settings: dict[str, Any], folder: Path, name: str
) -> None:
    """Train one node of a task in this process; all processes draw the model and the data alike."""
    torch.set_num_threads(1)
    task = TASKS[number]
    model, (loader, _) = task.first(seed), task.loaders(seed)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        Node(
            name,
            model=model,
            optimizer=torch.optim.AdamW,
            optimizer_params={"lr": task.rate},
            lr_scheduler=torch.optim.lr_scheduler.OneCycleLR,
            lr_scheduler_params=task.one_cycle(seed),
            lr_step_on_epoch_change=False,
            criterion=task.loss,
            labels=loader,
            clip_grad_norm=task.clip,
            seed=seed,
            folder=folder / NODE_DATA,
            trained_folder=folder / "trained",
            loss_filename=folder / "losses.txt",
            progress=False,
            **settings,
        ) as node,
    ):
        Trainer(node, train_loader=loader, epochs=task.epochs, save=True).train()
        if node.is_root:
            parts = node._controller()._split().parts(task.batch)
            assert parts == microbatches, f"{parts} micro-batches instead of {microbatches}"


@dataclass(frozen=True)
class Row:
    """Losses of one pipeline, by seed."""

    task: Task
    stages: int
    schedule: str
    microbatches: int
    alone: list[float]
    losses: list[float]

    @property
    def difference(self) -> float:
        """Relative difference of the mean loss to one process."""
        return statistics.fmean(self.losses) / statistics.fmean(self.alone) - 1

    def __str__(self) -> str:
        goal = SPLIT_GOAL if self.task.split else WHOLE_GOAL
        each = [loss / one - 1 for loss, one in zip(self.losses, self.alone, strict=True)]
        default = "default" in self.schedule
        return (
            f"| {self.task.name} | {self.stages} | {self.microbatches} | {self.schedule} | "
            f"{statistics.fmean(self.alone):.4f} | {statistics.fmean(self.losses):.4f} | "
            f"{'**' if default else ''}{self.difference:+.2%}{'**' if default else ''} | "
            f"{min(each):+.2%} to {max(each):+.2%} | {f'{goal:.0%}' if default else ''} |"
        )


def _rows(task: Task) -> list[Row]:
    alone = [train_delayed(task, seed) for seed in range(SEEDS)]
    rows = []
    for stages in STAGES:
        with tempfile.TemporaryDirectory() as scratch:
            pipeline = Pipeline(task, stages, Path(scratch))
            variants: dict[str, dict[str, Any]] = {f"{pipeline.schedule} (default)": {}}
            if pipeline.schedule == "async":
                variants["async without `look_ahead`"] = {"look_ahead": False}
            elif stages == min(STAGES):  # the delay is one update with any number of stages
                variants["async"] = {"schedule": "async"}
            for name, settings in variants.items():
                begin = time.perf_counter()
                losses = [pipeline.train(seed, **settings) for seed in range(SEEDS)]
                rows.append(Row(task, stages, name, pipeline.microbatches, alone, losses))
                print(rows[-1], f"{time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return rows


def measure(tasks: Sequence[str] = ()) -> str:
    """Return the report as Markdown; ``tasks`` are first words of names, by default all."""
    torch.set_num_threads(1)
    chosen = [task for task in TASKS if not tasks or task.name.split()[0].strip(",") in tasks]
    lines = [
        f"Mean validation loss of {SEEDS} seeds; above 0% means a larger loss than in one process.",
        "",
        "| task | stages | micro-batches per batch | schedule | one process | pipeline | difference "
        "| all seeds | goal, at most |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|",
        *(str(row) for task in chosen for row in _rows(task)),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(measure(sys.argv[1:]))
