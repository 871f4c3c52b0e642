"""Destinations of a ring's result: chunks of the average are written into memory that exists already.

A stage can be nearly as large as the memory of its machine. A round therefore needs one vector per ring,
the copy that enters it, and the result replaces the copy chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Sink:
    """Writes the average itself."""

    into: Tensor

    def keep(self, start: int, stop: int, values: Tensor) -> None:
        """Write the final values of the elements from ``start`` to ``stop``."""
        np.copyto(self.into[start:stop].numpy(), values.numpy())


@dataclass(frozen=True)
class DeltaSink(Sink):
    """Writes the change (average - copy) of the first elements and the average of the others.

    ``into`` holds the copy that entered the round.
    """

    moving: int
    """Number of leading elements for which the change is written."""
    average: Tensor | None = None
    """Second destination, which receives the average of all elements for later rounds."""
    relative: bool = False
    """Values enter and leave the ring as differences from the previous content of ``average``."""

    def keep(self, start: int, stop: int, values: Tensor) -> None:
        """Write the final values of the elements from ``start`` to ``stop``."""
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
