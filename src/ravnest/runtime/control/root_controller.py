"""Control of a run at the Root: phases, micro-batches and the end, in the order of the user's calls."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ravnest.errors import DataError, RunError
from ravnest.runtime.batch_parts import BatchSplit, part_sizes
from ravnest.runtime.control.microbatch_tuner import MicrobatchTuner
from ravnest.runtime.control.run_status import MicrobatchResult, RunStatus
from ravnest.runtime.stage.microbatches import Microbatch
from ravnest.runtime.stage.worker import Worker
from ravnest.split.rows import cut_rows
from ravnest.types import MicrobatchId
from ravnest.wire.messages import (
    Call,
    CallEnd,
    LossSplit,
    PhaseBegin,
    PhaseEnd,
    PhaseKind,
    RunEnd,
    SaveStage,
    ValidationResult,
)


@dataclass(frozen=True)
class BlockingAverages:
    """Averaging rounds for which this cluster stops training."""

    blocking: bool
    reduce_factor: int | None
    ask: Ask


class Ask(Protocol):
    """Callback that requests a round for which this cluster stops training."""

    def __call__(self, *, final: bool) -> None:
        """Request a round; ``final`` marks the last one of the run."""


class RootController:
    """Control of a run by the user's thread at the Root. Waits end if the run fails or stalls."""

    def __init__(
        self,
        worker: Worker,
        status: RunStatus,
        *,
        stages: int,
        stall: float,
        update_frequency: int,
        choose_split: Callable[[LossSplit], BatchSplit],
        tuner: MicrobatchTuner | None,
        averages: BlockingAverages | None,
    ) -> None:
        """``averages`` is given if there are other clusters; ``tuner`` if it may change the split."""
        self._choose_split = choose_split
        self._tuner = tuner
        self._batch_split: BatchSplit | None = None
        self._worker = worker
        self._status = status
        self._stages = stages
        self._stall = stall
        self._update_frequency = update_frequency
        self._averages = averages
        self.run = uuid.uuid4().hex
        self.open: PhaseBegin | None = None
        """Phase that submitted micro-batches belong to; None between phases."""
        self._phases = 0
        self._count = 0
        """Micro-batches of the open phase."""
        self._batches = 0
        """Batches of the open phase."""
        self._submitted = 0
        self._window = 0
        """Largest number of micro-batches of a batch so far."""
        self._updates = 0
        """Number of updates that the submitted micro-batches result in."""

    def begin(self, kind: PhaseKind, epoch: int) -> None:
        """Begin a phase; the previous one must have ended."""
        assert self.open is None, "a phase is open"
        self._status.check()
        if self._status.departed is not None:
            raise RunError(
                f"node_{self._status.departed} has left the run: its script has ended. Every node's "
                "script must make the same calls (train, evaluate, pred) as the Root's"
            )
        late = kind == "train" and self._split().late
        self.open = PhaseBegin(self.run, self._phases, kind, epoch, late)
        self._phases += 1
        self._count = self._batches = 0
        self._worker.post(functools.partial(self._worker.begin_phase, self.open))

    def submit(
        self, values: dict[str, Any], size: int, digests: dict[str, str], item: Any
    ) -> MicrobatchId:
        """Submit a batch to the pipeline, once it has a free place; return its last micro-batch."""
        begin = self.open
        assert begin is not None, "no phase is open"
        trains = begin.kind == "train"
        parts = self._parts(size) if trains else 1
        cut = cut_rows(values, part_sizes(size, parts)) if parts > 1 else [values]
        if cut is None:
            raise DataError(f"a batch of {size} samples has no tensor with that many rows to split")
        self._wait(lambda: self._submitted < self._status.admitted, "micro-batches to return")
        self._batches += 1
        ends_update = trains and self._batches % self._update_frequency == 0
        for part, part_values in enumerate(cut):
            first, last = part == 0, part == parts - 1
            microbatch = Microbatch(
                MicrobatchId(begin.phase, self._count),
                size,
                part_values,
                part,
                parts,
                ends_update and last,
                digests if first else {},
                item if first else None,
            )
            self._worker.post(functools.partial(self._worker.submit, microbatch))
            self._count += 1
            self._submitted += 1
        if ends_update:
            self._updates += 1
            self._stand_still_if_due()
        return microbatch.id

    def _parts(self, size: int) -> int:
        """Return the number of micro-batches of a training batch."""
        split = self._split()
        if self._tuner is None or split.rows is None:
            return split.parts(size)
        parts = self._tuner.parts(size, split)
        if parts > self._window:  # the places of a batch; memory does not limit them here
            self._window = parts
            self._worker.post(functools.partial(self._worker.set_window, parts))
        return parts

    def _split(self) -> BatchSplit:
        """Return the rule by which batches are split, once the Leaf has answered."""
        if self._batch_split is None:
            self._wait(lambda: self._status.loss_split is not None, "the Leaf to check the loss")
            assert self._status.loss_split is not None
            self._batch_split = self._choose_split(self._status.loss_split)
        return self._batch_split

    def end(self, *, exhausted: bool) -> int:
        """End the open phase and return its number."""
        begin, self.open = self.open, None
        assert begin is not None, "no phase is open"
        end = PhaseEnd(self.run, begin.phase, self._count, exhausted)
        self._worker.post(functools.partial(self._worker.end_phase, end))
        if begin.kind == "train":
            rest = self._batches % self._update_frequency
            self._updates += rest > 0
            self._stand_still_if_due(made_update=rest > 0, epoch_over=True)
        return begin.phase

    def average(self, *, final: bool) -> None:
        """Wait until the clusters have averaged; submitted micro-batches are applied first."""
        if self._averages is None:
            return
        self._wait(lambda: self._status.updates >= self._updates, "micro-batches to return")
        over = self._status.rounds
        self._averages.ask(final=final)
        # No deadline here: the coordinator has one, and the final round waits for all live clusters.
        self._status.wait(lambda: self._status.rounds > over)

    def _stand_still_if_due(self, *, made_update: bool = True, epoch_over: bool = False) -> None:
        still = self._averages
        if still is None or not still.blocking:
            return
        every = still.reduce_factor
        if epoch_over if every is None else made_update and self._updates % every == 0:
            self.average(final=False)

    def settle(self) -> None:
        """Wait until all ended phases are over: their micro-batches have returned and are applied."""
        ended = self._phases - (self.open is not None)
        self._wait(lambda: self._status.phases_over >= ended, "the end of the phase")

    def validation(self, phase: int) -> ValidationResult:
        """Wait for the result of a validation and return it."""
        self._wait(lambda: phase in self._status.validations, "the Leaf's validation result")
        with self._status.writing():
            self._status.results.clear()
        return self._status.validations[phase]

    def result(self, microbatch: MicrobatchId) -> MicrobatchResult:
        """Wait for the Leaf's result for a micro-batch and return it."""
        self._wait(lambda: microbatch in self._status.results, "the Leaf's result")
        return self._status.results.pop(microbatch)

    def save(self) -> None:
        """Make every node write its trained stage, and wait until all of them have arrived."""
        self._status.check()
        self._worker.post(functools.partial(self._worker.announce, SaveStage(self.run)))
        self._wait(lambda: len(self._status.saved_stages) == self._stages, "the trained stages")
        with self._status.writing():
            self._status.saved_stages.clear()

    def end_call(self, call: Call) -> None:
        """End a call of the user on all nodes."""
        self._worker.post(functools.partial(self._worker.announce, CallEnd(self.run, call)))
        self._wait(lambda: self._status.ended_calls[call] > 0, "the call to end")
        with self._status.writing():
            self._status.ended_calls[call] -= 1

    def finish(self) -> None:
        """End the run on all nodes; calls that wait there return."""
        self._worker.post(functools.partial(self._worker.announce, RunEnd(self.run)))

    def _wait(self, ready: Callable[[], bool], waiting_for: str) -> None:
        self._status.wait(ready, stall=self._stall, waiting_for=f"the Root waits for {waiting_for}")
