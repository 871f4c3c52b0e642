"""The schedule of one node: events in, actions out; no clock, no threads, no tensors.

The same machine serves Root (position 0), Stem and Leaf (the last), and a node that is both. It
asks for at most one computation at a time. When idle, the update or phase end that is due comes
first. A backward and a forward that are both ready take turns: were backwards always preferred,
those that queue up at a slow stage would starve the stages behind it of forwards, and micro-batches
would travel as one convoy (``docs/schedules.md`` has the figures).
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

Schedule = Literal["async", "sync"]

AHEAD = 2
"""Micro-batches that wait at the Root beyond the window: the compute thread finds the next one
there even when the user's thread is late by one."""

TRACED = 16
"""Computations that a failure shows."""


@dataclass(slots=True)
class _Phase:
    """How far this stage is with a phase."""

    number: int
    trains: bool
    arrived: int = 0
    forwarded: int = 0
    finished: int = 0
    """Backwards done; without training, forwards done, or outcomes back at the Root."""
    applied: int = 0
    """Backwards that are part of an update."""
    count: int | None = None
    """Known once the phase has ended."""
    begin_sent: bool = False
    end_sent: bool = False


@dataclass(slots=True)
class _Pass:
    """A micro-batch that this stage has forwarded and not yet taken back."""

    batch: Batch
    version: int
    trains: bool


class _ProtocolError(Exception):
    """An event that cannot be; its text is the reason to fail."""


class ScheduleMachine:
    """Decides what a node does next.

    ``handle`` takes what happened and returns what to do, in order; a computation (``Run*``) is
    always last, and ``Done`` answers it. The Root's first ``Admit`` comes with its first phase, or
    with an earlier ``WindowSet``. After a ``Fail`` every event is ignored.

    ``window`` counts for the Root: micro-batches in flight in the whole pipeline. ``hold`` is this
    stage's own limit, that of its memory: of how many micro-batches it keeps activations at once.
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
        hold: int | None = None,
    ) -> None:
        assert 0 <= position < count, f"stage {position} of {count}"
        assert window >= 1, f"a window of {window}"
        assert update_frequency >= 1, f"an update of {update_frequency} micro-batches"
        assert hold is None or hold >= 1, f"activations of {hold} micro-batches"
        self.position = position
        self.is_root = position == 0
        self.is_leaf = position == count - 1
        self.sync = schedule == "sync"
        self.update_frequency = update_frequency
        self.version = 0
        """Updates done here; the number of the newest weights."""
        self.in_flight = 0
        """Micro-batches that the forward has started for and that are not finished here."""
        self.waits_for_clip = clip and self.sync
        """An update waits for the norm of all stages' gradients."""
        self._window = window
        self._hold = hold
        self._phases: dict[int, _Phase] = {}
        """Those not over here, in order."""
        self._newest: _Phase | None = None
        self._forwards: deque[Batch] = deque()
        self._away: deque[_Pass] = deque()
        self._backwards: deque[_Pass] = deque()
        self._turn_of_forward = False
        self._running: Run | None = None
        self._running_pass: _Pass | None = None
        self._users: dict[int, int] = {0: 0}
        """Micro-batches under way of each version that is held."""
        self._norms_asked = False
        self._clip_known = False
        self._submitted = 0
        self._returned = 0
        self._admitted = 0
        self._trace: deque[Run] = deque(maxlen=TRACED)
        self._failed = False
        self._actions: list[Action] = []

    def handle(self, event: Event, now: float) -> list[Action]:  # noqa: ARG002 - time is part of the seam
        """Take in an event; what to do about it, in order."""
        if self._failed:
            return []
        actions: list[Action] = []
        self._actions = actions
        try:
            self._take(event)
            if self._running is None:
                self._start_next()
        except _ProtocolError as error:
            self._failed = True
            ran = show(self._trace)
            return [Fail(f"{self._name()}: {error}" + (f" (last run here: {ran})" if ran else ""))]
        return actions

    @property
    def idle(self) -> bool:
        """No computation is asked for and nothing is under way here."""
        return self._running is None and not (self._phases or self._away)

    # What happened

    def _take(self, event: Event) -> None:
        match event:
            case Done():
                self._done()
            case ForwardArrived(batch):
                self._forward_arrived(batch)
            case BackwardArrived(batch):
                self._backwards.append(self._take_back(batch, trains=True))
            case OutcomeArrived(batch):
                self._take_back(batch, trains=False)
                self._outcome(batch)
            case ClipArrived(update):
                self._clip_arrived(update)
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
                f"phase {number} began after phase {newest.number}, not {newest.number + 1}"
            )
        self._newest = self._phases[number] = _Phase(number, trains)
        self._send_phases()
        self._admit()

    def _phase_ended(self, number: int, count: int) -> None:
        phase = self._open_phase(number, "ended, but it")
        if count != phase.arrived:
            raise _ProtocolError(
                f"phase {number} ended with {count} micro-batches, but {phase.arrived} have arrived"
            )
        phase.count = count
        self._send_phases()

    def _forward_arrived(self, batch: Batch) -> None:
        phase = self._open_phase(batch.phase, f"has a micro-batch {batch.index}, but it")
        if batch.index != phase.arrived:
            raise _ProtocolError(
                f"the forward of {_name(batch)} arrived, {phase.arrived} was to be next"
            )
        if self.is_root and self._submitted == self._admitted:
            raise _ProtocolError(
                f"{_name(batch)} was given to the Root, which admitted {self._admitted} in all"
            )
        phase.arrived += 1
        self._submitted += 1
        self._forwards.append(batch)

    def _open_phase(self, number: int, what: str) -> _Phase:
        phase = self._newest
        if phase is None or number > phase.number:
            raise _ProtocolError(f"phase {number} {what} has not begun")
        if number < phase.number or phase.count is not None:
            raise _ProtocolError(f"phase {number} {what} is closed already")
        return phase

    def _take_back(self, batch: Batch, *, trains: bool) -> _Pass:
        what = "backward" if trains else "outcome"
        if not self._away:
            raise _ProtocolError(f"the {what} of {_name(batch)} arrived, but no micro-batch is out")
        first = self._away[0]
        if first.batch != batch:
            raise _ProtocolError(
                f"the {what} of {_name(batch)} arrived, {_name(first.batch)} was to be next"
            )
        if first.trains != trains:
            raise _ProtocolError(
                f"the {what} of {_name(batch)} arrived, but phase {batch.phase} has none"
            )
        return self._away.popleft()

    def _clip_arrived(self, update: int) -> None:
        if not self.waits_for_clip:
            raise _ProtocolError(f"the clip of update {update} arrived, but none was to come")
        if update != self.version or self._clip_known:
            raise _ProtocolError(
                f"the clip of update {update} arrived, update {self.version} is under way"
            )
        if not (self._phases and self._due(next(iter(self._phases.values())))):
            raise _ProtocolError(f"the clip of update {update} arrived before all its gradients")
        self._clip_known = True
        if not self.is_leaf:
            self._actions.append(SendClip(update))

    # What was computed

    def _done(self) -> None:
        run, self._running = self._running, None
        match run:
            case RunForward(batch):
                self._forward_done(batch)
            case RunBackward(batch, version):
                self._backward_done(batch, version)
            case RunStep(update, count):
                self._step_done(update, count)
            case RunPhaseEnd(phase):
                del self._phases[phase]
            case None:
                raise _ProtocolError("a computation is done, but none was asked for")

    def _forward_done(self, batch: Batch) -> None:
        done, self._running_pass = self._running_pass, None
        assert done is not None
        phase = self._phases[batch.phase]
        phase.forwarded += 1
        if not self.is_leaf:
            self._away.append(done)
            self._actions.append(SendForward(batch))
            self._send_phases()
            if not (phase.trains or self.is_root):
                phase.finished += 1
        elif phase.trains:
            self._backwards.append(done)
        else:
            if not self.is_root:
                phase.finished += 1
            self._outcome(batch)

    def _backward_done(self, batch: Batch, version: int) -> None:
        self._phases[batch.phase].finished += 1
        self.in_flight -= 1
        if self.is_root:
            self._finished(batch)
        else:
            self._actions.append(SendBackward(batch))
        self._users[version] -= 1
        self._free(version)

    def _step_done(self, update: int, count: int) -> None:
        next(iter(self._phases.values())).applied += count
        self.version = update + 1
        self._users[self.version] = 0
        self._norms_asked = self._clip_known = False
        self._free(update)

    def _outcome(self, batch: Batch) -> None:
        """Pass on that a micro-batch without gradients has been dealt with."""
        self.in_flight -= 1
        if self.is_root:
            self._phases[batch.phase].finished += 1
            self._finished(batch)
        else:
            self._actions.append(SendOutcome(batch))

    def _finished(self, batch: Batch) -> None:
        self._returned += 1
        self._actions.append(Finished(batch))
        self._admit()

    def _free(self, version: int) -> None:
        if version != self.version and not self._users[version]:
            del self._users[version]
            self._actions.append(FreeVersion(version))

    # What to do

    def _send_phases(self) -> None:
        """Tell the next node of begins and ends, in order with the forwards."""
        if self.is_leaf:
            return
        for phase in self._phases.values():
            if not phase.begin_sent:
                phase.begin_sent = True
                self._actions.append(SendBegin(phase.number, phase.trains))
            if phase.forwarded != phase.count:
                break
            if not phase.end_sent:
                phase.end_sent = True
                self._actions.append(SendEnd(phase.number, phase.count))

    def _admit(self) -> None:
        """Tell the user of free places; what was admitted stays so when the window shrinks."""
        total = self._returned + self._places() + AHEAD
        if self.is_root and total > self._admitted:
            self._admitted = total
            self._actions.append(Admit(total))

    def _places(self) -> int:
        """Micro-batches that may be under way; a flush leaves no use for more than an update's."""
        return min(self._window, self.update_frequency) if self.sync else self._window

    def _start_next(self) -> None:
        first = next(iter(self._phases.values()), None)
        if first is None:
            return
        gathered = self._due(first)
        if gathered:
            if self._clip_is_here(gathered):
                self._run(RunStep(self.version, gathered))
        elif first.finished == first.count:
            self._run(RunPhaseEnd(first.number, first.trains))
        else:
            self._start_pass()

    def _start_pass(self) -> None:
        may_forward = bool(self._forwards) and self._may_forward(self._forwards[0])
        if self._backwards and not (may_forward and self._turn_of_forward):
            self._start_backward()
        elif may_forward:
            self._start_forward()

    def _due(self, first: _Phase) -> int:
        """Gradients that the update which is due has, 0 if none is.

        Gradients come in the order of phases, and a phase ends with an update: those not applied
        belong to the first phase that is not over.
        """
        gathered = first.finished - first.applied
        full = gathered == self.update_frequency or first.finished == first.count
        return gathered if full and first.trains else 0

    def _clip_is_here(self, gathered: int) -> bool:
        if not self.waits_for_clip or self._clip_known:
            return True
        if self.is_root and not self._norms_asked:
            self._norms_asked = True
            self._actions.append(GatherNorms(self.version, gathered))
        return False

    def _start_backward(self) -> None:
        self._turn_of_forward = True
        taken = self._backwards.popleft()
        phase, done = self._phases[taken.batch.phase], taken.batch.index + 1
        last = done % self.update_frequency == 0 or done == phase.arrived
        self._run(RunBackward(taken.batch, taken.version, last))

    def _may_forward(self, batch: Batch) -> bool:
        if self.is_root and self.in_flight >= self._window:
            return False
        phase = self._phases[batch.phase]
        if phase.trains and self._hold is not None and self.in_flight >= self._hold:
            return False
        if phase.trains and not self.sync:
            return True
        if any(earlier.trains for earlier in self._phases.values() if earlier.number < phase.number):
            return False
        return not phase.trains or batch.index < phase.applied + self.update_frequency

    def _start_forward(self) -> None:
        self._turn_of_forward = False
        batch = self._forwards.popleft()
        trains = self._phases[batch.phase].trains
        self.in_flight += 1
        self._running_pass = _Pass(batch, self.version, trains)
        if trains:
            self._users[self.version] += 1
        self._run(RunForward(batch, self.version, trains))

    def _run(self, run: Run) -> None:
        self._running = run
        self._trace.append(run)
        self._actions.append(run)

    def _name(self) -> str:
        if self.is_root:
            return "Root"
        return f"Leaf (stage {self.position})" if self.is_leaf else f"Stem (stage {self.position})"


def _name(batch: Batch) -> str:
    return f"micro-batch {batch.index} of phase {batch.phase}"


def show(actions: Iterable[Action]) -> str:
    """The computations among the actions, such as ``0F 1F 0B s0 e0``.

    A micro-batch's number with F for a forward, V for one without gradients (validation) and B
    for a backward; ``s`` with the number of the update, ``e`` with the phase that ends. Where
    micro-batches of several phases are shown, ``1.0F`` names the phase first.
    """
    runs = [
        action
        for action in actions
        if isinstance(action, RunForward | RunBackward | RunStep | RunPhaseEnd)
    ]
    phases = {run.batch.phase for run in runs if isinstance(run, RunForward | RunBackward)}
    return " ".join(_label(run, with_phase=len(phases) > 1) for run in runs)


def _label(run: Run, *, with_phase: bool) -> str:
    match run:
        case RunForward(batch, _, trains):
            kind = "F" if trains else "V"
        case RunBackward(batch):
            kind = "B"
        case RunStep(update):
            return f"s{update}"
        case RunPhaseEnd(phase):
            return f"e{phase}"
    return (f"{batch.phase}.{batch.index}" if with_phase else f"{batch.index}") + kind
