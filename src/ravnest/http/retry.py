"""How often and how soon something is tried again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class RetryPolicy:
    """Bounded tries with pauses that double, each shortened by chance so that clients spread out."""

    tries: int = 4
    first: float = 0.2
    """Seconds before the second try."""
    most: float = 5.0
    """No pause is longer."""
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random
    """From 0 to 1."""

    def pauses(self) -> Iterator[float]:
        """Seconds to wait before each try but the first."""
        for attempt in range(self.tries - 1):
            yield min(self.most, self.first * 2**attempt) * (0.5 + 0.5 * self.chance())


PATIENT = RetryPolicy()
IMPATIENT = RetryPolicy(tries=1)
