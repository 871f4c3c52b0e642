"""A chaos run as values: its settings, what happened in it, and what is wrong with its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from chaos_node import BATCH, FEATURES, data, model
from fault_plan import Fault, FaultPlan
from torch import nn
from workloads import Workload, free_addresses

from ravnest import model_fusion
from ravnest.errors import RavnestError


@dataclass(frozen=True)
class ChaosRun:
    """Size and settings of a run."""

    clusters: int = 3
    nodes: int = 2
    """Nodes of a cluster."""
    updates: int = 1000
    """Updates of each cluster."""
    epoch: int = 100
    """Updates of an epoch."""
    pace: float = 0.04
    """Least seconds between two updates of a cluster."""
    checkpoint_updates: int = 25
    reduce_factor: int = 20
    """Updates between two averages of the clusters."""
    silence: float = 60.0
    """Seconds without a new update in a cluster that has not finished, after which the run hangs."""
    limit: float = 3 * 3600.0
    """Seconds after which a run that still makes progress is ended nevertheless."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the nodes."""
    proxied: bool = False
    """Let connections pass proxies that can be blocked; only for one cluster, whose nodes each have
    one node that dials them."""

    @property
    def samples(self) -> int:
        """Samples of all clusters together."""
        return self.clusters * self.epoch * BATCH

    @property
    def epochs(self) -> int:
        """Epochs that the updates fill."""
        return -(-self.updates // self.epoch)

    @property
    def total(self) -> int:
        """Updates of all clusters together."""
        return self.clusters * self.epochs * self.epoch


@dataclass
class Recovery:
    """What followed a fault."""

    fault: Fault
    cluster: int
    at: float
    """Time of the fault, in seconds since the first update."""
    update: int
    """Updates of the cluster before it."""
    interrupted: bool = True
    """The cluster has noticed; updates before that were under way."""
    under_way: float | None = None
    """Seconds until the cluster made an update again."""
    regained: float | None = None
    """Seconds until it made an update that it had not made before."""


@dataclass(frozen=True)
class RunResult:
    """What happened in a run."""

    plan: FaultPlan
    seconds: float
    """Time from the first update to the last."""
    rate: float
    """Useful updates per second, over all clusters."""
    updates: tuple[int, ...]
    """Updates of each cluster."""
    repeated: int
    """Updates that were made again."""
    recoveries: tuple[Recovery, ...]
    restarts: int
    hang: str
    """What did not go on; empty if everything did."""
    failures: tuple[str, ...]
    """Nodes that failed for good."""
    corrupt: tuple[str, ...]
    """What is wrong with the results."""
    loss: float | None
    """Loss of the fused model over all data."""

    @property
    def good(self) -> bool:
        """True if nothing hung, failed or is wrong."""
        return not (self.hang or self.failures or self.corrupt)


def form(settings: ChaosRun, folder: Path) -> list[list[str]]:
    """Split the model for the clusters; return the names of their nodes."""
    example = torch.randn(BATCH, FEATURES), torch.zeros(BATCH, dtype=torch.long)
    work = Workload("chaos", model, lambda: example, 2)
    addresses = free_addresses(settings.clusters * settings.nodes)
    names = work.form_clusters(folder, addresses, settings.clusters)
    assert [len(each) for each in names] == [settings.nodes] * settings.clusters, names
    return names


def fused(folder: Path, cluster: int = 0) -> dict[str, torch.Tensor]:
    """Return the model that a cluster has trained."""
    state: dict[str, torch.Tensor] = torch.load(
        model_fusion(cluster, folder=folder / "trained"), weights_only=True
    )
    return state


def check(settings: ChaosRun, folder: Path) -> tuple[tuple[str, ...], float | None]:
    """Return what is wrong with the results of a run, and the loss of the model."""
    wrong: list[str] = []
    states: list[dict[str, torch.Tensor]] = []
    for cluster in range(settings.clusters):
        try:
            states.append(fused(folder, cluster))
        except RavnestError as error:
            wrong.append(f"cluster {cluster} has no model: {error}")
        losses = folder / ("losses.txt" if cluster == 0 else f"losses_cluster_{cluster}.txt")
        lines = len(losses.read_text().splitlines()) if losses.exists() else 0
        if lines != settings.epochs * settings.epoch:
            wrong.append(f"cluster {cluster} has recorded {lines} updates")
    for cluster, state in enumerate(states):
        if not all(torch.isfinite(tensor).all() for tensor in state.values()):
            wrong.append(f"the model of cluster {cluster} is not finite")
        if any(not torch.equal(state[name], states[0][name]) for name in states[0]):
            wrong.append(f"clusters 0 and {cluster} have different models")
    return tuple(wrong), _loss(settings, states[0]) if states else None


def _loss(settings: ChaosRun, state: Mapping[str, torch.Tensor]) -> float:
    trained = model()
    trained.load_state_dict(state)
    points, classes = data(settings.samples).tensors
    with torch.no_grad():
        return float(nn.functional.cross_entropy(trained(points), classes))
