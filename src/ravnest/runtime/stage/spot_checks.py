"""Spot checks between two stages: the later one keeps an output, the earlier one states how it was made.

A node challenges its previous node at random times, about an output that has arrived already: when the
previous node learns of the check, it cannot compute that output differently any more. Both write files
that their providers upload; the server computes the output again (``forward_check.py``).
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from ravnest.errors import StageFormatError
from ravnest.runtime.stage.execution import StageExecution
from ravnest.store.forward_evidence import (
    ForwardEvidence,
    check_path,
    is_check_name,
    own_arithmetic,
    write_evidence,
)
from ravnest.telemetry import CheckRecord
from ravnest.types import MicrobatchId
from ravnest.wire.messages import ForwardChallenge

logger = logging.getLogger(__name__)

_KEPT = 2
"""Newest files that are kept: the provider may still upload the one before."""
_BURST, _PAUSE = 4, 10.0
"""Answers in a row take at most a tenth of the time, whatever the next node asks."""


class ForwardChecks:
    """Both sides of the spot checks of one node; used by its worker's thread."""

    def __init__(
        self,
        folder: Path,
        execution: StageExecution,
        interval: float,
        reported: Callable[[CheckRecord], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        """``interval``: mean seconds between two challenges of the previous node; 0: none.

        ``reported`` is called with the record of each file.
        """
        self._folder = folder
        self._execution = execution
        self._interval = interval
        self._reported = reported
        self._clock = clock
        self._chance = random.SystemRandom() if chance is None else chance
        self._next = self._draw() if interval > 0 else None
        """Time from which the next output that arrives is checked."""
        self._answers: deque[tuple[float, float]] = deque(maxlen=_BURST)
        """Times and costs of the last answers."""

    def arrived(
        self, run: str, microbatch: MicrobatchId, values: Mapping[str, Any]
    ) -> ForwardChallenge | None:
        """Return the challenge of the previous node, if an output that has arrived is to be checked."""
        if self._next is None or self._clock() < self._next:
            return None
        self._next = self._draw()
        check = f"{self._chance.getrandbits(64):016x}"
        if not self._write(check, "received", microbatch, ForwardEvidence(values, {})):
            return None
        return ForwardChallenge(run, microbatch, check)

    def answer(self, challenge: ForwardChallenge) -> None:
        """State what an output was computed from that the next node asks about."""
        found = self._execution.computed_from(challenge.microbatch)
        if found is None or not is_check_name(challenge.check) or not self._has_time():
            logger.info("a check of %s is not answered", challenge.microbatch)
            return
        arithmetic = own_arithmetic(self._execution.module.device)
        evidence = ForwardEvidence(*found, arithmetic)
        began = self._clock()
        self._write(challenge.check, "stated", challenge.microbatch, evidence)
        self._answers.append((began, self._clock() - began))

    def _has_time(self) -> bool:
        """Return whether the last answers took little of the time since then: there may be a flood."""
        if len(self._answers) < _BURST:
            return True
        return self._clock() - self._answers[0][0] >= _PAUSE * sum(cost for _, cost in self._answers)

    def _write(
        self,
        check: str,
        part: Literal["received", "stated"],
        microbatch: MicrobatchId,
        evidence: ForwardEvidence,
    ) -> bool:
        began = self._clock()
        path = check_path(self._folder, check, part)
        try:
            before = sorted(path.parent.glob("*.safetensors"), key=lambda each: each.stat().st_mtime_ns)
            for old in before[: 1 - _KEPT]:
                old.unlink(missing_ok=True)
            write_evidence(path, evidence)
        except (OSError, StageFormatError) as error:
            logger.info("no file of a check of %s: %s", microbatch, error)
            return False
        seconds = self._clock() - began
        self._reported(CheckRecord(check, part, microbatch.phase, microbatch.index, seconds))
        return True

    def _draw(self) -> float:
        """Return the time of the next challenge: as likely at any moment, so that none is foreseen."""
        return self._clock() + self._chance.expovariate(1 / self._interval)
