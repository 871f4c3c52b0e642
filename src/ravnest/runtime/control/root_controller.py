"""The Root's side of a run: phases, micro-batches and the end, in the order of the user's calls."""

from __future__ import annotations

import functools
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from ravnest.errors import RunError
from ravnest.runtime.control.run_status import MicrobatchResult, RunStatus
from ravnest.runtime.schedule.events import Batch
from ravnest.runtime.stage.worker import Worker
from ravnest.wire.messages import (
    Call,
    CallEnd,
    MicrobatchId,
    PhaseBegin,
    PhaseEnd,
    PhaseKind,
    RunEnd,
    SaveStage,
    ValidationResult,
)


@dataclass(frozen=True)
class BlockingAverages:
    """How averages between clusters hold up the training of this one."""

    blocking: bool
    reduce_factor: int | None
    ask: Ask


class Ask(Protocol):
    """Tells the other clusters that this one stands still."""

    def __call__(self, *, final: bool) -> None:
        """``final``: for the last time."""


class RootController:
    """Used by the user's thread, at the Root. Waits are ended by a failure, or when all stalls."""

    def __init__(
        self,
        worker: Worker,
        board: RunStatus,
        *,
        stages: int,
        stall: float,
        update_frequency: int,
        averages: BlockingAverages | None,
    ) -> None:
        """``averages`` is given if there are other clusters."""
        self._worker = worker
        self._board = board
        self._stages = stages
        self._stall = stall
        self._update_frequency = update_frequency
        self._averages = averages
        self.run = uuid.uuid4().hex
        self.open: PhaseBegin | None = None
        """The phase that micro-batches belong to now."""
        self._phases = 0
        self._count = 0
        self._submitted = 0
        self._updates = 0
        """That all micro-batches so far make."""

    def begin(self, kind: PhaseKind, epoch: int) -> None:
        """Start a phase; the one before must have ended."""
        assert self.open is None, "a phase is open"
        self._board.check()
        if self._board.left is not None:
            raise RunError(
                f"node_{self._board.left} has left the run: its script has ended. Every node's script "
                "must make the same calls (train, evaluate, pred) as the Root's"
            )
        self.open = PhaseBegin(self.run, self._phases, kind, epoch)
        self._phases += 1
        self._count = 0
        self._worker.post(functools.partial(self._worker.begin, self.open))

    def submit(self, values: dict[str, Any], size: int, digests: dict[str, str], item: Any) -> Batch:
        """Give a micro-batch to the pipeline, as soon as it has a place."""
        begin = self.open
        assert begin is not None, "no phase is open"
        self._wait(lambda: self._submitted < self._board.admitted, "micro-batches to come back")
        batch = MicrobatchId(self.run, begin.phase, begin.epoch, self._count)
        call = functools.partial(self._worker.submit, batch, size, digests, values, item)
        self._worker.post(call)
        self._count += 1
        self._submitted += 1
        if begin.kind == "train" and self._count % self._update_frequency == 0:
            self._updates += 1
            self._stand_still_if_due()
        return Batch(batch.phase, batch.index)

    def end(self, *, exhausted: bool) -> int:
        """No further micro-batch belongs to the open phase; its number."""
        begin, self.open = self.open, None
        assert begin is not None, "no phase is open"
        end = PhaseEnd(self.run, begin.phase, self._count, exhausted)
        self._worker.post(functools.partial(self._worker.end, end))
        if begin.kind == "train":
            rest = self._count % self._update_frequency
            self._updates += rest > 0
            self._stand_still_if_due(made_update=rest > 0, epoch_over=True)
        return begin.phase

    def average(self, *, final: bool) -> None:
        """Stand still until the clusters have averaged; what was submitted is applied first."""
        if self._averages is None:
            return
        self._wait(lambda: self._board.updates >= self._updates, "micro-batches to come back")
        over = self._board.rounds
        self._averages.ask(final=final)
        # No deadline here: the coordinator has its own, and in the end waits for all that live.
        self._board.wait(lambda: self._board.rounds > over)

    def _stand_still_if_due(self, *, made_update: bool = True, epoch_over: bool = False) -> None:
        still = self._averages
        if still is None or not still.blocking:
            return
        every = still.reduce_factor
        if epoch_over if every is None else made_update and self._updates % every == 0:
            self.average(final=False)

    def settle(self) -> None:
        """Wait until all phases that have ended are over: all micro-batches are back and applied."""
        ended = self._phases - (self.open is not None)
        self._wait(lambda: self._board.over >= ended, "the end of the phase")

    def figure(self, phase: int) -> ValidationResult:
        """The result of a validation."""
        self._wait(lambda: phase in self._board.figures, "the Leaf's figure")
        with self._board.writing():
            self._board.answers.clear()
        return self._board.figures[phase]

    def answer(self, batch: Batch) -> MicrobatchResult:
        """What the Leaf made of a micro-batch."""
        self._wait(lambda: batch in self._board.answers, "the Leaf's answer")
        return self._board.answers.pop(batch)

    def save(self) -> None:
        """Have every node write its trained stage, and wait until all are here."""
        self._board.check()
        self._worker.post(functools.partial(self._worker.announce, SaveStage(self.run)))
        self._wait(lambda: len(self._board.saved) == self._stages, "the trained stages")
        with self._board.writing():
            self._board.saved.clear()

    def returns(self, call: Call) -> None:
        """End a call of the user's on all nodes."""
        self._worker.post(functools.partial(self._worker.announce, CallEnd(self.run, call)))
        self._wait(lambda: self._board.returned[call] > 0, "the call to end")
        with self._board.writing():
            self._board.returned[call] -= 1

    def finish(self) -> None:
        """The run is over; nothing on other nodes waits any longer."""
        self._worker.post(functools.partial(self._worker.announce, RunEnd(self.run)))

    def _wait(self, ready: Any, waiting_for: str) -> None:
        self._board.wait(ready, stall=self._stall, waiting_for=f"the Root waits for {waiting_for}")
