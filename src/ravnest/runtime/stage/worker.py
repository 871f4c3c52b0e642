"""The thread that computes: it takes what arrives, asks the machine, and does what that says.

All state of the stage belongs to this thread. Transports and the user's thread only put calls into
its inbox; results go to the board, which the user's thread waits for.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ravnest.averaging.service import AveragingService
from ravnest.errors import RavnestError, RunError
from ravnest.runtime.control.rendezvous import Links
from ravnest.runtime.control.run_status import RunStatus
from ravnest.runtime.schedule.events import (
    Action,
    Admit,
    BackwardArrived,
    Batch,
    ClipArrived,
    Done,
    Event,
    Fail,
    Finished,
    ForwardArrived,
    FreeVersion,
    GatherNorms,
    OutcomeArrived,
    PhaseBegun,
    PhaseEnded,
    Run,
    RunBackward,
    RunForward,
    RunPhaseEnd,
    RunStep,
    SendBackward,
    SendBegin,
    SendClip,
    SendEnd,
    SendForward,
    SendOutcome,
    WindowSet,
)
from ravnest.runtime.schedule.machine import ScheduleMachine
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.leaf import Leaf
from ravnest.runtime.stage.microbatches import Microbatch, MicrobatchStore
from ravnest.runtime.stage.observer import StageKeeper, UpdateReport, WorkerObserver
from ravnest.transport.base import Link, LinkDelay
from ravnest.transport.link import try_send
from ravnest.wire.messages import (
    Abort,
    AnyHead,
    Backward,
    Call,
    CallEnd,
    ClipNorm,
    Decision,
    Forward,
    ForwardResult,
    Goodbye,
    Message,
    MicrobatchId,
    PhaseBegin,
    PhaseEnd,
    Prepare,
    Prepared,
    Reduced,
    RunEnd,
    SaveStage,
    StageSaved,
    StageTiming,
    Start,
    ValidationResult,
)

logger = logging.getLogger(__name__)

_NO_DELAY = LinkDelay(0.0, 0.0, 0.0)
_ALL_TIMED = 64
"""Micro-batches at the start of a phase."""
_TIMED_EVERY = 8


class Worker:
    """One stage at work in its own thread."""

    def __init__(
        self,
        execution: StageExecution,
        machine: ScheduleMachine,
        board: RunStatus,
        *,
        node: int,
        leaf: Leaf | None,
        keeper: StageKeeper,
        observer: WorkerObserver,
    ) -> None:
        """``leaf`` belongs to the last stage."""
        self._desk = MicrobatchStore(execution, leaf)
        self._machine = machine
        self._board = board
        self._links = Links()
        self._node = node
        self._keeper = keeper
        self._observer = observer
        self.averaging: AveragingService | None = None
        """Set before the start, where there are other clusters."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._when_idle: list[Callable[[], None]] = []
        self._run: Run | None = None
        self._closed = False
        self._clip: float | None = None
        self._step_seconds = 0.0
        self._busy_since = 0.0
        """When the thread last woke up, or had computed: what it has done since is part of the cost."""
        self._thread = threading.Thread(target=self._work, name=f"ravnest-node_{node}", daemon=True)

    def start(self, links: Links) -> None:
        """Start the thread, now that the neighbours are known."""
        self._links = links
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread after what it is doing."""
        self.post(self._close)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    @property
    def execution(self) -> StageExecution:
        """What computes; it belongs to the worker's thread."""
        return self._desk.execution

    def when_idle(self, call: Callable[[], None]) -> None:
        """Make a call once nothing is left to compute; in the worker's thread."""
        self._when_idle.append(call)

    def renew(self) -> None:
        """The weights are others now; in the worker's thread."""
        self._desk.renew()

    def post(self, call: Callable[[], None]) -> None:
        """Have the worker's thread make a call, after those posted before."""
        self._inbox.put(call)

    # Of links

    def on_message(self, link: Link, message: Message) -> None:
        """A neighbour's message."""
        head = message.head
        if self.averaging is not None and isinstance(
            head, Prepare | Start | Decision | Prepared | Reduced
        ):
            self.averaging.from_pipeline(head)
        else:
            self.post(lambda: self._take(link, message))

    def on_lost(self, link: Link, reason: str) -> None:
        """A neighbour is gone without a word."""
        self.post(lambda: self._neighbour_lost(link, reason))

    # Of the Root's user; to be posted

    def begin(self, begin: PhaseBegin) -> None:
        """Start a phase."""
        self._desk.begin(begin)
        self._observer.begun(begin)
        self._handle(PhaseBegun(begin.phase, trains=begin.kind == "train"))

    def submit(
        self, batch: MicrobatchId, size: int, digests: dict[str, str], values: dict[str, Any], item: Any
    ) -> None:
        """A micro-batch from the user."""
        self._arrive(Microbatch(batch, size, digests, values, item=item))

    def end(self, end: PhaseEnd) -> None:
        """No further micro-batch belongs to the phase."""
        self._desk.end(end)
        self._handle(PhaseEnded(end.phase, end.count))

    def set_window(self, size: int) -> None:
        """Micro-batches that the Root keeps under way."""
        self._handle(WindowSet(size))

    def announce(self, head: AnyHead) -> None:
        """Tell all nodes behind, and act on it here too."""
        self._announced(head)

    # The thread

    def _work(self) -> None:
        while not self._closed:
            call = self._inbox.get()
            self._busy_since = time.perf_counter()
            self._guarded(call)
            while not self._closed:
                self._drain()
                if self._run is not None:
                    self._guarded(self._compute)
                elif self._when_idle:
                    self._guarded(self._when_idle.pop(0))
                else:
                    break

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
        except RavnestError as error:
            self.fail(f"node_{self._node}: {error}")
        except Exception as error:  # the top of the thread: nothing may end it in silence
            logger.exception("node_%d failed", self._node)
            self.fail(f"node_{self._node}: {type(error).__name__}: {error}")

    def fail(self, reason: str, source: Link | None = None, node: int | None = None) -> None:
        """End the run on all nodes, with a reason that names the node where it began."""
        if self._closed or not self._board.fail(reason):
            return
        abort = Abort(self._node if node is None else node, reason)
        for link in (self._links.previous, self._links.next):
            if link is not None and link is not source:
                try_send(link, abort)
        if self.averaging is not None:
            self.averaging.give_up()
        self._run = None
        self._when_idle.clear()

    def _close(self) -> None:
        self._closed = True

    # What arrives

    def _take(self, link: Link, message: Message) -> None:  # noqa: C901 - one case a message
        if self._board.failure is not None:
            return
        match message.head:
            case Forward() as head:
                self._arrive(Microbatch(head.batch, head.size, head.digests, dict(message.values)))
            case Backward() as head:
                self._handle(BackwardArrived(self._desk.returned(head, message.values)))
            case ForwardResult() as head:
                self._handle(OutcomeArrived(self._desk.answered(head, message.values)))
            case PhaseBegin() as head:
                self.begin(head)
            case PhaseEnd() as head:
                self.end(head)
            case ClipNorm() as head:
                self._clip = head.total
                self._handle(ClipArrived(head.update))
            case ValidationResult() as head if link is self._links.next:
                self._figure_found(head)
            case StageSaved() as head:
                self._saved(head, message.values)
            case Abort() as head:
                self.fail(head.reason, source=link, node=head.node)
            case Goodbye(node):
                self._when_idle.append(lambda: self._neighbour_left(link, node))
            case head:
                self._announced(head)

    def _arrive(self, held: Microbatch) -> None:
        self._handle(ForwardArrived(self._desk.add(held)))

    def _announced(self, head: AnyHead) -> None:
        """What the Root tells everyone: pass it on, and act on it once all before it is done."""
        match head:
            case ValidationResult():
                self._desk.execution.updates.validated(head.value)
                with self._board.writing():
                    self._board.figures[head.phase] = head
            case SaveStage(run):
                self._when_idle.append(lambda: self._save(run))
            case CallEnd(_, call):
                self._when_idle.append(lambda: self._return(call))
            case RunEnd():
                self._when_idle.append(self._finish)
            case _:
                raise RunError(f"a message {type(head).__name__} has no place here")
        if self._links.next is not None:
            # A node whose script is over has closed already, and misses nothing.
            try_send(self._links.next, head)

    def _return(self, call: Call) -> None:
        with self._board.writing():
            self._board.returned[call] += 1

    def _finish(self) -> None:
        with self._board.writing():
            self._board.finish = True

    def _neighbour_lost(self, link: Link, reason: str) -> None:
        self.fail(
            f"node_{link.peer.node} is gone: {reason}. Its process ended or its network failed; "
            "look at its output, then start the run again",
            source=link,
        )

    def _neighbour_left(self, link: Link, node: int) -> None:
        if not self._machine.idle:
            self.fail(f"node_{node} has left in the middle of the run", source=link)
            return
        with self._board.writing():
            if link is self._links.previous:
                self._board.finish = True
            else:
                self._board.left = node

    # What the machine wants

    def _handle(self, event: Event) -> None:
        for action in self._machine.handle(event, time.monotonic()):
            self._perform(action)

    def _perform(self, action: Action) -> None:  # noqa: C901 - one case an action
        match action:
            case RunForward() | RunBackward() | RunStep() | RunPhaseEnd():
                self._run = action
            case SendForward(batch):
                self._to_next(self._desk.forward_message(batch))
            case SendBackward(batch):
                timings = self._timings(self._desk.look(batch))
                self._to_previous(self._desk.backward_message(batch, timings))
            case SendOutcome(batch):
                self._to_previous(self._desk.outcome_message(batch))
            case SendBegin(phase):
                self._to_next(Message(self._desk.phase(phase)))
            case SendEnd(phase):
                self._to_next(Message(self._desk.end_of(phase)))
            case SendClip(update):
                assert self._clip is not None
                self._to_next(Message(ClipNorm(update, self._clip)))
            case GatherNorms(update, count):
                self._clip = self._desk.total_norm(count)
                self.post(lambda: self._handle(ClipArrived(update)))
            case FreeVersion(version):
                self._desk.execution.free(version)
            case Admit(total):
                with self._board.writing():
                    self._board.admitted = total
            case Finished(batch):
                self._finished(batch)
            case Fail(reason):
                self.fail(f"node_{self._node}: {reason}")

    def _compute(self) -> None:
        run, self._run = self._run, None
        match run:
            case RunForward(batch, version, trains):
                began = time.perf_counter()
                held = self._desk.forward(batch, version, trains=trains)
                held.began, held.forward_seconds = began, self._lap()
            case RunBackward(batch, _, last_of_update):
                with_norms = last_of_update and self._machine.waits_for_clip
                held = self._desk.backward(batch, with_norms=with_norms)
                held.backward_seconds = self._lap()
            case RunStep(update, count):
                self._step(update, count)
            case RunPhaseEnd(phase):
                self._end_phase(phase)
        self._drain()  # so that the machine sees a backward that arrived meanwhile
        if self._board.failure is None:
            self._handle(Done())

    def _lap(self) -> float:
        """Seconds since the thread woke up or computed last, to be charged to what it computed now.

        Handling messages and waiting for Python's lock delay the pipeline as much as computing does.
        """
        now = time.perf_counter()
        seconds, self._busy_since = now - self._busy_since, now
        return seconds

    def _step(self, update: int, count: int) -> None:
        loss = self._desk.step(count, self._clip)
        self._clip = None
        last = self._desk.last
        assert last is not None
        stale = update - last.version
        in_flight = self._machine.in_flight
        samples = self._desk.take_samples()
        if self.averaging is not None:
            self.averaging.updated(samples)
        waiting = self._inbox.qsize()
        self._observer.updated(
            UpdateReport(update, last.id.epoch, loss, stale, count, in_flight, waiting)
        )
        self._step_seconds = self._lap()
        if self.averaging is not None:
            with self._board.writing():
                self._board.updates = update + 1

    def _end_phase(self, phase: int) -> None:
        if self.averaging is not None and self._desk.phase(phase).kind == "train":
            self.averaging.epoch_ended()
        figure = self._desk.end_phase(phase)
        if figure is not None:
            self._figure_found(figure)
        with self._board.writing():
            self._board.over = phase + 1

    # What goes out

    def _to_next(self, message: Message) -> None:
        assert self._links.next is not None
        self._links.next.send(message)

    def _to_previous(self, message: Message) -> None:
        assert self._links.previous is not None
        self._links.previous.send(message)

    def _timings(self, held: Microbatch) -> tuple[StageTiming, ...]:
        """Of this stage and those behind; empty where the Leaf did not start with its own."""
        if not (held.timings or (self._machine.is_leaf and _is_timed(held.id.index))):
            return ()
        following, previous = (
            _NO_DELAY if link is None else link.delay()
            for link in (self._links.next, self._links.previous)
        )
        own = StageTiming(
            held.forward_seconds,
            held.backward_seconds,
            self._step_seconds,
            following.message,
            following.busy,
            previous.message,
            previous.busy,
        )
        return (own, *held.timings)

    def _finished(self, batch: Batch) -> None:
        held = self._desk.look(batch)
        answer = self._desk.finished(batch)
        if answer is None:
            if timings := self._timings(held):
                self._observer.timed(timings, time.perf_counter() - held.began)
            return
        with self._board.writing():
            self._board.answers[batch] = answer

    def _figure_found(self, figure: ValidationResult) -> None:
        """On its way to the Root, which tells everyone."""
        if self._links.previous is not None:
            self._to_previous(Message(figure))
        else:
            self._announced(figure)

    # Trained stages

    def _save(self, run: str) -> None:
        self._observer.saving()
        manifest, tensors = self._keeper.save(run)
        if self._links.previous is not None:
            self._to_previous(Message(StageSaved(run, self._node, manifest), tensors))
        else:
            with self._board.writing():
                self._board.saved.add(0)

    def _saved(self, head: StageSaved, values: Mapping[str, Any]) -> None:
        if self._links.previous is not None:
            self._to_previous(Message(head, values))
            return
        stage = self._keeper.receive(head.node, head.manifest, values)
        with self._board.writing():
            self._board.saved.add(stage)


def _is_timed(index: int) -> bool:
    """Whether the Root is told what a micro-batch cost: first of each, then of some."""
    return index < _ALL_TIMED or index % _TIMED_EVERY == 0
