"""Protocols through which a worker reports progress and saves trained stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ravnest.wire.messages import PhaseBegin, StageTiming


@dataclass(frozen=True)
class UpdateReport:
    """An update of the stage's weights."""

    number: int
    epoch: int
    loss: float | None
    """Mean loss of the batches in the update."""
    staleness: int
    """Updates between the forward and the backward of the last micro-batch."""
    batches: int
    """Number of the user's batches in the update."""
    parts: int
    """Micro-batches in the last of these batches."""
    in_flight: int
    """Micro-batches that this stage has started and not finished."""
    inbox: int = 0
    """Calls that wait for the compute thread."""


class WorkerObserver(Protocol):
    """Receiver of a worker's reports. Called in the worker's thread; must return quickly."""

    def begun(self, begin: PhaseBegin) -> None:
        """A phase has begun here."""

    def updated(self, update: UpdateReport) -> None:
        """The weights were updated."""

    def timed(self, timings: tuple[StageTiming, ...]) -> None:
        """A micro-batch has returned to the Root: its cost at each stage."""

    def saving(self) -> None:
        """The trained stage is about to be saved."""


class StageKeeper(Protocol):
    """Storage of trained stages."""

    def save(self, run: str) -> tuple[str, dict[str, torch.Tensor]]:
        """Write this node's stage and return its manifest and tensors for the Root."""

    def receive(self, node: int, manifest: str, tensors: Mapping[str, torch.Tensor]) -> int:
        """Write another node's stage and return its stage number."""
