"""What a worker tells, and to whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ravnest.wire.messages import PhaseBegin, StageTiming


@dataclass(frozen=True)
class UpdateReport:
    """An update of the Root's weights, as the progress line and the loss file see it."""

    number: int
    epoch: int
    loss: float | None
    """Mean over its micro-batches."""
    staleness: int
    """Updates that overtook its last micro-batch between forward and backward."""
    count: int
    """Micro-batches in it."""
    in_flight: int
    """Micro-batches that this stage has started and not finished."""
    inbox: int = 0
    """Calls that wait for the compute thread."""


class WorkerObserver(Protocol):
    """Told what happens, in the worker's thread; must be quick."""

    def begun(self, begin: PhaseBegin) -> None:
        """A phase has begun here."""

    def updated(self, update: UpdateReport) -> None:
        """The weights were updated (at the Root, with the loss)."""

    def timed(self, timings: tuple[StageTiming, ...], round_trip: float) -> None:
        """At the Root: what a micro-batch cost at each stage, and how long it was under way."""

    def saving(self) -> None:
        """The trained stage is about to be saved."""


class StageKeeper(Protocol):
    """Where trained stages go."""

    def save(self, run: str) -> tuple[str, dict[str, torch.Tensor]]:
        """Write this node's stage; its manifest and tensors, for the Root."""

    def receive(self, node: int, manifest: str, tensors: Mapping[str, torch.Tensor]) -> int:
        """Write another node's stage; the number of the stage."""
