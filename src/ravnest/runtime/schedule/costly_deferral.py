"""Choice of the micro-batches whose weight gradients are deferred although that takes additional time.

Deferred weight gradients fill the time in which a stage waits. Those of most layers cost no more than
others, so that all are deferred. Those of an LSTM layer do, and pay only as far as there is such time.
The first micro-batches of an update are the ones to defer: their gradients then reach the previous
stages early, and the stage waits at the end of the update. Pure; counts micro-batches, has no clock.
"""

from __future__ import annotations


class CostlyDeferral:
    """Number of micro-batches at the start of each update whose costly weight gradients are deferred.

    None before the first update of split batches is done, and then half of its micro-batches. If weight
    gradients were computed while forwards of the next update waited for nothing else, there was no time
    to fill, and as many fewer are deferred in the next update. If there were none, and the stage had to
    wait, it is one more.
    """

    def __init__(self) -> None:
        self._limit: int | None = None
        self._forwards = 0
        """Forwards of the update in progress."""
        self._delaying = 0
        self._waited = False

    def defers_next(self) -> bool:
        """Return whether the next forward of the update defers, and count it."""
        self._forwards += 1
        return self._limit is not None and self._forwards <= self._limit

    def delays_forward(self) -> None:
        """Count weight gradients of a micro-batch that the next update's forwards wait for."""
        self._delaying += 1

    def waits(self) -> None:
        """Note that the stage has nothing to compute."""
        self._waited = True

    def update_done(self, microbatches: int, batches: int) -> None:
        """Choose the number for the next update by one of ``microbatches``, which were ``batches``.

        As long as batches are not split, none is deferred: the result is that of one process to the last
        bit. A small last batch of an epoch does not lower the number.
        """
        if self._limit is None:
            self._limit = microbatches // 2 if microbatches > batches else None
        elif self._delaying:
            self._limit = max(self._limit - self._delaying, 0)
        elif self._waited and self._limit < microbatches:
            self._limit += 1
        self._forwards, self._delaying, self._waited = 0, 0, False
