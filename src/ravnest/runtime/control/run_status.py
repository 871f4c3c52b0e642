"""What the user's thread waits for; the worker writes it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ravnest.errors import RunError
from ravnest.runtime.schedule.events import Batch
from ravnest.wire.messages import Call, ValidationResult


@dataclass(frozen=True)
class MicrobatchResult:
    """What came back for a micro-batch without gradients."""

    output: Any = None
    value: float | None = None


class RunStatus:
    """State that two threads share. Change it inside ``writing``; wait for it with ``wait``."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.admitted = 0
        """Micro-batches that the Root may have submitted in all."""
        self.over = 0
        """Phases that are over here."""
        self.figures: dict[int, ValidationResult] = {}
        """Results of validations by phase."""
        self.answers: dict[Batch, MicrobatchResult] = {}
        self.saved: set[int] = set()
        """Stages whose trained weights have reached the Root."""
        self.returned: Counter[Call] = Counter()
        """Calls that the Root has ended, and that have not returned here."""
        self.updates = 0
        """Made here so far; kept where clusters average."""
        self.rounds = 0
        """Averages that this cluster stood still for, and that are over."""
        self.finish = False
        """The Root is done with the run."""
        self.left: int | None = None
        """The node behind has closed."""
        self.failure: RunError | None = None
        self._changes = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Change the board; those who wait look at it again."""
        with self._condition:
            yield
            self._changes += 1
            self._condition.notify_all()

    def fail(self, reason: str) -> bool:
        """The run cannot go on; whoever waits gets the reason. False if it had failed before."""
        with self.writing():
            if self.failure is not None:
                return False
            self.failure = RunError(reason)
            return True

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise RunError(str(self.failure))

    def wait(
        self, ready: Callable[[], bool], *, stall: float | None = None, waiting_for: str = ""
    ) -> None:
        """Wait until ``ready``; ``RunError`` if the run fails.

        Also if nothing at all changes for ``stall`` seconds: ``waiting_for`` says what was awaited.
        """
        with self._condition:
            seen, since = self._changes, time.monotonic()
            while self.failure is None and not ready():
                left = None if stall is None else stall - (time.monotonic() - since)
                if left is not None and left <= 0:
                    raise RunError(f"nothing has happened for {stall:.0f} s while {waiting_for}")
                self._condition.wait(left)
                if self._changes != seen:
                    seen, since = self._changes, time.monotonic()
        self.check()
