"""Compute thread of a node: messages of neighbours, calls of the user's thread, and the end of a run.

All state of the stage belongs to this thread. Transports and the user's thread only put calls into its
inbox; results are written to the run status, on which the user's thread waits. ``pipeline_stage``
carries out what the schedule requests.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ravnest.averaging.ports import AveragingPort
from ravnest.deadlines import LINK_CLOSE
from ravnest.errors import LinkClosedError, RavnestError, RunError
from ravnest.runtime.control.rendezvous import Links
from ravnest.runtime.control.resume_exchange import Recovery
from ravnest.runtime.control.run_status import RunStatus
from ravnest.runtime.machine_failures import is_machine_failure
from ravnest.runtime.schedule.events import (
    BackwardArrived,
    ForwardArrived,
    NormsArrived,
    PhaseBegun,
    PhaseEnded,
    ResultArrived,
    SharedArrived,
    WindowSet,
)
from ravnest.runtime.schedule.machine import ScheduleMachine
from ravnest.runtime.stage.directions import may_send
from ravnest.runtime.stage.divergence import DivergedError
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.inbox import WorkerInbox
from ravnest.runtime.stage.leaf import Leaf
from ravnest.runtime.stage.microbatches import Microbatch, MicrobatchStore, RootCut
from ravnest.runtime.stage.observer import (
    StageKeeper,
    WorkerObserver,
)
from ravnest.runtime.stage.pipeline_stage import PipelineStage
from ravnest.runtime.stage.spot_checks import ForwardChecks
from ravnest.tracing.recorder import SpanRecorder
from ravnest.transport.base import Link, try_send
from ravnest.wire.messages import (
    Abort,
    AnyHead,
    Backward,
    CallEnd,
    CheckpointComplete,
    CheckpointStored,
    CheckpointWanted,
    ClipNorm,
    Decision,
    Forward,
    ForwardChallenge,
    ForwardResult,
    Goodbye,
    GradientNorms,
    LossSplit,
    Message,
    PhaseBegin,
    PhaseEnd,
    Prepare,
    Prepared,
    Reduced,
    ReplicaStored,
    RunEnd,
    SaveStage,
    SharedGradients,
    SharedWeights,
    StageSaved,
    Start,
    StateBlock,
    TakeCheckpoint,
    ValidationResult,
)

logger = logging.getLogger(__name__)

_PASS_SECONDS = 600.0
"""Longest wait before a tensor is passed on although the link has not written the one before."""


class Worker:
    """Compute thread of one stage."""

    def __init__(  # noqa: PLR0913 - parts of a node, made by its runtime
        self,
        execution: StageExecution,
        machine: ScheduleMachine,
        status: RunStatus,
        inbox: WorkerInbox,
        *,
        leaf: Leaf | None,
        keeper: StageKeeper,
        observer: WorkerObserver,
        averaging: AveragingPort | None,
        recovery: Recovery,
        checks: ForwardChecks,
        trace: SpanRecorder | None = None,
    ) -> None:
        """``leaf`` is given at the last stage, ``averaging`` if there are other clusters."""
        node = recovery.exchange.spec.node
        self._store = MicrobatchStore(execution, leaf)
        self._keys = frozenset(entry.key for entry in execution.module.spec.state)
        """Weights and buffers of this stage."""
        self._stage = PipelineStage(
            machine,
            self._store,
            status,
            inbox,
            observer=observer,
            averaging=averaging,
            checkpoints=recovery.checkpoints,
            report_validation=self._send_validation,
            trace=trace,
        )
        self._checks = checks
        self._checkpoints = recovery.checkpoints
        self._exchange = recovery.exchange
        self._rejoins = recovery.rejoins
        self._hands_over = recovery.hands_over
        self._status = status
        self._links = Links()
        self._node = node
        self._keeper = keeper
        self._observer = observer
        self._averaging = averaging
        self._inbox = inbox.calls
        self._when_idle = inbox.when_idle
        self._when_over: list[Callable[[], None]] = []
        """Calls for the time when all phases are over here, updates that wait for others included."""
        self._closed = False
        self._heard = threading.Event()
        """A neighbour has ended the run, or is lost."""
        self._thread = threading.Thread(target=self._work, name=f"ravnest-node_{node}", daemon=True)

    def start(self, links: Links) -> None:
        """Start the thread; ``links`` are the links to the neighbours."""
        self._links = links
        self._stage.connect(links)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread after its current computation."""
        self.post(self._close)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def post(self, call: Callable[[], None]) -> None:
        """Queue a call for the worker's thread."""
        self._inbox.put(call)

    # Called by links

    def on_message(self, link: Link, message: Message) -> None:
        """Queue a message of a neighbour; ignore one that this neighbour may not send."""
        head = message.head
        known = self._links == Links() or link in (self._links.previous, self._links.next)
        if not known or not may_send(self._exchange.spec, link.peer.node, head):
            logger.warning("node_%d sent a %s that is ignored", link.peer.node, type(head).__name__)
            return
        if self._exchange.on_message(message):
            return
        if isinstance(head, StateBlock | ReplicaStored | CheckpointStored | CheckpointComplete):
            self._take_state(link, message)
        elif self._averaging is not None and isinstance(
            head, Prepare | Start | Decision | Prepared | Reduced
        ):
            self._averaging.from_pipeline(head)
        elif isinstance(head, SharedGradients | SharedWeights) and not self._held(message):
            self._pass_on(message)
        else:
            self.post(lambda: self._receive(link, message))
        if isinstance(head, Abort):
            self._heard.set()

    def _take_state(self, link: Link, message: Message) -> None:
        """Take a part of a checkpoint, in the link's thread: it is written to the disk."""
        if self._checkpoints is None:
            return
        try:
            manifest = self._checkpoints.on_message(link, message)
        except (RavnestError, OSError) as error:
            self._exchange.on_problem(f"node_{self._node} cannot store its state: {error}")
            return
        if manifest is not None:
            self._exchange.on_state(manifest)

    def _held(self, message: Message) -> bool:
        """Return whether this stage holds a weight of the message."""
        return not self._keys.isdisjoint(message.values)

    def _pass_on(self, message: Message) -> None:
        """Pass on a weight of other stages, or its gradient, once the one before is written.

        The link does not receive in the meantime, so that its peer waits too. A node in between then
        holds two such tensors at most: one that arrives, and one that leaves.
        """
        to_next = isinstance(message.head, SharedWeights)
        target = self._links.next if to_next else self._links.previous
        if target is not None and self._status.failure is None:
            target.wait_written(_PASS_SECONDS)
            with suppress(LinkClosedError):  # the link reports its loss itself
                target.send(message)

    def on_lost(self, link: Link, reason: str) -> None:
        """Queue the loss of the link to a neighbour."""
        self._exchange.on_lost(link, reason)
        self.post(lambda: self._neighbour_lost(link, reason))
        self._heard.set()

    # Called by the Root controller, through post()

    def begin_phase(self, begin: PhaseBegin) -> None:
        """Begin a phase."""
        if begin.late:
            self._stage.allow_delay()
        self._store.begin_phase(begin)
        self._observer.begun(begin)
        self._stage.handle(PhaseBegun(begin.phase, begin.kind == "train", begin.first))

    def submit(self, microbatch: Microbatch) -> None:
        """Process a micro-batch that has arrived: from the user at the Root, else from a message."""
        self._store.add(microbatch)
        self._stage.handle(ForwardArrived(microbatch.id, microbatch.ends_batch, microbatch.ends_update))

    def end_phase(self, end: PhaseEnd, cut: RootCut | None = None) -> None:
        """End a phase: all its micro-batches have arrived; ``cut`` is given at the Root."""
        self._store.end_phase(end, cut)
        self._stage.handle(PhaseEnded(end.phase, end.count))

    def set_window(self, size: int) -> None:
        """Set the number of micro-batches that the Root keeps in flight."""
        self._stage.handle(WindowSet(size))

    def announce(self, head: AnyHead, cut: RootCut | None = None) -> None:
        """Act on a message of the Root to all nodes, and pass it on to the next node.

        ``cut`` is the position of the data, for a checkpoint at the Root. A failed run does nothing.
        """
        if self._status.failure is not None:
            return
        match head:
            case ValidationResult():
                self._store.execution.updates.validated(head.value, head.metrics)
                with self._status.writing():
                    self._status.validations[head.phase] = head
            case SaveStage(run, best):
                self._when_over.append(lambda: self._save(run, best=best))
            case TakeCheckpoint(phases=phases):
                self._when_over.append(lambda: self._stage.end_training(phases, cut))
            case CallEnd(number=number):
                self._when_idle.append(lambda: self._end_call(number))
            case RunEnd():
                self._when_idle.append(self._end_run)
            case _:
                raise RunError(f"unexpected message {type(head).__name__} from a neighbour")
        if self._links.next is not None:
            # If the next node's script is over, it has closed and needs no announcement.
            try_send(self._links.next, head)

    # The thread

    def _work(self) -> None:
        while not self._closed:
            call = self._inbox.get()
            self._stage.wake()
            self._guarded(call)
            del call  # otherwise it would keep the tensors of the last message alive while we compute
            while not self._closed:
                self._drain()
                if self._stage.busy:
                    self._guarded(self._compute)
                elif self._when_over and self._stage.idle:
                    self._guarded(self._when_over.pop(0))
                elif self._when_idle:
                    self._guarded(self._when_idle.pop(0))
                else:
                    break

    def _compute(self) -> None:
        self._stage.compute()
        self._drain()  # so that the machine sees a backward that arrived in the meantime
        if self._status.failure is None:
            self._stage.finish_computation()

    def _drain(self) -> None:
        while True:
            try:
                call = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._guarded(call)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except LinkClosedError as error:
            self._cannot_send(error)
        except DivergedError as error:
            self.fail(f"node_{self._node}: {error}{self._kept_checkpoint()}")
        except RavnestError as error:
            self.fail(f"node_{self._node}: {error}")
        except Exception as error:  # top of the thread: no error may end it silently
            logger.exception("node_%d failed", self._node)
            reason = f"node_{self._node}: {type(error).__name__}: {error}"
            self.fail(reason, passing_elsewhere=self._hands_over and is_machine_failure(error))

    def _kept_checkpoint(self) -> str:
        """Return how to continue from the last checkpoint; empty if there is none or others say it."""
        kept = None if self._checkpoints is None else self._checkpoints.complete
        if kept is None or self._hands_over:
            return ""
        return f". The checkpoint of update {kept.update} is kept: resume=True continues from it"

    def _cannot_send(self, error: LinkClosedError) -> None:
        """Interrupt the run because a neighbour is gone, after what it has said about its end.

        Its last message, or the link's report of the loss, may still be on its way to this node.
        """
        self._heard.wait(LINK_CLOSE)
        self.post(lambda: self.fail(f"node_{self._node}: {error}", recoverable=True))

    def fail(
        self,
        reason: str,
        source: Link | None = None,
        node: int | None = None,
        *,
        recoverable: bool = False,
        passing_elsewhere: bool = False,
    ) -> None:
        """End the run on all nodes; ``reason`` names the node where the failure began.

        ``recoverable``: a node was lost, and the others may continue from a checkpoint.
        ``passing_elsewhere``: the run ends here, and the other nodes have lost this one.
        """
        recoverable = recoverable and self._rejoins
        if self._closed or not self._status.fail(reason, interrupted=recoverable):
            return
        abort = Abort(self._node if node is None else node, reason, recoverable or passing_elsewhere)
        for link in (self._links.previous, self._links.next):
            if link is not None and link is not source:
                try_send(link, abort)
        if self._averaging is not None:
            self._averaging.give_up()
        self._stage.cancel()
        self._when_over.clear()
        self._when_idle.clear()

    def _close(self) -> None:
        self._closed = True

    # Messages

    def _receive(self, link: Link, message: Message) -> None:  # noqa: C901, PLR0912 - one case per message
        if self._status.failure is not None:
            return
        match message.head:
            case Forward() as head:
                self._store.check_run(head.run)
                self.submit(
                    Microbatch(
                        head.microbatch,
                        head.batch_size,
                        dict(message.values),
                        head.part,
                        head.parts,
                        head.ends_update,
                        head.digests,
                        checkpoint=head.checkpoint,
                    )
                )
                self._challenge(head, message.values)
            case Backward() as head:
                self._store.check_run(head.run)
                self._stage.handle(BackwardArrived(self._store.add_gradients(head, message.values)))
            case ForwardResult() as head:
                self._store.check_run(head.run)
                self._stage.handle(ResultArrived(self._store.add_result(head, message.values)))
            case PhaseBegin() as head:
                self.begin_phase(head)
            case PhaseEnd() as head:
                self.end_phase(head)
            case SharedGradients() as head:
                self._store.check_run(head.run)
                self._shared_arrived(head, message.values)
            case SharedWeights() as head:
                self._store.add_weights(head, message.values)
            case GradientNorms() as head:
                self._store.check_run(head.run)
                self._store.add_norms(head)
                self._stage.handle(NormsArrived(head.update))
            case LossSplit() as head:
                self.report_loss_split(head)
            case ClipNorm() as head:
                self._stage.clip_norm_arrived(head)
            case ValidationResult() as head if link is self._links.next:
                self._send_validation(head)
            case StageSaved() as head:
                self._stage_saved(head, message.values)
            case CheckpointWanted() as head:
                self.want_checkpoint(head)
            case ForwardChallenge() as head:
                self._checks.answer(head)
            case Abort() as head:
                self.fail(head.reason, link, head.node, recoverable=head.recoverable)
            case Goodbye(node):
                self._when_idle.append(lambda: self._neighbour_left(link, node))
            case head:
                self.announce(head)

    def _challenge(self, head: Forward, values: Mapping[str, Any]) -> None:
        """Have an output of the previous node checked, if it is one of training and a check is due."""
        if self._store.phase_begin(head.microbatch.phase).kind != "train":
            return
        challenge = self._checks.arrived(head.run, head.microbatch, values)
        if challenge is not None:
            self._stage.to_previous(Message(challenge))

    def _shared_arrived(self, head: SharedGradients, values: Mapping[str, Any]) -> None:
        """Keep gradients of weights held here, and pass the others on to the previous node."""
        others = self._store.add_shared(head.update, dict(values))
        if others:
            self._stage.to_previous(Message(head, others))
        if len(others) < len(values) and self._store.has_shared(head.update):
            self._stage.handle(SharedArrived(head.update))

    def report_loss_split(self, head: LossSplit) -> None:
        """Pass the Leaf's answer on to the Root."""
        if self._links.previous is not None:
            # A run without training may be over already; the loss of the link itself is reported.
            try_send(self._links.previous, head)
            return
        with self._status.writing():
            self._status.loss_split = head

    def want_checkpoint(self, head: CheckpointWanted) -> None:
        """Ask the Root for a checkpoint after the next update."""
        if self._links.previous is not None:
            try_send(self._links.previous, head)
            return
        with self._status.writing():
            self._status.checkpoint_wanted = True

    def _end_call(self, number: int) -> None:
        with self._status.writing():
            self._status.calls_ended = max(self._status.calls_ended, number)

    def _end_run(self) -> None:
        with self._status.writing():
            self._status.run_ended = True

    def _neighbour_lost(self, link: Link, reason: str) -> None:
        advice = "" if self._rejoins else "; look at its output, then start the run again"
        self.fail(
            f"{reason}. The process of node_{link.peer.node} ended or its network failed{advice}",
            source=link,
            recoverable=True,
        )

    def _neighbour_left(self, link: Link, node: int) -> None:
        if not self._stage.idle:
            self.fail(f"node_{node} has closed in the middle of the run", source=link, recoverable=True)
            return
        with self._status.writing():
            if link is self._links.previous:
                self._status.run_ended = True
            else:
                self._status.departed = node

    def _send_validation(self, result: ValidationResult) -> None:
        """Send a validation result towards the Root, which announces it to all nodes."""
        if self._links.previous is not None:
            self._stage.to_previous(Message(result))
        else:
            self.announce(result)

    # Trained stages

    def _save(self, run: str, *, best: bool) -> None:
        self._observer.saving()
        manifest, tensors = self._keeper.save(run, best=best)
        if self._links.previous is not None:
            self._stage.to_previous(Message(StageSaved(run, self._node, manifest, best), tensors))
        else:
            with self._status.writing():
                self._status.saved_stages.add(0)

    def _stage_saved(self, head: StageSaved, values: Mapping[str, Any]) -> None:
        if self._links.previous is not None:
            self._stage.to_previous(Message(head, values))
            return
        stage = self._keeper.receive(head.node, head.manifest, values, best=head.best)
        with self._status.writing():
            self._status.saved_stages.add(stage)
