"""The thread that computes: it takes what arrives, asks the machine, and does what that says.

All state of the stage belongs to this thread. Transports and the user's thread only put calls into
its inbox; results go to the board, which the user's thread waits for.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ravnest.errors import RavnestError
from ravnest.runtime.board import Answer, Board
from ravnest.runtime.events import (
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
from ravnest.runtime.execution import Loss, StageExecution
from ravnest.runtime.leaf import Leaf
from ravnest.runtime.machine import Machine
from ravnest.runtime.meeting import Links
from ravnest.split.structure import Structure, flatten, map_tensors
from ravnest.transport.base import Link, LinkDelay
from ravnest.wire.messages import (
    Abort,
    AnyHead,
    Backward,
    BatchId,
    Begin,
    Call,
    Clip,
    End,
    Figure,
    Finish,
    Forward,
    Goodbye,
    Message,
    Outcome,
    PhaseKind,
    Return,
    Save,
    Saved,
    StageTiming,
)

logger = logging.getLogger(__name__)

SHARED = "shared/"
"""Prefix of the weights that several stages use, among the values of a message."""
_NO_DELAY = LinkDelay(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Update:
    """An update of the Root's weights, as the progress line and the loss file see it."""

    number: int
    epoch: int
    loss: float | None
    """Mean over its micro-batches."""
    staleness: int
    """Updates that overtook its last micro-batch between forward and backward."""
    count: int
    """Micro-batches in it."""
    in_flight: int
    """Micro-batches that this stage has under way."""


class Observer(Protocol):
    """Told what happens, in the worker's thread; must be quick."""

    def begun(self, begin: Begin) -> None:
        """A phase has begun here."""

    def updated(self, update: Update) -> None:
        """The weights were updated (at the Root, with the loss)."""

    def timed(self, timings: tuple[StageTiming, ...]) -> None:
        """At the Root: what a micro-batch cost at each stage."""


class Keeper(Protocol):
    """Where trained stages go."""

    def save(self, run: str) -> tuple[str, dict[str, torch.Tensor]]:
        """Write this node's stage; its manifest and tensors, for the Root."""

    def receive(self, node: int, manifest: str, tensors: Mapping[str, torch.Tensor]) -> int:
        """Write another node's stage; the number of the stage."""


@dataclass
class _InHand:
    """What is known of a micro-batch at this stage."""

    id: BatchId
    size: int
    digests: dict[str, str]
    values: dict[str, Any]
    item: Any = None
    """What the Root loaded, where Root and Leaf are one node."""
    outputs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)
    answer: Outcome | None = None
    loss: float | None = None
    norms: tuple[tuple[int, float], ...] = ()
    timings: tuple[StageTiming, ...] = ()
    version: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0


class Worker:
    """One stage at work in its own thread."""

    def __init__(
        self,
        execution: StageExecution,
        machine: Machine,
        board: Board,
        *,
        node: int,
        leaf: Leaf | None,
        keeper: Keeper,
        observer: Observer,
    ) -> None:
        """``leaf`` belongs to the last stage."""
        self._execution = execution
        self._machine = machine
        self._board = board
        self._links = Links()
        self._node = node
        self._leaf = leaf
        self._keeper = keeper
        self._observer = observer
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._when_idle: list[Callable[[], None]] = []
        self._run: Run | None = None
        self._closed = False
        self._batches: dict[Batch, _InHand] = {}
        self._phases: dict[int, Begin] = {}
        self._ends: dict[int, End] = {}
        self._lent = -1
        self._losses: list[float] = []
        self._last: _InHand | None = None
        """The micro-batch whose backward was the last."""
        self._clip: float | None = None
        self._step_seconds = 0.0
        self._busy_since = 0.0
        """When the thread last woke up, or had computed: what it has done since is part of the cost."""
        self.run_id = ""
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

    def post(self, call: Callable[[], None]) -> None:
        """Have the worker's thread make a call, after those posted before."""
        self._inbox.put(call)

    # Of links

    def on_message(self, link: Link, message: Message) -> None:
        """A neighbour's message."""
        self.post(lambda: self._take(link, message))

    def on_lost(self, link: Link, reason: str) -> None:
        """A neighbour is gone without a word."""
        self.post(lambda: self._neighbour_lost(link, reason))

    # Of the Root's user; to be posted

    def begin(self, begin: Begin) -> None:
        """Start a phase."""
        self.run_id = begin.run
        self._phases[begin.phase] = begin
        self._observer.begun(begin)
        self._handle(PhaseBegun(begin.phase, trains=begin.kind == "train"))

    def submit(
        self, batch: BatchId, size: int, digests: dict[str, str], values: dict[str, Any], item: Any
    ) -> None:
        """A micro-batch from the user."""
        self._arrive(_InHand(batch, size, digests, values, item=item))

    def end(self, end: End) -> None:
        """No further micro-batch belongs to the phase."""
        self._ends[end.phase] = end
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
        abort = Message(Abort(self._node if node is None else node, reason))
        for link in (self._links.previous, self._links.next):
            if link is not None and link is not source:
                _try_send(link, abort)
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
                self._arrive(_InHand(head.batch, head.size, head.digests, dict(message.values)))
            case Backward() as head:
                self._take_backward(head, message.values)
            case Outcome() as head:
                self._take_outcome(head, message.values)
            case Begin() as head:
                self.begin(head)
            case End() as head:
                self.end(head)
            case Clip() as head:
                self._clip = head.total
                self._handle(ClipArrived(head.update))
            case Figure() as head if link is self._links.next:
                self._figure_found(head)
            case Saved() as head:
                self._saved(head, message.values)
            case Abort() as head:
                self.fail(head.reason, source=link, node=head.node)
            case Goodbye(node):
                self._when_idle.append(lambda: self._neighbour_left(link, node))
            case head:
                self._announced(head)

    def _arrive(self, held: _InHand) -> None:
        batch = self._known(held.id)
        self._batches[batch] = held
        self._handle(ForwardArrived(batch))

    def _take_backward(self, head: Backward, values: Mapping[str, Any]) -> None:
        batch = self._known(head.batch)
        held = self._held(batch)
        held.gradients = dict(values)
        held.loss, held.norms, held.timings = head.loss, head.norms, head.timings
        self._handle(BackwardArrived(batch))

    def _take_outcome(self, head: Outcome, values: Mapping[str, Any]) -> None:
        batch = self._known(head.batch)
        held = self._held(batch)
        held.answer, held.outputs = head, dict(values)
        self._handle(OutcomeArrived(batch))

    def _announced(self, head: AnyHead) -> None:
        """What the Root tells everyone: pass it on, and act on it once all before it is done."""
        match head:
            case Figure():
                self._execution.updates.validated(head.value)
                with self._board.writing():
                    self._board.figures[head.phase] = head
            case Save(run):
                self._when_idle.append(lambda: self._save(run))
            case Return(_, call):
                self._when_idle.append(lambda: self._return(call))
            case Finish():
                self._when_idle.append(self._finish)
            case _:
                raise RavnestError(f"a message {type(head).__name__} has no place here")
        if self._links.next is not None:
            # A node whose script is over has closed already, and misses nothing.
            _try_send(self._links.next, Message(head))

    def _return(self, call: Call) -> None:
        with self._board.writing():
            self._board.returned[call] += 1

    def _finish(self) -> None:
        with self._board.writing():
            self._board.finish = True

    def _known(self, batch: BatchId) -> Batch:
        if batch.run != self.run_id:
            raise RavnestError(
                f"micro-batch {batch.index} belongs to run {batch.run[:8]}, not to {self.run_id[:8]}"
            )
        return Batch(batch.phase, batch.index)

    def _held(self, batch: Batch) -> _InHand:
        if batch not in self._batches:
            raise RavnestError(
                f"micro-batch {batch.index} of phase {batch.phase} came back, but it was not sent"
            )
        return self._batches[batch]

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
                self._send_forward(self._batches[batch])
            case SendBackward(batch):
                self._send_backward(self._batches.pop(batch))
            case SendOutcome(batch):
                self._send_outcome(self._batches.pop(batch))
            case SendBegin(phase):
                self._to_next(self._phases[phase])
            case SendEnd(phase):
                self._to_next(self._ends[phase])
            case SendClip(update):
                assert self._clip is not None
                self._to_next(Clip(update, self._clip))
            case GatherNorms(update, count):
                self._clip = self._total_norm(count)
                self.post(lambda: self._handle(ClipArrived(update)))
            case FreeVersion(version):
                self._execution.free(version)
            case Admit(total):
                with self._board.writing():
                    self._board.admitted = total
            case Finished(batch):
                self._finished(batch, self._batches.pop(batch))
            case Fail(reason):
                self.fail(f"node_{self._node}: {reason}")

    def _compute(self) -> None:
        run, self._run = self._run, None
        match run:
            case RunForward(batch, version, trains):
                self._forward(batch, version, trains=trains)
            case RunBackward(batch, _, last_of_update):
                self._backward(batch, last_of_update=last_of_update)
            case RunStep(update, count):
                self._step(update, count)
            case RunPhaseEnd(phase, trains):
                self._end_phase(phase, trains=trains)
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

    def _forward(self, batch: Batch, version: int, *, trains: bool) -> None:
        held = self._batches[batch]
        held.version = version
        kind = self._phases[batch.phase].kind
        shared = _shared_in(held.values)
        self._execution.borrow(shared)
        item = self._item(kind, batch, held)
        if trains:
            outputs, loss = self._execution.forward(batch, version, held.values, self._loss_of(item))
            held.loss = loss
        else:
            outputs, output = self._execution.evaluate(batch, version, held.values)
            if self._leaf is not None:
                held.answer, outputs = self._answer(kind, held.id, output, item)
        if self._leaf is None:
            outputs |= {SHARED + key: value for key, value in shared.items() if self._passes(key)}
            if version != self._lent:
                self._lent = version
                outputs |= {SHARED + k: v for k, v in self._execution.lend().items()}
        held.outputs, held.values = outputs, {}
        held.forward_seconds = self._lap()

    def _item(self, kind: PhaseKind, batch: Batch, held: _InHand) -> Any:
        """What the loss compares with: the Leaf's labels, or in a cluster of one the Root's batch.

        Labels are iterated only once the phase before is used up, in the order of the Root.
        """
        if self._leaf is None or kind == "predict":
            return None
        own = held.item is not None
        if batch.index == 0:
            self._leaf.begin(kind, loads=not own)
        item = held.item if own else self._leaf.item(kind, batch.index, held.size, held.digests)
        return map_tensors(item, self._execution.to_device)

    def _loss_of(self, item: Any) -> Loss | None:
        leaf = self._leaf
        if leaf is None:
            return None
        return lambda outputs: leaf.loss(self._execution.output(outputs), item)

    def _backward(self, batch: Batch, *, last_of_update: bool) -> None:
        held = self._batches[batch]
        shared = _shared_in(held.gradients)
        back = self._execution.backward(batch, held.gradients, shared)
        held.gradients = {**back.inputs, **{SHARED + k: g for k, g in back.shared.items()}}
        if last_of_update and self._machine.waits_for_clip:
            held.norms = (*self._execution.norms(), *held.norms)
        if held.loss is not None:
            self._losses.append(held.loss)
        held.backward_seconds = self._lap()
        self._last = held

    def _step(self, update: int, count: int) -> None:
        self._execution.updates.step(count, self._clip)
        self._clip = None
        losses, self._losses = self._losses[:count], self._losses[count:]
        held = self._last
        assert held is not None
        loss = sum(losses) / len(losses) if losses else None
        stale = update - held.version
        self._observer.updated(
            Update(update, held.id.epoch, loss, stale, count, self._machine.in_flight)
        )
        self._step_seconds = self._lap()

    def _end_phase(self, phase: int, *, trains: bool) -> None:
        begin, end = self._phases.pop(phase), self._ends.pop(phase)
        if trains:
            self._execution.updates.end_epoch()
        if self._leaf is not None:
            if end.count == 0:
                self._leaf.begin(begin.kind, loads=not self._machine.is_root)
            self._leaf.end(begin.kind, end.count, exhausted=end.exhausted)
            if begin.kind == "validate":
                score = self._leaf.score()
                self._figure_found(Figure(begin.run, phase, score.name, score.value, score.samples))
        with self._board.writing():
            self._board.over = phase + 1

    # What goes out

    def _to_next(self, head: AnyHead, values: Mapping[str, Any] | None = None) -> None:
        assert self._links.next is not None
        self._links.next.send(Message(head, values or {}))

    def _to_previous(self, head: AnyHead, values: Mapping[str, Any] | None = None) -> None:
        assert self._links.previous is not None
        self._links.previous.send(Message(head, values or {}))

    def _send_forward(self, held: _InHand) -> None:
        self._to_next(Forward(held.id, held.size, held.digests), held.outputs)
        held.outputs = {}

    def _send_backward(self, held: _InHand) -> None:
        timings = (self._timing(held), *held.timings)
        self._to_previous(Backward(held.id, timings, held.loss, held.norms), held.gradients)

    def _send_outcome(self, held: _InHand) -> None:
        assert held.answer is not None
        self._to_previous(held.answer, held.outputs)

    def _timing(self, held: _InHand) -> StageTiming:
        following, previous = (
            _NO_DELAY if link is None else link.delay()
            for link in (self._links.next, self._links.previous)
        )
        return StageTiming(
            held.forward_seconds,
            held.backward_seconds,
            self._step_seconds,
            following.message,
            following.busy,
            previous.message,
            previous.busy,
        )

    def _finished(self, batch: Batch, held: _InHand) -> None:
        if held.answer is None:
            self._observer.timed((self._timing(held), *held.timings))
            return
        answer = Answer(_rebuild(held.answer, held.outputs), held.answer.value)
        with self._board.writing():
            self._board.answers[batch] = answer

    def _answer(
        self, kind: PhaseKind, batch: BatchId, output: Any, item: Any
    ) -> tuple[Outcome, dict[str, Any]]:
        assert self._leaf is not None
        if kind == "validate":
            return Outcome(batch, self._leaf.judge(output, item)), {}
        leaves, structure = flatten(output)
        values = {str(place): leaf for place, leaf in enumerate(leaves)}
        return Outcome(batch, None, json.dumps(structure.to_json())), values

    def _figure_found(self, figure: Figure) -> None:
        """On its way to the Root, which tells everyone."""
        if self._links.previous is not None:
            self._to_previous(figure)
        else:
            self._announced(figure)

    def _total_norm(self, count: int) -> float:
        assert self._last is not None
        norms = torch.tensor([norm for _, norm in sorted(self._last.norms)])
        return float(torch.linalg.vector_norm(norms)) / count

    def _passes(self, key: str) -> bool:
        """Whether a stage behind this one may use a shared weight."""
        return key not in self._execution.last_users or (
            self._execution.last_users[key] > self._execution.index
        )

    # Trained stages

    def _save(self, run: str) -> None:
        manifest, tensors = self._keeper.save(run)
        if self._links.previous is not None:
            self._to_previous(Saved(run, self._node, manifest), tensors)
        else:
            with self._board.writing():
                self._board.saved.add(0)

    def _saved(self, head: Saved, values: Mapping[str, Any]) -> None:
        if self._links.previous is not None:
            self._to_previous(head, values)
            return
        stage = self._keeper.receive(head.node, head.manifest, values)
        with self._board.writing():
            self._board.saved.add(stage)


def _shared_in(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Take the weights that several stages use out of a message's values."""
    names = [name for name in values if name.startswith(SHARED)]
    return {name.removeprefix(SHARED): values.pop(name) for name in names}


def _rebuild(answer: Outcome, values: Mapping[str, Any]) -> Any:
    if not answer.structure:
        return None
    structure = Structure.from_json(json.loads(answer.structure))
    return structure.build(iter([values[str(place)] for place in range(len(values))]))


def _try_send(link: Link, message: Message) -> None:
    try:
        link.send(message)
    except RavnestError:
        logger.debug("node_%d is gone already", link.peer.node)
