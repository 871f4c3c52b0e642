"""Protocols between averaging and the node that trains: each side sees the other through one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ravnest.averaging.coordinator import Mode
from ravnest.averaging.events import Command, Reply
from ravnest.averaging.outcome import RoundOutcome
from ravnest.wire.messages import RoundId

Vectors = Mapping[int, Tensor]
"""One flat vector per ring."""


@dataclass(frozen=True, eq=False)
class RoundAverage:
    """Result of a round at one node."""

    round: RoundId
    values: Vectors
    """The average; of weights that keep training, the change (average - copy)."""
    assign: bool
    """Training paused for the round: everything becomes the average."""
    faulty: bool
    """The node's copy held NaN or Inf: everything becomes the average, updates since the copy are
    discarded."""

    @property
    def moves(self) -> bool:
        """True if weights change by a difference, so that updates since the copy stay."""
        return not (self.assign or self.faulty)


@dataclass(frozen=True)
class AveragingConfig:
    """Averaging settings of a Root, and callbacks; these are called in averaging's thread."""

    mode: Mode
    reduce_factor: int | None
    """Updates between rounds; None for one round per epoch."""
    released: Callable[[bool], None]
    """Called when training that has paused for a round continues; True if the average was applied."""
    reported: Callable[[RoundOutcome], None]
    """Called at the coordinator when a round is over."""
    averaging: Callable[[bool], None] = lambda _is_open: None
    """Called when a round begins at this cluster (True) and when it is over."""


class WeightsPort(Protocol):
    """The parameters that are averaged. Calls may come from any thread and return at once."""

    def copy(self, *, idle: bool, then: Callable[[dict[int, Tensor]], None]) -> None:
        """Copy the newest values between two computations or, with ``idle``, when none is in flight.

        ``then`` is called with the copy, in the worker's thread.
        """

    def fault(self, vectors: Vectors) -> str:
        """Return why a copy must not enter an average; empty if it may."""

    def store(self, average: RoundAverage) -> None:
        """Store an average until its round is decided."""

    def settle(self, round_id: RoundId, *, commit: bool) -> None:
        """Apply the average of a round before any later work of the stage; or drop it."""

    def sizes(self) -> Mapping[int, int]:
        """Return the number of elements in each ring."""

    def moving(self) -> Mapping[int, int]:
        """Return the number of elements per ring that are weights; they come first in the vector.

        The elements behind them (buffers, optimizer state) are replaced by their average.
        """


class AveragingPort(Protocol):
    """Averaging as the worker sees it. Calls may come from any thread and return at once."""

    @property
    def samples(self) -> int:
        """Samples since the last average, at a Root; a checkpoint contains them."""

    @property
    def newest_round(self) -> int:
        """Number of the newest round whose average was applied, at a Root; a checkpoint contains it."""

    def updated(self, samples: int) -> None:
        """Report an update made from ``samples`` samples."""

    def epoch_ended(self) -> None:
        """Report that all updates of an epoch are made."""

    def from_pipeline(self, head: Command | Reply) -> None:
        """Take a message of a round from a neighbour in the pipeline."""

    def give_up(self) -> None:
        """Stop waiting for other clusters, because the run has failed."""
