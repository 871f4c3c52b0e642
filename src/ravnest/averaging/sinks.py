"""Where the final values of a ring go, piece by piece: into memory that is there already.

A stage can be nearly as large as its machine. So a round has one vector of a node's own, the copy that
entered it, and what came out takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Sink:
    """The average itself."""

    into: Tensor

    def keep(self, start: int, stop: int, values: Tensor) -> None:
        """These values of the vector are final."""
        np.copyto(self.into[start:stop].numpy(), values.numpy())


@dataclass(frozen=True)
class DeltaSink(Sink):
    """How the first numbers of the vector are to move, and the average of the others.

    ``into`` holds what entered the round.
    """

    moving: int
    """So many numbers move; those behind become the average."""
    average: Tensor | None = None
    """Where the average itself is kept besides, for rounds to come."""
    relative: bool = False
    """What enters and comes out is a difference from ``average`` as it was."""

    def keep(self, start: int, stop: int, values: Tensor) -> None:
        """As ``Sink``."""
        final, target = values.numpy(), self.into[start:stop].numpy()
        average = final
        if self.average is not None:
            average = self.average[start:stop].numpy()
            if self.relative:
                np.add(average, final, out=average)
            else:
                np.copyto(average, final)
        moving = min(max(self.moving - start, 0), stop - start)
        np.subtract(final[:moving], target[:moving], out=target[:moving])
        np.copyto(target[moving:], average[moving:])
