"""Cluster in one process: nodes in threads, connected by the in-memory transport."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from workloads import free_ports

from ravnest import Node, Trainer, clusterize, model_fusion, set_seed
from ravnest.transport.memory import MemoryNetwork

DEADLINE = 120.0


def form(
    folder: Path,
    model: nn.Module,
    example: tuple[Any, ...] | dict[str, Any],
    nodes: int,
    ram: float = 4.0,
    **options: Any,
) -> list[str]:
    """Split a model for one cluster of equal nodes in ``folder/node_data``; return names, Root first."""
    node_data = folder / "node_data"
    node_data.mkdir(parents=True, exist_ok=True)
    configs = {
        str(i): {"IP": f"127.0.0.1:{port}", "benchmarks": {"ram": ram, "bandwidth": 1000}}
        for i, port in enumerate(free_ports(nodes))
    }
    (node_data / "node_configs.json").write_text(json.dumps(configs))
    set_seed(42)
    given = {"example_kwargs": example} if isinstance(example, dict) else {"example_args": example}
    plan = clusterize(model, **given, clusters=1, folder=node_data, **options)
    return [f"node_{stage.node.id}" for stage in plan.clusters[0].stages]


@dataclass
class Outcome:
    """Result or error of a node's script."""

    result: Any = None
    error: BaseException | None = None


@dataclass
class LocalCluster:
    """Nodes of ``folder/node_data``, each running a script in a thread."""

    folder: Path
    names: Sequence[str]
    options: dict[str, Any] = field(default_factory=dict)
    """Further keywords for every Node."""
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    node_data: Path | None = None
    """Folder of the stages, if not below ``folder``."""

    def node(self, name: str, **given: Any) -> Node:
        """Create a node with settings for tests."""
        settings: dict[str, Any] = {
            "optimizer": torch.optim.SGD,
            "optimizer_params": {"lr": 0.1},
            "criterion": nn.functional.cross_entropy,
            "loss_filename": self.folder / "losses.txt",
            "folder": self.node_data or self.folder / "node_data",
            "trained_folder": self.folder / "trained",
            "transport": self.network.transport,
            "checkpoint_folder": self.folder / "checkpoints",
            "connect_timeout": 30.0,
            "progress": False,
        }
        return Node(name, **(settings | self.options | given))

    def run(self, script: Callable[[str], Any]) -> dict[str, Outcome]:
        """Run ``script(name)`` for every node in parallel and return the results and errors."""
        outcomes = {name: Outcome() for name in self.names}

        def provider(name: str) -> None:
            try:
                outcomes[name].result = script(name)
            except BaseException as error:
                outcomes[name].error = error

        threads = [threading.Thread(target=provider, args=(n,), daemon=True) for n in self.names]
        for thread in threads:
            thread.start()
        for name, thread in zip(self.names, threads, strict=True):
            thread.join(DEADLINE)
            assert not thread.is_alive(), f"{name} hangs"
        return outcomes

    def train(
        self, loaders: Callable[[], tuple[Any, Any]], *, node: dict[str, Any], **trainer: Any
    ) -> dict[str, Outcome]:
        """Train with ``Trainer``; raise the first error of a node."""

        def script(name: str) -> float | None:
            train_loader, val_loader = loaders()
            labels = {"labels": train_loader, "test_labels": val_loader}
            with self.node(name, **(labels | node)) as own:
                run = Trainer(own, train_loader=train_loader, val_loader=val_loader, **trainer)
                run.train()
                return None if val_loader is None else run.evaluate()

        outcomes = self.run(script)
        for outcome in outcomes.values():
            if outcome.error is not None:
                raise outcome.error
        return outcomes

    def results(self, script: Callable[[str], Any]) -> list[Any]:
        """Run ``script(name)`` for every node; return results, Root first. Raise the first error."""
        outcomes = self.run(script)
        for outcome in outcomes.values():
            if outcome.error is not None:
                raise outcome.error
        return [outcomes[name].result for name in self.names]

    def errors(self, script: Callable[[str], Any]) -> list[BaseException | None]:
        """Run ``script(name)`` for every node; return the errors, Root first."""
        outcomes = self.run(script)
        return [outcomes[name].error for name in self.names]

    def fused(self) -> dict[str, torch.Tensor]:
        """Return the state of the trained model."""
        path = model_fusion(0, folder=self.folder / "trained")
        state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return state


Formed = Callable[..., LocalCluster]
"""Type of the fixture ``cluster``."""
Splits = Callable[[str, int], tuple[Path, list[str]]]
"""Type of the fixture ``splits``."""
