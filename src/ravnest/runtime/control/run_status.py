"""Status of a run: written by the worker, awaited by the user's thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ravnest.errors import RunError, RunInterruptedError
from ravnest.runtime.control.recent_records import MOST_RECENT, RecentRecord
from ravnest.types import MicrobatchId
from ravnest.wire.messages import LossSplit, ValidationResult


@dataclass(frozen=True)
class MicrobatchResult:
    """Result of the Leaf for a micro-batch of a phase without gradients."""

    output: Any = None
    """Model output, in a prediction."""
    value: float | None = None
    """Accuracy or loss, in a validation."""


class RunStatus:
    """State shared by two threads. Change it inside ``writing``; wait for it with ``wait``."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.admitted = 0
        """Total number of micro-batches that the Root may have submitted."""
        self.phases_over = 0
        """Number of phases that are over here."""
        self.validations: dict[int, ValidationResult] = {}
        """Validation results by phase."""
        self.results: dict[MicrobatchId, MicrobatchResult] = {}
        """Results of micro-batches that the user's thread has not fetched."""
        self.saved_stages: set[int] = set()
        """Stages whose trained weights have reached the Root."""
        self.calls_ended = 0
        """Number of the script's calls that the Root has ended."""
        self.checkpoint_wanted = False
        """A node is about to leave and asks for a checkpoint; at the Root."""
        self.checkpoints_settled = 0
        """Number of checkpoints whose outcome is known; at the Root."""
        self.phases_settled = 0
        """Number of phases that are over in the newest of them; at the Root."""
        self.updates = 0
        """Number of updates made here."""
        self.recent: deque[RecentRecord] = deque(maxlen=MOST_RECENT)
        """Newest losses and validations; at the Root."""
        self.rounds = 0
        """Number of finished averaging rounds for which this cluster stopped training."""
        self.last_round_applied = False
        """The last of them has averaged this cluster's parameters."""
        self.loss_split: LossSplit | None = None
        """Answer of the Leaf to whether batches can be split; at the Root."""
        self.run_ended = False
        """True if the Root has ended the run."""
        self.departed: int | None = None
        """Number of the next node, if it has closed."""
        self.failure: RunError | None = None
        self._changes = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Change the status inside the context; waiting threads check it afterwards."""
        with self._condition:
            yield
            self._changes += 1
            self._condition.notify_all()

    def fail(self, reason: str, *, interrupted: bool = False) -> bool:
        """Fail the run; waiting threads raise the reason. Return False if it had already failed.

        ``interrupted``: a node was lost, and training can continue from a checkpoint.
        """
        with self.writing():
            if self.failure is not None:
                return False
            self.failure = (RunInterruptedError if interrupted else RunError)(reason)
            return True

    def check(self) -> None:
        """Raise ``RunError`` if the run has failed."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    def wait_for(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``ready()``, at most ``seconds``; raise ``RunError`` if the run fails."""
        with self._condition:
            found = self._condition.wait_for(lambda: self.failure is not None or ready(), seconds)
        self.check()
        return found

    def wait(
        self, ready: Callable[[], bool], *, stall: float | None = None, waiting_for: str = ""
    ) -> None:
        """Wait until ``ready()``; raise ``RunError`` if the run fails.

        Also raise it if the status does not change for ``stall`` seconds; the message then contains
        ``waiting_for``.
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
