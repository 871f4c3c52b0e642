"""What averaging wants of whoever holds the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ravnest.wire.messages import RoundId

Vectors = Mapping[int, Tensor]
"""By ring."""


@dataclass(frozen=True)
class RoundAverage:
    """What a round came to at one node."""

    round: RoundId
    values: Vectors
    """Of what moves how it is to move, unless it is assigned; else the average."""
    assign: bool
    """Nothing trains meanwhile; else what was trained since the copy is kept."""
    faulty: bool
    """The copy was of no use, and neither is what was trained since."""


class WeightsPort(Protocol):
    """What is averaged. Calls come from any thread and return at once."""

    def hold(self, *, idle: bool, then: Callable[[dict[int, Tensor]], None]) -> None:
        """Copy the newest values between two computations, or when nothing is under way.

        ``then`` is called in the stage's own thread.
        """

    def fault(self, vectors: Vectors) -> str:
        """Why a copy must not enter an average; empty if it may."""

    def prepare(self, average: RoundAverage) -> None:
        """Keep an average until its round is settled."""

    def settle(self, round_id: RoundId, *, commit: bool) -> None:
        """Apply the average of a round, before all that is asked of the stage later; or drop it."""

    def sizes(self) -> Mapping[int, int]:
        """Numbers in each ring."""

    def moving(self) -> Mapping[int, int]:
        """How many of these, from the first on, move: weights. Others are replaced."""
