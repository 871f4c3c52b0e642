"""A stage in its pipeline: passes events to the schedule machine and carries out its actions.

Used by the worker's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ravnest.averaging.ports import AveragingPort
from ravnest.errors import RunError
from ravnest.runtime.control.checkpoints import Checkpoints
from ravnest.runtime.control.recent_records import encoded_records
from ravnest.runtime.control.rendezvous import Links
from ravnest.runtime.control.run_status import RunStatus
from ravnest.runtime.schedule.events import (
    Action,
    Admit,
    ClipNormArrived,
    CombineNorms,
    CompleteGradients,
    Done,
    Event,
    Fail,
    Finished,
    FreeVersion,
    Run,
    RunBackward,
    RunForward,
    RunPhaseEnd,
    RunStep,
    RunWeights,
    SendBackward,
    SendClipNorm,
    SendForward,
    SendNorms,
    SendPhaseBegin,
    SendPhaseEnd,
    SendResult,
    SendShared,
    WeightsInterrupted,
)
from ravnest.runtime.schedule.machine import ScheduleMachine
from ravnest.runtime.stage.compute_trace import ComputeTrace
from ravnest.runtime.stage.divergence import Divergence
from ravnest.runtime.stage.inbox import WorkerInbox
from ravnest.runtime.stage.microbatches import Microbatch, MicrobatchStore, RootCut
from ravnest.runtime.stage.observer import MicrobatchReport, UpdateReport, WorkerObserver
from ravnest.tracing.recorder import SpanRecorder, now
from ravnest.tracing.spans import SpanKind
from ravnest.transport.base import LinkDelay
from ravnest.types import CheckpointId, MicrobatchId
from ravnest.wire.messages import (
    ClipNorm,
    GradientNorms,
    Message,
    SharedGradients,
    StageTiming,
    ValidationResult,
)

_NO_DELAY = LinkDelay(0.0, 0.0, 0.0)
_ALL_TIMED = 64
"""Micro-batches at the start of a phase whose timings are all reported to the Root."""
_TIMED_EVERY = 8
"""Interval of micro-batches whose timings are reported after that."""


class PipelineStage:
    """Schedule machine of a stage, with the computations and messages that it requests."""

    def __init__(
        self,
        machine: ScheduleMachine,
        store: MicrobatchStore,
        status: RunStatus,
        inbox: WorkerInbox,
        *,
        observer: WorkerObserver,
        averaging: AveragingPort | None,
        checkpoints: Checkpoints | None,
        report_validation: Callable[[ValidationResult], None],
        trace: SpanRecorder | None = None,
    ) -> None:
        """``report_validation`` is called with the result of each validation, at the Leaf."""
        self._trace = ComputeTrace(trace)
        self._store = store
        self._machine = machine
        self._status = status
        self._links = Links()
        self._inbox = inbox
        self._observer = observer
        self._averaging = averaging
        self._checkpoints = checkpoints
        self._divergence = Divergence(store.execution.updates.stop_on_nan)
        self._report_validation = report_validation
        self._run: Run | None = None
        self._clip: float | None = None
        self._step_seconds = 0.0
        self._weights_seconds = 0.0
        """Time of the last weight gradients that were deferred."""
        self._interrupted_seconds = 0.0
        """Time so far of those that were interrupted."""
        self._is_interrupted = False
        """True if the last computation was interrupted."""
        self._busy_since = 0.0
        """Time at which the thread last woke up or finished a computation; work since then counts as
        part of the next computation."""

    def connect(self, links: Links) -> None:
        """Send to these neighbours from now on."""
        self._links = links

    @property
    def busy(self) -> bool:
        """True if a computation is requested."""
        return self._run is not None

    @property
    def idle(self) -> bool:
        """True if no computation is requested and no micro-batch is in flight here."""
        return self._machine.idle

    def wake(self) -> None:
        """Count the time from now on as part of the next computation."""
        self._busy_since = time.perf_counter()

    def cancel(self) -> None:
        """Drop the requested computation: the run has failed."""
        self._run = None

    def allow_delay(self) -> None:
        """Let forwards run ahead of an update from now on; the Leaf has no need to."""
        self._machine.allow_delay()
        if not self._machine.is_leaf:
            self._store.execution.keep_versions()

    def clip_norm_arrived(self, head: ClipNorm) -> None:
        """Clip the gradients of an update by this norm."""
        self._clip = head.total
        self.handle(ClipNormArrived(head.update))

    def handle(self, event: Event) -> None:
        """Pass an event to the machine and carry out its actions."""
        for action in self._machine.handle(event, time.monotonic()):
            self._perform(action)

    def _perform(self, action: Action) -> None:  # noqa: C901, PLR0912 - one case per action
        match action:
            case RunForward() | RunBackward() | RunWeights() | RunStep() | RunPhaseEnd():
                self._run = action
            case SendForward(microbatch):
                for message in self._store.forward_messages(microbatch):
                    self._to_next(message)
            case SendBackward(microbatch):
                timings = self._timings(self._store.get(microbatch))
                self.to_previous(self._store.backward_message(microbatch, timings))
            case SendResult(microbatch):
                self.to_previous(self._store.result_message(microbatch))
            case SendPhaseBegin(phase):
                self._to_next(Message(self._store.phase_begin(phase)))
            case SendPhaseEnd(phase):
                self._to_next(Message(self._store.phase_end(phase)))
            case SendClipNorm(update):
                assert self._clip is not None
                self._to_next(Message(ClipNorm(update, self._clip)))
            case CompleteGradients(update):
                self._store.complete(update)
            case SendShared(update):
                head = SharedGradients(self._store.run, update)
                # One message for each weight: stages in between then hold one at a time.
                for key, gradient in self._store.execution.take_shared().items():
                    self.to_previous(Message(head, {key: gradient}))
            case SendNorms(update):
                norms = self._store.norms(update)
                self.to_previous(Message(GradientNorms(self._store.run, update, norms)))
            case CombineNorms(update, batches):
                self._clip = _total_norm(self._store.norms(update)) / batches
                self._inbox.post(lambda: self.handle(ClipNormArrived(update)))
            case FreeVersion(version):
                self._store.execution.free(version)
            case Admit(total):
                with self._status.writing():
                    self._status.admitted = total
            case Finished(microbatch):
                self._finish(microbatch)
            case Fail(reason):
                raise RunError(reason)

    def compute(self) -> None:
        """Carry out the requested computation; ``finish_computation`` must follow."""
        run, self._run = self._run, None
        self._is_interrupted = False
        began = now()
        match run:
            case RunForward(microbatch_id, version, trains, update, costly):
                late = update > version
                microbatch = self._store.forward(
                    microbatch_id, version, trains=trains, late=late, costly=costly
                )
                if microbatch.loss is not None:  # at the Leaf
                    epoch = self._store.phase_begin(microbatch_id.phase).epoch
                    self._divergence.check_loss(microbatch.loss, version, epoch)
                microbatch.forward_seconds = self._lap()
            case RunBackward(microbatch_id):
                microbatch = self._store.backward(microbatch_id)
                microbatch.backward_seconds = self._lap()
            case RunWeights(microbatch_id):
                self._compute_weights(microbatch_id)
            case RunStep(update, batches):
                self._step(update, batches)
            case RunPhaseEnd(phase):
                self._finish_phase(phase)
        if run is not None:
            self._trace.ran(run, began)

    def finish_computation(self) -> None:
        """Tell the machine that the computation is done; it sends the result and requests the next."""
        self.handle(WeightsInterrupted() if self._is_interrupted else Done())

    def _compute_weights(self, microbatch: MicrobatchId) -> None:
        """Compute deferred weight gradients until something arrives: another stage may wait for it."""
        calls = self._inbox.calls
        is_done = self._store.execution.weight_gradients(microbatch, lambda: not calls.empty())
        self._is_interrupted = not is_done
        self._interrupted_seconds += self._lap()
        if is_done:
            self._weights_seconds, self._interrupted_seconds = self._interrupted_seconds, 0.0

    def _lap(self) -> float:
        """Return the seconds since the thread last woke up or finished a computation.

        They count as the cost of the computation that has just finished: handling messages and waiting
        for Python's lock delay the pipeline as much as computing does.
        """
        now = time.perf_counter()
        seconds, self._busy_since = now - self._busy_since, now
        return seconds

    def _step(self, update: int, batches: int) -> None:
        rate = self._store.execution.updates.learning_rate
        loss = self._store.step(batches, self._clip)
        self._clip = None
        self._divergence.updated(loss)
        last = self._store.last
        assert last is not None
        epoch = self._store.phase_begin(last.id.phase).epoch
        stale = update - last.version
        in_flight = self._machine.in_flight
        samples = self._store.take_samples()
        if self._averaging is not None:
            self._averaging.updated(samples)
        waiting = self._inbox.calls.qsize()
        report = UpdateReport(
            update, epoch, loss, stale, batches, last.parts, in_flight, samples, waiting, rate
        )
        self._observer.updated(report)
        self._step_seconds = self._lap()
        with self._status.writing():
            self._status.updates = update + 1
            if (record := report.loss_record) is not None:
                self._status.recent.append(record)
        if last.checkpoint:
            progress = self._store.progress(last.cut, between_phases=False)
            self._save(CheckpointId(update + 1, last.id.phase), progress)

    def _save(self, checkpoint: CheckpointId, progress: dict[str, Any]) -> None:
        """Write a checkpoint; its time does not count as part of a computation."""
        began = now()
        self._divergence.check_weights(self._store.execution.updates.weights, checkpoint.update)
        if self._checkpoints is not None:
            with self._status.writing():
                recent = tuple(self._status.recent)
                validations = {
                    phase: (result.name, result.value, result.samples, result.metrics)
                    for phase, result in self._status.validations.items()
                }
            progress["validations"] = validations
            averaging = self._averaging
            progress["averaging_samples"] = 0 if averaging is None else averaging.samples
            if progress["root"] is not None:
                progress["recent"] = encoded_records(recent)
            progress["averaging_round"] = -1 if averaging is None else averaging.newest_round
            self._checkpoints.save(self._store.run, checkpoint, progress)
            self._trace.add(SpanKind.CHECKPOINT, began, checkpoint.update)
        self.wake()

    def _finish_phase(self, phase: int) -> None:
        if self._averaging is not None and self._store.phase_begin(phase).kind == "train":
            self._averaging.epoch_ended()
        saves = self._store.phase_end(phase).checkpoint
        validation = self._store.finish_phase(phase)
        if validation is not None:
            self._report_validation(validation)
        with self._status.writing():
            self._status.phases_over = max(self._status.phases_over, phase + 1)
        if saves:
            self._save_between_phases(self._store.take_cut(phase))

    def end_training(self, phases: int, cut: RootCut | None) -> None:
        """Write a checkpoint of the end of training, which counts as a phase without micro-batches.

        It has another number than the one after the last epoch, which is not averaged.
        """
        with self._status.writing():
            self._status.phases_over = max(self._status.phases_over, phases)
        self._save_between_phases(cut)

    def _save_between_phases(self, cut: RootCut | None) -> None:
        """Write a checkpoint after the end of a phase; ``cut`` is given at the Root."""
        progress = self._store.progress(cut, between_phases=True)
        self._save(CheckpointId(self._machine.version, self._status.phases_over), progress)

    # Sending

    def _to_next(self, message: Message) -> None:
        assert self._links.next is not None
        self._links.next.send(message)

    def to_previous(self, message: Message) -> None:
        """Send a message to the previous node."""
        assert self._links.previous is not None
        self._links.previous.send(message)

    def _timings(self, microbatch: Microbatch) -> tuple[StageTiming, ...]:
        """Return the timings of this and the following stages; empty if the Leaf sent none."""
        if not (microbatch.timings or (self._machine.is_leaf and _is_timed(microbatch.id.index))):
            return ()
        following, previous = (
            _NO_DELAY if link is None else link.delay()
            for link in (self._links.next, self._links.previous)
        )
        deferred = self._machine.traits.defers or microbatch.costly
        own = StageTiming(
            microbatch.forward_seconds,
            microbatch.backward_seconds,
            self._weights_seconds if deferred else 0.0,
            self._step_seconds,
            following.message,
            following.busy,
            previous.message,
            previous.busy,
        )
        return (own, *microbatch.timings)

    def _finish(self, microbatch_id: MicrobatchId) -> None:
        microbatch = self._store.get(microbatch_id)
        result = self._store.finish(microbatch_id)
        if result is None:
            self._observer.returned(
                MicrobatchReport(
                    microbatch.part,
                    microbatch.parts,
                    microbatch.batch_size,
                    self._timings(microbatch),
                )
            )
            return
        with self._status.writing():
            self._status.results[microbatch_id] = result


def _total_norm(norms: Iterable[tuple[int, float]]) -> float:
    """Return the norm of all gradients, combined in the order of the model's parameters."""
    return float(torch.linalg.vector_norm(torch.tensor([norm for _, norm in sorted(norms)])))


def _is_timed(index: int) -> bool:
    """Return whether the timings of a micro-batch are reported: all at first, then every eighth."""
    return index < _ALL_TIMED or index % _TIMED_EVERY == 0
