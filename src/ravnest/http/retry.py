"""Retry policy: the number of tries and the pauses between them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class RetryPolicy:
    """Bounded tries with pauses that double; jitter spreads clients out."""

    tries: int = 4
    first: float = 0.2
    """Seconds before the second try."""
    most: float = 5.0
    """Longest pause in seconds."""
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random
    """Jitter: a random number from 0 to 1."""

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before each try but the first."""
        for attempt in range(self.tries - 1):
            yield min(self.most, self.first * 2**attempt) * (0.5 + 0.5 * self.chance())


DEFAULT_RETRY = RetryPolicy()
NO_RETRY = RetryPolicy(tries=1)
