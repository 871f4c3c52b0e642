"""Node of a chaos run: trains a small model on its cluster's share, and reports its records.

Updates are paced, so that a node needs a small part of a core: on a machine whose cores are the
bottleneck, nodes that are down would leave more of them to the others, and cost nothing.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ravnest import Node, Trainer, set_seed, shard
from ravnest.telemetry import CheckpointRecord, LossRecord, PhaseRecord, RecoveryRecord, WorkerRecord

FEATURES, CLASSES, WIDTH, BATCH = 16, 8, 32, 16
_SCRATCH = 64 << 20
"""Bytes that each update allocates and does not touch: they fail when the node gets no more memory."""
_REPORTED = (CheckpointRecord, LossRecord, PhaseRecord, RecoveryRecord)


def model() -> nn.Module:
    """Return the model."""
    layers: list[nn.Module] = [nn.Linear(FEATURES, WIDTH), nn.Tanh()]
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def data(samples: int) -> TensorDataset:
    """Return points and the classes that a teacher gives them, a fifth of them at random.

    The random part keeps the loss away from zero, so that two losses can be compared by their ratio.
    """
    draw = torch.Generator().manual_seed(3)
    points = torch.randn(samples, FEATURES, generator=draw)
    teacher = torch.randn(FEATURES, CLASSES, generator=draw)
    classes = (points @ teacher).argmax(1)
    noise = torch.rand(samples, generator=draw) < 0.2
    classes[noise] = torch.randint(0, CLASSES, (int(noise.sum()),), generator=draw)
    return TensorDataset(points, classes)


class RecordSocket:
    """Receiver of records that sends them to the program that watches the run."""

    def __init__(self, path: str, node: str) -> None:
        self._node = node
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(path)

    def emit(self, record: WorkerRecord) -> None:
        """Send a record."""
        if isinstance(record, _REPORTED):
            self._socket.send(json.dumps({"node": self._node, **asdict(record)}).encode())


def paced(seconds: float) -> type[torch.optim.SGD]:
    """Return an optimizer whose steps are at least ``seconds`` apart."""

    class PacedSGD(torch.optim.SGD):
        _due = 0.0

        def step(self, closure: Any = None) -> Any:
            torch.empty(_SCRATCH, dtype=torch.uint8)
            time.sleep(max(self._due - time.monotonic(), 0.0))
            self._due = time.monotonic() + seconds
            return super().step(closure)

    return PacedSGD


def main(given: dict[str, Any]) -> None:
    """Train; ``given`` are the arguments of ``chaos_run.ChaosRun``."""
    name, folder = given["node"], Path(given["folder"])
    os.chdir(folder)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    faulthandler.register(signal.SIGUSR1)  # a node that hangs shows where
    logging.info("%s starts", name)
    set_seed(42)
    torch.set_num_threads(1)
    dataset = shard(data(given["samples"]), name)
    loader = DataLoader(
        dataset, BATCH, shuffle=True, generator=torch.Generator().manual_seed(5), drop_last=True
    )
    node = Node(
        name,
        optimizer=paced(given["pace"]),
        optimizer_params={"lr": 0.05, "momentum": 0.9},
        lr_scheduler=torch.optim.lr_scheduler.LinearLR,
        lr_scheduler_params={
            "start_factor": 1.0,
            "end_factor": 0.02,
            "total_iters": given["epochs"] * len(loader),
        },
        lr_step_on_epoch_change=False,
        criterion=nn.functional.cross_entropy,
        labels=loader,
        record_sink=RecordSocket(given["socket"], name),
        progress=False,
        **given["settings"],
    )
    Trainer(node, train_loader=loader, epochs=given["epochs"], batch_size=BATCH, save=True).train()
    node.close()
