"""Real clusters in one process: nodes in threads over the in-memory network, in ``sync``, blocking."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from replicas import Lesson
from torch.utils.data import TensorDataset
from workloads import NODE_DATA, Workload, free_addresses

from ravnest import Node, Trainer, model_fusion, shard
from ravnest.transport.memory import MemoryNetwork

DEADLINE = 600.0


@dataclass(frozen=True)
class Trained:
    """What clusters made of a lesson."""

    states: list[dict[str, torch.Tensor]]
    """Of the fused models, by cluster."""
    rounds: Counter[str]
    """As the coordinator counted them."""


def train(lesson: Lesson, data: TensorDataset, sizes: tuple[int, int], **settings: Any) -> Trained:
    """One epoch of ``data`` in so many clusters of so many nodes; ``settings`` are those of nodes."""
    clusters, nodes = sizes
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        example = lesson.data(0)[0][: lesson.batch]
        work = Workload(lesson.name, lesson.make, lambda: example, 1)
        names = work.form_clusters(folder, free_addresses(clusters * nodes), clusters)
        network, model, rounds = MemoryNetwork(), lesson.first(0), Counter[str]()

        def provide(name: str) -> None:
            loader = lesson.loader(shard(data, name, folder=folder / NODE_DATA))
            with Node(
                name,
                model=model,
                optimizer=lesson.optimizer,
                criterion=lambda outputs, batch: lesson.loss_of(outputs, batch[-1]),
                labels=loader,
                schedule="sync",
                averaging="blocking",
                folder=folder / NODE_DATA,
                trained_folder=folder / "trained",
                loss_filename=folder / "losses.txt",
                progress=False,
                transport=network.transport(),
                **settings,
            ) as node:
                Trainer(node, train_loader=loader, save=True, batch_size=lesson.batch).train()
                rounds.update(node._ensure_started().rounds)

        threads = [
            threading.Thread(target=provide, args=(name,), daemon=True)
            for cluster in names
            for name in cluster
        ]
        here = Path.cwd()
        os.chdir(folder)  # where nodes write by default
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE)
        finally:
            os.chdir(here)
        states = [
            torch.load(model_fusion(cluster, folder=folder / "trained"), weights_only=True)
            for cluster in range(clusters)
        ]
    return Trained(states, rounds)
