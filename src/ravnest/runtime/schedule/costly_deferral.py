"""Choice of the micro-batches whose weight gradients are deferred although that takes additional time.

Deferred weight gradients fill the time in which a stage waits. Those of most layers cost nothing more
than others, so that all are deferred. Those of an LSTM layer do, and pay only as far as there is such
time. The first micro-batches of an update are the ones to defer: their gradients then reach the previous
stages early, and the stage waits at the end of the update. Pure; counts micro-batches, has no clock.
"""

from __future__ import annotations


class CostlyDeferral:
    """Number of micro-batches at the start of each update whose costly weight gradients are deferred.

    The first update defers none and the second one half of its micro-batches. After that the number grows
    by one per update, unless weight gradients were computed while a forward of the next update waited for
    nothing else: then the stage had no time to fill, and as many fewer are deferred.
    """

    def __init__(self) -> None:
        self._limit: int | None = None
        """Micro-batches to defer; None before the first update is done."""
        self._forwards = 0
        """Forwards of the update in progress."""
        self._delayed = 0

    def defers_next(self) -> bool:
        """Return whether the next forward of the update defers, and count it."""
        self._forwards += 1
        return self._forwards <= (self._limit or 0)

    def forward_delayed(self) -> None:
        """Count weight gradients that the next update's forwards wait for."""
        self._delayed += 1

    def update_done(self, microbatches: int) -> None:
        """Choose the number for the next update by an update of this number of micro-batches.

        A batch that is not split defers none: its result is that of one process to the last bit.
        """
        if self._limit is None:
            self._limit = microbatches // 2
        else:
            self._limit += 1 if not self._delayed else -self._delayed
        self._limit = 0 if microbatches == 1 else min(max(self._limit, 0), microbatches)
        self._forwards = self._delayed = 0
