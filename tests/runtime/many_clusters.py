"""Several clusters in one process: nodes in threads, over the in-memory network."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from local_cluster import LocalCluster, Outcome
from torch import nn
from workloads import free_ports

from ravnest import Trainer, clusterize, model_fusion, set_seed


@dataclass
class Clusters:
    """The nodes of a plan, cluster by cluster, Root first."""

    nodes: LocalCluster
    names: list[list[str]]

    def of(self, name: str) -> int:
        """The cluster of a node."""
        return next(c for c, names in enumerate(self.names) if name in names)

    def train(
        self,
        loaders: Callable[[str], tuple[Any, Any]],
        *,
        node: Callable[[str], dict[str, Any]] = lambda _: {},
        then: Callable[[str, Trainer], Any] = lambda _name, _trainer: None,
        **trainer: Any,
    ) -> dict[str, Outcome]:
        """Train on all nodes; ``loaders`` and ``node`` (further settings) depend on the node."""

        def script(name: str) -> Any:
            train_loader, val_loader = loaders(name)
            labels = {"labels": train_loader, "test_labels": val_loader}
            with self.nodes.node(name, **(labels | node(name))) as own:
                run = Trainer(own, train_loader=train_loader, val_loader=val_loader, **trainer)
                run.train()
                return then(name, run)

        return self.nodes.run(script)

    def fused(self, cluster: int) -> dict[str, torch.Tensor]:
        """The model that a cluster trained."""
        path = model_fusion(cluster, folder=self.nodes.folder / "trained")
        state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return state


def form_clusters(
    folder: Path,
    model: nn.Module,
    example: tuple[Any, ...],
    sizes: Sequence[int],
    resume_from: Path | None = None,
    **options: Any,
) -> Clusters:
    """Split a model for clusters of so many nodes each, whatever the planner would like best."""
    node_data = folder / "node_data"
    node_data.mkdir(parents=True, exist_ok=True)
    configs = {
        str(i): {"IP": f"127.0.0.1:{port}", "benchmarks": {"ram": 4, "bandwidth": 1000}}
        for i, port in enumerate(free_ports(sum(sizes)))
    }
    (node_data / "node_configs.json").write_text(json.dumps(configs))
    bounds = [0, *itertools.accumulate(sizes)]
    pipelines = [tuple(range(*ends)) for ends in itertools.pairwise(bounds)]
    set_seed(42)
    with mock.patch("ravnest.plan.planner.find_clusters", lambda costs, *_: [(costs, pipelines)]):
        clusterize(
            model,
            example_args=example,
            clusters=len(sizes),
            folder=node_data,
            resume_from=resume_from,
        )
    names = [[f"node_{node}" for node in pipeline] for pipeline in pipelines]
    every = [name for cluster in names for name in cluster]
    return Clusters(LocalCluster(folder, every, options), names)


def raise_errors(outcomes: dict[str, Outcome]) -> None:
    """What a node raised."""
    for outcome in outcomes.values():
        if outcome.error is not None:
            raise outcome.error
