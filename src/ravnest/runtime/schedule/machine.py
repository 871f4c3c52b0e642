"""Pipeline schedule of one node: events in, actions out; no clock, no threads, no tensors.

The same machine serves the Root (position 0), a Stem, the Leaf (the last position) and a node that is
Root and Leaf. It requests at most one computation at a time. An update or a phase end that is due runs
first. If both a backward and a forward are ready, they alternate: if backwards always ran first, those
queued at a slow stage would starve the following stages of forwards, and micro-batches would travel in
a convoy (``docs/schedules.md`` has measurements).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ravnest.runtime.schedule.events import (
    Action,
    Admit,
    BackwardArrived,
    ClipNormArrived,
    Done,
    Event,
    Fail,
    Finished,
    ForwardArrived,
    FreeVersion,
    GatherNorms,
    PhaseBegun,
    PhaseEnded,
    ResultArrived,
    Run,
    RunBackward,
    RunForward,
    RunPhaseEnd,
    RunStep,
    SendBackward,
    SendClipNorm,
    SendForward,
    SendPhaseBegin,
    SendPhaseEnd,
    SendResult,
    WindowSet,
)
from ravnest.types import MicrobatchId

Schedule = Literal["async", "sync"]

READ_AHEAD = 2
"""Micro-batches that the Root accepts beyond the window, so that the compute thread finds the next one
even if the user's thread is late by one."""

TRACED = 16
"""Number of computations that a failure message shows."""


@dataclass(slots=True)
class _Phase:
    """Progress of this stage in a phase."""

    number: int
    trains: bool
    arrived: int = 0
    forwarded: int = 0
    finished: int = 0
    """Finished micro-batches.

    In training: backwards done. Otherwise: forwards done, at the Root results received.
    """
    applied: int = 0
    """Backwards whose gradients were applied in an update."""
    count: int | None = None
    """Micro-batches in the phase; None until the phase has ended."""
    begin_sent: bool = False
    end_sent: bool = False


class _ProtocolError(Exception):
    """Event that violates the protocol; its text is the reason of the failure."""


class ScheduleMachine:
    """State machine that decides what a node computes and sends next.

    ``handle`` takes an event and returns actions in order; a computation (``Run*``) is always the last
    one, and ``Done`` answers it. The Root's first ``Admit`` comes with its first phase, or with an
    earlier ``WindowSet``. After a ``Fail`` every event is ignored.

    ``window`` applies at the Root: the number of micro-batches in flight in the whole pipeline.
    ``activation_limit`` is this stage's own memory limit: the number of micro-batches for which it
    keeps activations at once.
    """

    def __init__(
        self,
        position: int,
        count: int,
        *,
        schedule: Schedule,
        window: int,
        update_frequency: int,
        clip: bool = False,
        activation_limit: int | None = None,
    ) -> None:
        assert 0 <= position < count, f"stage {position} of {count}"
        assert window >= 1, f"a window of {window}"
        assert update_frequency >= 1, f"an update of {update_frequency} micro-batches"
        assert activation_limit is None or activation_limit >= 1, (
            f"an activation_limit of {activation_limit}"
        )
        self.position = position
        self.is_root = position == 0
        self.is_leaf = position == count - 1
        self.sync = schedule == "sync"
        self.update_frequency = update_frequency
        self.version = 0
        """Number of updates done here, and of the newest weights."""
        self.in_flight = 0
        """Micro-batches whose forward has started here and that are not finished here."""
        self.waits_for_clip = clip and self.sync
        """True if an update waits for the norm of the gradients of all stages."""
        self._window = window
        self._activation_limit = activation_limit
        self._phases: dict[int, _Phase] = {}
        """Phases that are not over here, in order."""
        self._newest: _Phase | None = None
        self._forwards: deque[MicrobatchId] = deque()
        """Micro-batches ready for their forward."""
        self._sent: deque[RunForward] = deque()
        """Forwards sent to the next node and not yet returned."""
        self._backwards: deque[RunForward] = deque()
        """Forwards whose backward is ready to run."""
        self._forward_next = False
        """True if a forward runs before a backward that is ready too."""
        self._running: Run | None = None
        self._users: dict[int, int] = {0: 0}
        """Number of micro-batches in flight for each version that is kept."""
        self._norms_requested = False
        self._clip_known = False
        self._submitted = 0
        self._returned = 0
        self._admitted = 0
        self._trace: deque[Run] = deque(maxlen=TRACED)
        self._failed = False
        self._actions: list[Action] = []

    def handle(self, event: Event, now: float) -> list[Action]:  # noqa: ARG002 - time is part of the seam
        """Process an event and return the actions to carry out, in order."""
        if self._failed:
            return []
        actions: list[Action] = []
        self._actions = actions
        try:
            self._process(event)
            if self._running is None:
                self._start_next()
        except _ProtocolError as error:
            self._failed = True
            ran = format_runs(self._trace)
            return [Fail(f"{self._name()}: {error}" + (f" (last run here: {ran})" if ran else ""))]
        return actions

    @property
    def idle(self) -> bool:
        """True if no computation is requested and no micro-batch is in flight here."""
        return self._running is None and not (self._phases or self._sent)

    # Events

    def _process(self, event: Event) -> None:
        match event:
            case Done():
                self._done()
            case ForwardArrived(microbatch):
                self._forward_arrived(microbatch)
            case BackwardArrived(microbatch):
                self._backwards.append(self._take_returned(microbatch, trains=True))
            case ResultArrived(microbatch):
                self._take_returned(microbatch, trains=False)
                self._finish_without_gradients(microbatch)
            case ClipNormArrived(update):
                self._clip_norm_arrived(update)
            case PhaseBegun(phase, trains):
                self._phase_begun(phase, trains=trains)
            case PhaseEnded(phase, count):
                self._phase_ended(phase, count)
            case WindowSet(size):
                if size < 1:
                    raise _ProtocolError(f"a window of {size} micro-batches would stop the run")
                self._window = size
                self._admit()

    def _phase_begun(self, number: int, *, trains: bool) -> None:
        newest = self._newest
        if newest is not None and newest.count is None:
            raise _ProtocolError(f"phase {number} began before phase {newest.number} had ended")
        if newest is not None and number != newest.number + 1:
            raise _ProtocolError(
                f"expected phase {newest.number + 1} to begin, but phase {number} began"
            )
        self._newest = self._phases[number] = _Phase(number, trains)
        self._send_phases()
        self._admit()

    def _phase_ended(self, number: int, count: int) -> None:
        phase = self._open_phase(number, f"the end of phase {number} arrived")
        if count != phase.arrived:
            raise _ProtocolError(
                f"phase {number} ended with {count} micro-batches, but {phase.arrived} have arrived"
            )
        phase.count = count
        self._send_phases()

    def _forward_arrived(self, microbatch: MicrobatchId) -> None:
        phase = self._open_phase(microbatch.phase, f"the forward of {microbatch} arrived")
        if microbatch.index != phase.arrived:
            raise _ProtocolError(
                f"the forward of {microbatch} arrived, expected micro-batch {phase.arrived}"
            )
        if self.is_root and self._submitted == self._admitted:
            raise _ProtocolError(
                f"{microbatch} was submitted, but the Root has admitted only {self._admitted} in total"
            )
        phase.arrived += 1
        self._submitted += 1
        self._forwards.append(microbatch)

    def _open_phase(self, number: int, event: str) -> _Phase:
        phase = self._newest
        if phase is None or number > phase.number:
            raise _ProtocolError(f"{event}, but phase {number} has not begun")
        if number < phase.number or phase.count is not None:
            raise _ProtocolError(f"{event}, but phase {number} has already ended")
        return phase

    def _take_returned(self, microbatch: MicrobatchId, *, trains: bool) -> RunForward:
        """Return the forward that a backward or result belongs to: the oldest one sent."""
        event = f"the {'backward' if trains else 'result'} of {microbatch} arrived"
        if not self._sent:
            raise _ProtocolError(f"{event}, but no micro-batch was sent")
        first = self._sent[0]
        if first.microbatch != microbatch:
            raise _ProtocolError(f"{event}, expected {first.microbatch}")
        if first.trains != trains:
            raise _ProtocolError(
                f"{event}, but phase {microbatch.phase} {'trains' if first.trains else 'does not train'}"
            )
        return self._sent.popleft()

    def _clip_norm_arrived(self, update: int) -> None:
        if not self.waits_for_clip:
            raise _ProtocolError(f"the clip norm of update {update} arrived, but none is expected")
        if update != self.version or self._clip_known:
            raise _ProtocolError(
                f"the clip norm of update {update} arrived, but update {self.version} is next"
            )
        if not (self._phases and self._due(next(iter(self._phases.values())))):
            raise _ProtocolError(f"the clip norm of update {update} arrived before all its gradients")
        self._clip_known = True
        if not self.is_leaf:
            self._actions.append(SendClipNorm(update))

    # Finished computations

    def _done(self) -> None:
        run, self._running = self._running, None
        match run:
            case RunForward():
                self._forward_done(run)
            case RunBackward(microbatch, version):
                self._backward_done(microbatch, version)
            case RunStep(update, count):
                self._step_done(update, count)
            case RunPhaseEnd(phase):
                del self._phases[phase]
            case None:
                raise _ProtocolError("a computation is done, but none was requested")

    def _forward_done(self, run: RunForward) -> None:
        phase = self._phases[run.microbatch.phase]
        phase.forwarded += 1
        if not self.is_leaf:
            self._sent.append(run)
            self._actions.append(SendForward(run.microbatch))
            self._send_phases()
            if not (phase.trains or self.is_root):
                phase.finished += 1
        elif phase.trains:
            self._backwards.append(run)
        else:
            if not self.is_root:
                phase.finished += 1
            self._finish_without_gradients(run.microbatch)

    def _backward_done(self, microbatch: MicrobatchId, version: int) -> None:
        self._phases[microbatch.phase].finished += 1
        self.in_flight -= 1
        if self.is_root:
            self._finished(microbatch)
        else:
            self._actions.append(SendBackward(microbatch))
        self._users[version] -= 1
        self._free(version)

    def _step_done(self, update: int, count: int) -> None:
        next(iter(self._phases.values())).applied += count
        self.version = update + 1
        self._users[self.version] = 0
        self._norms_requested = self._clip_known = False
        self._free(update)

    def _finish_without_gradients(self, microbatch: MicrobatchId) -> None:
        """Finish a micro-batch that has no backward: send its result on, or report it at the Root."""
        self.in_flight -= 1
        if self.is_root:
            self._phases[microbatch.phase].finished += 1
            self._finished(microbatch)
        else:
            self._actions.append(SendResult(microbatch))

    def _finished(self, microbatch: MicrobatchId) -> None:
        self._returned += 1
        self._actions.append(Finished(microbatch))
        self._admit()

    def _free(self, version: int) -> None:
        if version != self.version and not self._users[version]:
            del self._users[version]
            self._actions.append(FreeVersion(version))

    # Actions

    def _send_phases(self) -> None:
        """Announce phase begins and ends to the next node, in order with the forwards."""
        if self.is_leaf:
            return
        for phase in self._phases.values():
            if not phase.begin_sent:
                phase.begin_sent = True
                self._actions.append(SendPhaseBegin(phase.number, phase.trains))
            if phase.forwarded != phase.count:
                break
            if not phase.end_sent:
                phase.end_sent = True
                self._actions.append(SendPhaseEnd(phase.number, phase.count))

    def _admit(self) -> None:
        """Report free places to the user; admitted ones stay admitted when the window shrinks."""
        total = self._returned + self._places() + READ_AHEAD
        if self.is_root and total > self._admitted:
            self._admitted = total
            self._actions.append(Admit(total))

    def _places(self) -> int:
        """Return the useful window: in ``sync``, more than one update cannot be in flight."""
        return min(self._window, self.update_frequency) if self.sync else self._window

    def _start_next(self) -> None:
        first = next(iter(self._phases.values()), None)
        if first is None:
            return
        gradients = self._due(first)
        if gradients:
            if self._clip_is_ready(gradients):
                self._run(RunStep(self.version, gradients))
        elif first.finished == first.count:
            self._run(RunPhaseEnd(first.number, first.trains))
        else:
            self._start_pass()

    def _start_pass(self) -> None:
        may_forward = bool(self._forwards) and self._may_forward(self._forwards[0])
        if self._backwards and not (may_forward and self._forward_next):
            self._start_backward()
        elif may_forward:
            self._start_forward()

    def _due(self, first: _Phase) -> int:
        """Return the number of gradients in the update that is due, 0 if none is due.

        Gradients arrive in the order of phases, and a phase ends with an update: gradients that are
        not applied yet belong to the first phase that is not over.
        """
        gradients = first.finished - first.applied
        full = gradients == self.update_frequency or first.finished == first.count
        return gradients if full and first.trains else 0

    def _clip_is_ready(self, gradients: int) -> bool:
        if not self.waits_for_clip or self._clip_known:
            return True
        if self.is_root and not self._norms_requested:
            self._norms_requested = True
            self._actions.append(GatherNorms(self.version, gradients))
        return False

    def _start_backward(self) -> None:
        self._forward_next = True
        forward = self._backwards.popleft()
        phase, done = self._phases[forward.microbatch.phase], forward.microbatch.index + 1
        last = done % self.update_frequency == 0 or done == phase.arrived
        self._run(RunBackward(forward.microbatch, forward.version, last))

    def _may_forward(self, microbatch: MicrobatchId) -> bool:
        if self.is_root and self.in_flight >= self._window:
            return False
        phase, limit = self._phases[microbatch.phase], self._activation_limit
        if phase.trains and limit is not None and self.in_flight >= limit:
            return False
        if phase.trains and not self.sync:
            return True
        if any(earlier.trains for earlier in self._phases.values() if earlier.number < phase.number):
            return False
        return not phase.trains or microbatch.index < phase.applied + self.update_frequency

    def _start_forward(self) -> None:
        self._forward_next = False
        microbatch = self._forwards.popleft()
        trains = self._phases[microbatch.phase].trains
        self.in_flight += 1
        if trains:
            self._users[self.version] += 1
        self._run(RunForward(microbatch, self.version, trains))

    def _run(self, run: Run) -> None:
        self._running = run
        self._trace.append(run)
        self._actions.append(run)

    def _name(self) -> str:
        if self.is_root:
            return "Root"
        return f"Leaf (stage {self.position})" if self.is_leaf else f"Stem (stage {self.position})"


def format_runs(actions: Iterable[Action]) -> str:
    """Return the computations among the actions as text, such as ``0F 1F 0B s0 e0``.

    A number with F is the forward of that micro-batch, with V a forward without gradients
    (validation), with B a backward; ``s`` precedes the number of an update, ``e`` that of a phase that
    ends. If the micro-batches belong to several phases, the phase comes first, as in ``1.0F``.
    """
    runs = [
        action
        for action in actions
        if isinstance(action, RunForward | RunBackward | RunStep | RunPhaseEnd)
    ]
    phases = {run.microbatch.phase for run in runs if isinstance(run, RunForward | RunBackward)}
    return " ".join(_label(run, with_phase=len(phases) > 1) for run in runs)


def _label(run: Run, *, with_phase: bool) -> str:
    match run:
        case RunForward(microbatch, _, trains):
            kind = "F" if trains else "V"
        case RunBackward(microbatch):
            kind = "B"
        case RunStep(update):
            return f"s{update}"
        case RunPhaseEnd(phase):
            return f"e{phase}"
    number = f"{microbatch.phase}.{microbatch.index}" if with_phase else f"{microbatch.index}"
    return number + kind
