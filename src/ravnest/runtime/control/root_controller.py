"""Control of a run at the Root: phases, micro-batches and the end, in the order of the user's calls."""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import xxhash

from ravnest.deadlines import FINAL_CHECKPOINT, LAST_CHECKPOINT
from ravnest.errors import DataError, RunError
from ravnest.runtime.batch_parts import BatchSplit, part_sizes
from ravnest.runtime.control.checkpoint_policy import CheckpointPolicy
from ravnest.runtime.control.ended_training import EndedTraining
from ravnest.runtime.control.microbatch_tuner import MicrobatchTuner
from ravnest.runtime.control.run_status import MicrobatchResult, RunStatus
from ravnest.runtime.random_state import RandomState
from ravnest.runtime.stage.microbatches import Microbatch, RootCut
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
    TakeCheckpoint,
    ValidationResult,
)

logger = logging.getLogger(__name__)

NOTHING_DONE = RootCut(0, 0, 0, 0, "", None)
"""Position before the first batch of a phase."""


@dataclass(frozen=True)
class ResumePoint:
    """Checkpoint that a Root continues from."""

    run: str
    phases: int
    """Phases that are over."""
    updates: int
    cut: RootCut
    """Position in the next phase."""


@dataclass(frozen=True)
class BlockingAverages:
    """Averaging rounds for which this cluster stops training."""

    blocking: bool
    reduce_factor: int | None
    ask: Ask
    ended: EndedTraining | None = None
    """None if there are no checkpoints."""


class Ask(Protocol):
    """Callback that requests a round for which this cluster stops training."""

    def __call__(self, *, final: bool, kept: bool = False, call: int = 0) -> None:
        """Request a round; ``final``: training has ended, in this ``call`` of the script.

        ``kept``: the average of the final round is in a checkpoint.
        """


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
        policy: CheckpointPolicy | None,
    ) -> None:
        """``averages`` is given if there are other clusters; ``tuner`` if it may change the split.

        ``policy`` is None if no checkpoints are taken.
        """
        self._policy = policy
        self._point: ResumePoint | None = None
        """Checkpoint that training continues from, until it is reached."""
        self._random: RandomState | None = None
        """State of the generators when the iteration of the open phase's loader began."""
        self._data = xxhash.xxh3_64()
        """Digest of the batches of the open phase."""
        self._samples = 0
        """Samples of the open phase."""
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
        self._departs = False
        """A node is about to leave once it has a last checkpoint."""

    @property
    def phases(self) -> int:
        """Number of phases that have begun."""
        return self._phases

    @property
    def updates(self) -> int:
        """Number of updates that the submitted micro-batches result in."""
        return self._updates

    def start_at(self, phase: int) -> None:
        """Number the next phase ``phase``: earlier calls of the script have had those before it."""
        if self._point is not None and self._point.phases < phase:
            raise RunError(
                "the newest checkpoint is older than this call of the script: start all nodes again "
                "with resume=True, which repeats the calls before it"
            )
        self._phases = phase

    def resume(self, point: ResumePoint) -> None:
        """Continue from a checkpoint: what is part of it is counted, and not computed again."""
        self.run = point.run
        self._updates = point.updates
        self._point = point if point.phases or point.cut.batches else None
        if self._policy is not None:
            self._policy.resume(point.updates, point.phases)

    @property
    def skips_phase(self) -> bool:
        """True if the phase that is open, or else the next one, is part of the checkpoint."""
        number = self._phases - (self.open is not None)
        return self._point is not None and number < self._point.phases

    def skips(self, kind: PhaseKind) -> bool:
        """Return whether the next phase, of this kind, is part of the checkpoint.

        If it begins where the training of the checkpoint ended, the script has more epochs than before.
        """
        point = self._point
        if point is None or kind == "predict":
            return False
        if point.cut.ended and self._phases == point.phases - 1:
            self._point = replace(point, phases=self._phases)
        return self.skips_phase

    def begin(self, kind: PhaseKind, epoch: int, random: RandomState | None = None) -> None:
        """Begin a phase; the previous one must have ended.

        ``random``: the state of the generators when the iteration of the phase's loader began.
        """
        assert self.open is None, "a phase is open"
        self._status.check()
        self._random, self._samples = random, 0
        self._data.reset()
        if self.skips(kind):
            self.open = PhaseBegin(self.run, self._phases, kind, epoch)
            self._phases += 1
            self._batches = 0
            return
        if self._status.departed is not None:
            raise RunError(
                f"node_{self._status.departed} has left the run: its script has ended. Every node's "
                "script must make the same calls (train, evaluate, pred) as the Root's"
            )
        late = kind == "train" and self._split().late
        done = self._skipped()
        self.open = PhaseBegin(
            self.run, self._phases, kind, epoch, late, done.microbatches, done.batches, done.samples
        )
        self._phases += 1
        self._count, self._batches = done.microbatches, 0
        self._worker.post(functools.partial(self._worker.begin_phase, self.open))

    def submit(
        self, values: dict[str, Any], size: int, digests: dict[str, str], item: Any
    ) -> MicrobatchId:
        """Submit a batch to the pipeline, once it has a free place; return its last micro-batch."""
        begin = self.open
        assert begin is not None, "no phase is open"
        self._data.update(repr(digests).encode())
        self._samples += size
        if self._is_skipped(begin):
            return MicrobatchId(begin.phase, self._batches)
        trains = begin.kind == "train"
        if trains:
            self._await_departure()
        parts = self._parts(size) if trains else 1
        cut = cut_rows(values, part_sizes(size, parts)) if parts > 1 else [values]
        if cut is None:
            raise DataError(f"a batch of {size} samples has no tensor with that many rows to split")
        self._wait(lambda: self._submitted < self._status.admitted, "micro-batches to return")
        self._batches += 1
        ends_update = trains and self._batches % self._update_frequency == 0
        saves = ends_update and self._saves_after_update()
        for part, part_values in enumerate(cut):
            first, last = part == 0, part == parts - 1
            microbatch = Microbatch(
                MicrobatchId(begin.phase, self._count),
                size,
                part_values,
                part,
                parts,
                ends_update and last,
                # With the item, the Leaf loads no batch of its own to compare.
                digests if first and item is None else {},
                item if first else None,
                saves and last,
                self._cut(self._count + 1) if saves and last else None,
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

    def end(self, *, exhausted: bool, random: RandomState | None = None) -> int:
        """End the open phase and return its number; ``random``: the state of the generators now."""
        begin, skips = self.open, self.skips_phase
        assert begin is not None, "no phase is open"
        self.open = None
        if skips and begin.kind != "predict":
            return begin.phase
        if self._batches < begin.batches:
            raise DataError(
                f"training continues after batch {begin.batches} of the epoch, but the loader has only "
                f"{self._batches}"
            )
        saves = begin.kind == "train" and self._saves_after_epoch(begin)
        end = PhaseEnd(self.run, begin.phase, self._count, exhausted, saves)
        cut = RootCut(begin.epoch + 1, 0, 0, 0, "", random) if saves else None
        self._worker.post(functools.partial(self._worker.end_phase, end, cut))
        if begin.kind == "train":
            rest = self._batches % self._update_frequency
            self._updates += rest > 0
            self._stand_still_if_due(made_update=rest > 0, epoch_over=True)
        return begin.phase

    # Checkpoints

    def _skipped(self) -> RootCut:
        """Return what the checkpoint contains of the next phase."""
        point = self._point
        return NOTHING_DONE if point is None or self._phases != point.phases else point.cut

    def _is_skipped(self, begin: PhaseBegin) -> bool:
        """Count a batch and return True if the checkpoint contains it."""
        point = self._point
        if point is None or begin.kind == "predict":
            return False
        if begin.phase < point.phases:
            self._batches += 1
            return True
        if begin.phase > point.phases or self._batches == point.cut.batches:
            self._point = None
            return False
        self._batches += 1
        if self._batches == point.cut.batches and self._data.hexdigest() != point.cut.data:
            raise DataError(
                f"training continues after batch {self._batches} of the epoch, but the batches before "
                "it are not those of the interrupted run: use the same dataset, batch size and "
                "set_seed(), and a loader whose order depends on nothing else"
            )
        return True

    def _saves_after_update(self) -> bool:
        policy, averages = self._policy, self._averages
        if policy is None:
            return False
        update = self._updates + 1
        if averages is not None and averages.blocking and averages.reduce_factor not in (None, 1):
            assert averages.reduce_factor is not None
            if update % averages.reduce_factor == 0:  # the round follows; the next update has its result
                return False
        self._take_wish(policy)
        policy.settled = self._status.checkpoints_settled
        return policy.due_after_update(update, time.monotonic())

    def _take_wish(self, policy: CheckpointPolicy) -> None:
        """Take note of a node that wants a last checkpoint before it leaves."""
        if self._status.checkpoint_wanted:
            with self._status.writing():
                self._status.checkpoint_wanted = False
            self._departs = policy.wanted = True

    def _await_departure(self) -> None:
        """Wait for a node that has its last checkpoint to leave: more updates would be repeated.

        When it leaves, the run is interrupted, which ends the wait; another one may wish to leave too.
        """
        status = self._status
        if self._departs and self._policy is not None and not self._policy.wanted:
            self._departs = False
            status.wait_for(lambda: status.checkpoint_wanted, LAST_CHECKPOINT)

    def _saves_after_epoch(self, begin: PhaseBegin) -> bool:
        policy, averages = self._policy, self._averages
        if policy is None or self._count == begin.first:
            return False
        self._take_wish(policy)
        update = self._updates + (self._batches % self._update_frequency > 0)
        policy.settled = self._status.checkpoints_settled
        if averages is not None and averages.blocking and averages.reduce_factor is None:
            policy.postpone_after_epoch(time.monotonic())  # the next update has the round's result
            return False
        return policy.due_after_epoch(update, time.monotonic())

    def end_training(self, epoch: int, random: RandomState, call: int) -> None:
        """Average with the other clusters for the last time; make all nodes write a checkpoint.

        All clusters end together, when each of them has the average in a checkpoint: one that loses a
        node before gets it from the others. The end of training counts as a phase.
        """
        kept = self.skips_phase
        self._phases += 1
        if kept and self._has_ended():
            return
        cut = RootCut(epoch, 0, 0, 0, "", random, ended=True)
        taken = kept
        while self._averages is not None and self._average_finally(kept=kept, call=call):
            self._take_checkpoint(cut)
            self._await_checkpoint()
            kept = taken = True
        if self._averages is not None and self._averages.ended is not None:
            self._averages.ended.write(self.run, self._phases)
        if not taken:
            self._take_checkpoint(cut)

    def _has_ended(self) -> bool:
        """Return whether the other clusters need nothing of this one to end the training."""
        point, averages = self._point, self._averages
        assert point is not None, "the end of training is part of a checkpoint"
        later_call = point.phases > self._phases
        if averages is None or later_call:
            return True
        return averages.ended is not None and averages.ended.covers(self.run, self._phases)

    def _take_checkpoint(self, cut: RootCut) -> None:
        if self._policy is not None:
            self._policy.take(self._updates, time.monotonic())
        head = TakeCheckpoint(self.run, self._phases)
        self._worker.post(functools.partial(self._worker.announce, head, cut))

    def _await_checkpoint(self) -> None:
        """Wait until all nodes have stored the checkpoint of the end of training, or cannot."""
        status = self._status
        if self._policy is None:
            return
        if not status.wait_for(lambda: status.phases_settled >= self._phases, FINAL_CHECKPOINT):
            logger.warning(
                "the checkpoint of the trained model is not stored on all nodes after %.0f s: if a node "
                "is lost now, its cluster may end with another model than the others",
                FINAL_CHECKPOINT,
            )

    def _cut(self, microbatches: int) -> RootCut:
        """Return the position of the data after this number of micro-batches of the open phase."""
        assert self.open is not None
        return RootCut(
            self.open.epoch,
            self._batches,
            microbatches,
            self._samples,
            self._data.hexdigest(),
            self._random,
        )

    def _average(self, ask: Callable[[], None]) -> bool:
        """Wait until the clusters have averaged; return whether this one has taken part.

        Submitted micro-batches are applied first.
        """
        status = self._status
        self._wait(lambda: status.updates >= self._updates, "micro-batches to return")
        over = status.rounds
        ask()
        # No deadline here: the coordinator has one, and the final round waits for all live clusters.
        status.wait(lambda: status.rounds > over)
        return status.last_round_applied

    def _average_finally(self, *, kept: bool, call: int) -> bool:
        """Request the final round or, with its average in a checkpoint, its end; see ``_average``."""
        averages = self._averages
        assert averages is not None
        return self._average(lambda: averages.ask(final=True, kept=kept, call=call))

    def _stand_still_if_due(self, *, made_update: bool = True, epoch_over: bool = False) -> None:
        still = self._averages
        if still is None or not still.blocking:
            return
        every = still.reduce_factor
        if epoch_over if every is None else made_update and self._updates % every == 0:
            self._average(lambda: still.ask(final=False))

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
        """Wait for the Leaf's result for a micro-batch and return it.

        If the validation is part of the checkpoint, return the result of the whole validation.
        """
        stored = self._status.validations.get(microbatch.phase)
        if self.open is not None and self.skips_phase and stored is not None:
            return MicrobatchResult(value=stored.value)
        self._wait(lambda: microbatch in self._status.results, "the Leaf's result")
        return self._status.results.pop(microbatch)

    def save(self, *, best: bool = False) -> None:
        """Make every node write its trained stage, and wait until all of them have arrived.

        ``best``: it is the best model so far, which only the Root writes.
        """
        self._status.check()
        self._worker.post(functools.partial(self._worker.announce, SaveStage(self.run, best)))
        self._wait(lambda: len(self._status.saved_stages) == self._stages, "the trained stages")
        with self._status.writing():
            self._status.saved_stages.clear()

    def end_call(self, call: Call, number: int) -> None:
        """End a call of the user on all nodes; ``number`` is its position in the script, from 1."""
        end = CallEnd(self.run, call, number)
        self._worker.post(functools.partial(self._worker.announce, end))
        self._wait(lambda: self._status.calls_ended >= number, "the call to end")

    def finish(self) -> None:
        """End the run on all nodes; calls that wait there return."""
        self._worker.post(functools.partial(self._worker.announce, RunEnd(self.run)))

    def _wait(self, ready: Callable[[], bool], waiting_for: str) -> None:
        self._status.wait(ready, stall=self._stall, waiting_for=f"the Root waits for {waiting_for}")
