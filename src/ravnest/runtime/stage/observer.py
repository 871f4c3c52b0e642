"""Protocols through which a worker reports progress and saves trained stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from ravnest.telemetry import LossRecord, finite
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
    samples: int = 0
    """Samples whose gradients are in the update."""
    inbox: int = 0
    """Calls that wait for the compute thread."""
    learning_rate: float | None = None
    """Learning rate of the update, of the first parameter group; ``None`` if nothing trains here."""

    @cached_property
    def loss_record(self) -> LossRecord | None:
        """The loss for telemetry; ``None`` if it is not known here."""
        if self.loss is None:
            return None
        return LossRecord(
            self.number,
            self.epoch,
            finite(self.loss),
            self.batches * self.parts,
            self.staleness,
            None if self.learning_rate is None else finite(self.learning_rate),
        )


@dataclass(frozen=True)
class MicrobatchReport:
    """A micro-batch that has returned to the Root."""

    part: int
    """Position in its batch."""
    parts: int
    """Micro-batches in its batch."""
    batch_size: int
    timings: tuple[StageTiming, ...]
    """Its cost at each stage; empty if it was not timed."""


class WorkerObserver(Protocol):
    """Receiver of a worker's reports. Called in the worker's thread; must return quickly."""

    def begun(self, begin: PhaseBegin) -> None:
        """A phase has begun here."""

    def updated(self, update: UpdateReport) -> None:
        """The weights were updated."""

    def returned(self, report: MicrobatchReport) -> None:
        """A micro-batch of a training phase has returned to the Root."""

    def saving(self) -> None:
        """The trained stage is about to be saved."""


class StageKeeper(Protocol):
    """Storage of trained stages."""

    def save(self, run: str, *, best: bool) -> tuple[str, dict[str, torch.Tensor]]:
        """Write this node's stage and return its manifest and tensors for the Root.

        ``best``: it is a stage of the best model so far, which only the Root writes.
        """

    def receive(
        self, node: int, manifest: str, tensors: Mapping[str, torch.Tensor], *, best: bool
    ) -> int:
        """Write another node's stage and return its stage number."""
