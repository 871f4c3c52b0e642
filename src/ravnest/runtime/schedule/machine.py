"""Pipeline schedule of one node: events in, actions out; no clock, no threads, no tensors.

The same machine serves the Root (position 0), a Stem, the Leaf (the last position) and a node that is
Root and Leaf. It requests at most one computation at a time, in this order of preference:

1. an update whose gradients are complete, or the end of a phase;
2. backwards and forwards. If both are ready, they alternate: if backwards always ran first, those
   queued at a slow stage would starve the following stages of forwards, and micro-batches would travel
   in a convoy (``docs/schedules.md`` has measurements);
3. deferred weight gradients. Nothing but this stage's own update waits for them, so that they fill the
   time in which the stage would otherwise wait. They may be interrupted if something arrives.

A micro-batch may run ahead of the weights by ``max_delay`` updates. With 0 every micro-batch of an
update uses the weights of the update before (``sync``): the result of a single process. A stage starts
the next batch right after its own update; there is no moment at which the whole pipeline is empty.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ravnest.runtime.schedule.costly_deferral import CostlyDeferral
from ravnest.runtime.schedule.events import (
    Action,
    Admit,
    BackwardArrived,
    ClipNormArrived,
    CombineNorms,
    CompleteGradients,
    Done,
    Event,
    Fail,
    Finished,
    ForwardArrived,
    FreeVersion,
    NormsArrived,
    PhaseBegun,
    PhaseEnded,
    ResultArrived,
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
    SharedArrived,
    WeightsInterrupted,
    WindowSet,
)
from ravnest.runtime.schedule.notation import format_runs
from ravnest.runtime.schedule.progress import NO_TRAITS, PhaseProgress, StageTraits, UpdateProgress
from ravnest.types import MicrobatchId, Schedule

MAX_DELAY: dict[Schedule, int] = {"sync": 0, "async": 1}
"""Updates by which the weights of a forward may be behind the update that its gradient is part of."""

READ_AHEAD = 2
"""Micro-batches that the Root accepts beyond the window, so that the compute thread finds the next one
even if the user's thread is late by one."""

TRACED = 16
"""Number of computations that a failure message shows."""


class _ProtocolError(Exception):
    """Event that violates the protocol; its text is the reason of the failure."""


class ScheduleMachine:
    """State machine that decides what a node computes and sends next.

    ``handle`` takes an event and returns actions in order; a computation (``Run*``) is always the last
    one, and ``Done`` or ``WeightsInterrupted`` answers it. The Root's first ``Admit`` comes with its
    first phase, or with an earlier ``WindowSet``. After a ``Fail`` every event is ignored.

    ``window`` applies at the Root: the number of micro-batches in flight in the whole pipeline.
    """

    def __init__(
        self,
        position: int,
        count: int,
        *,
        schedule: Schedule,
        window: int,
        traits: StageTraits = NO_TRAITS,
    ) -> None:
        assert 0 <= position < count, f"stage {position} of {count}"
        assert window >= 1, f"a window of {window}"
        limit = traits.activation_limit
        assert limit is None or limit >= 1, f"an activation_limit of {limit}"
        self.position = position
        self.is_root = position == 0
        self.is_leaf = position == count - 1
        # The Leaf turns each micro-batch round at once: to run ahead of its own update gains nothing.
        self.max_delay = 0 if self.is_leaf else MAX_DELAY[schedule]
        """Updates by which a forward may run ahead."""
        self.traits = traits
        self.version = 0
        """Number of updates done here, and of the newest weights."""
        self.in_flight = 0
        """Micro-batches whose forward has started here and that are not finished here."""
        self._window = window
        self._phases: dict[int, PhaseProgress] = {}
        """Phases that are not over here, in order."""
        self._newest: PhaseProgress | None = None
        self._updates: deque[UpdateProgress] = deque()
        """Updates that are not done here, in order; the first is number ``version``."""
        self._forwards: deque[tuple[MicrobatchId, int]] = deque()
        """Micro-batches ready for their forward, with their updates."""
        self._sent: deque[RunForward] = deque()
        """Forwards sent to the next node and not yet returned."""
        self._backwards: deque[RunForward] = deque()
        """Forwards whose backward is ready to run."""
        self._costly = CostlyDeferral() if traits.may_defer_costly else None
        self._deferred: set[MicrobatchId] = set()
        """Micro-batches in flight whose costly weight gradients are deferred."""
        self._weights: deque[RunWeights] = deque()
        """Weight gradients that are still to be computed."""
        self._forward_next = False
        """True if a forward runs before a backward that is ready too."""
        self._running: Run | None = None
        self._users: dict[int, int] = {0: 0}
        """Number of micro-batches that need each version that is kept."""
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

    def continue_from(self, version: int) -> None:
        """Count updates from ``version``, which the weights contain already; before the first event."""
        assert self._newest is None, "a phase has begun"
        self.version = version
        self._users = {version: 0}

    def allow_delay(self) -> None:
        """Let forwards run ahead of an update, contrary to the plan; before a phase begins.

        The plan's window may have one place, which would allow for a delay without any overlap.
        """
        self.max_delay = 0 if self.is_leaf else MAX_DELAY["async"]
        self._window = self.traits.delayed_limit
        self.traits = replace(self.traits, activation_limit=self.traits.delayed_limit)

    @property
    def idle(self) -> bool:
        """True if no computation is requested and no micro-batch is in flight here."""
        return self._running is None and not (self._phases or self._sent)

    @property
    def held(self) -> int:
        """Micro-batches for which the stage keeps activations."""
        return self.in_flight + len(self._weights)

    # Events

    def _process(self, event: Event) -> None:  # noqa: C901 - one case per event
        match event:
            case Done():
                self._done()
            case WeightsInterrupted():
                self._interrupted()
            case ForwardArrived():
                self._forward_arrived(event)
            case BackwardArrived(microbatch):
                self._backwards.append(self._take_returned(microbatch, trains=True))
            case ResultArrived(microbatch):
                self._take_returned(microbatch, trains=False)
                self._finish_without_gradients(microbatch)
            case SharedArrived(number):
                update = self._exchanged(number, "shared gradients", self.traits.expects_shared)
                _check_first(update.shared, "shared gradients", number)
                update.shared = True
            case NormsArrived(number):
                update = self._exchanged(number, "norms", self.traits.clip and not self.is_leaf)
                _check_first(update.norms, "norms", number)
                update.norms = True
            case ClipNormArrived(number):
                self._clip_norm_arrived(number)
            case PhaseBegun():
                self._phase_begun(event)
            case PhaseEnded(phase, count):
                self._phase_ended(phase, count)
            case WindowSet(size):
                if size < 1:
                    raise _ProtocolError(f"a window of {size} micro-batches would stop the run")
                self._window = size
                self._admit()

    def _phase_begun(self, event: PhaseBegun) -> None:
        newest, number, first = self._newest, event.phase, event.first
        if newest is not None and newest.count is None:
            raise _ProtocolError(f"phase {number} began before phase {newest.number} had ended")
        # Phases that are part of a checkpoint are left out.
        if newest is not None and number <= newest.number:
            raise _ProtocolError(f"phase {number} began after phase {newest.number}")
        self._newest = self._phases[number] = PhaseProgress(
            number, event.trains, arrived=first, forwarded=first, finished=first
        )
        self._send_phases()
        self._admit()

    def _phase_ended(self, number: int, count: int) -> None:
        phase = self._open_phase(number, f"the end of phase {number} arrived")
        if count != phase.arrived:
            raise _ProtocolError(
                f"phase {number} ended with {count} micro-batches, but {phase.arrived} have arrived"
            )
        phase.count = count
        if self._updates and self._updates[-1].phase is phase:
            self._updates[-1].ended = True
        self._send_phases()

    def _forward_arrived(self, event: ForwardArrived) -> None:
        microbatch = event.microbatch
        phase = self._open_phase(microbatch.phase, f"the forward of {microbatch} arrived")
        if microbatch.index != phase.arrived:
            raise _ProtocolError(
                f"the forward of {microbatch} arrived, expected micro-batch {phase.arrived}"
            )
        phase.arrived += 1
        number = self.version
        if phase.trains:
            if not self._updates or self._updates[-1].ended:
                self._updates.append(UpdateProgress(phase))
            update = self._updates[-1]
            update.microbatches += 1
            update.batches += event.ends_batch
            update.ended = event.ends_update
            number += len(self._updates) - 1
        self._forwards.append((microbatch, number))

    def _open_phase(self, number: int, event: str) -> PhaseProgress:
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
            kind = "a training phase" if first.trains else "a phase without gradients"
            raise _ProtocolError(f"{event}, but phase {microbatch.phase} is {kind}")
        return self._sent.popleft()

    def _exchanged(self, number: int, what: str, expected: bool) -> UpdateProgress:
        """Return the update that arriving values belong to."""
        if not expected:
            raise _ProtocolError(f"{what} of update {number} arrived, but none are expected")
        place = number - self.version
        if not 0 <= place < len(self._updates):
            raise _ProtocolError(f"{what} of update {number} arrived, but update {self.version} is next")
        return self._updates[place]

    def _clip_norm_arrived(self, number: int) -> None:
        update = self._exchanged(number, "the clip norm", self.traits.clip)
        if number != self.version or update.clip or not update.sent:
            raise _ProtocolError(f"the clip norm of update {number} arrived before all its gradients")
        update.clip = True
        if not self.is_leaf:
            self._actions.append(SendClipNorm(number))

    # Finished computations

    def _done(self) -> None:
        run, self._running = self._running, None
        match run:
            case RunForward():
                self._forward_done(run)
            case RunBackward():
                self._backward_done(run)
            case RunWeights(_, version):
                self._gradients_done(version)
            case RunStep():
                self._step_done()
            case RunPhaseEnd(phase):
                del self._phases[phase]
            case None:
                raise _ProtocolError("a computation is done, but none was requested")

    def _interrupted(self) -> None:
        run, self._running = self._running, None
        if not isinstance(run, RunWeights):
            raise _ProtocolError("only weight gradients can be interrupted")
        self._weights.appendleft(run)

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

    def _backward_done(self, run: RunBackward) -> None:
        self.in_flight -= 1
        if self.is_root:
            self._finished(run.microbatch)
        else:
            self._actions.append(SendBackward(run.microbatch))
        if self.traits.defers or run.microbatch in self._deferred:
            self._deferred.discard(run.microbatch)
            self._weights.append(RunWeights(run.microbatch, run.version))
        else:
            self._gradients_done(run.version)

    def _gradients_done(self, version: int) -> None:
        """Count a micro-batch whose gradients are all computed; updates take them in order."""
        self._updates[0].gradients += 1
        self._users[version] -= 1
        self._free(version)

    def _step_done(self) -> None:
        update = self._updates.popleft()
        if self._costly is not None:
            self._costly.update_done(update.microbatches, update.batches)
        update.phase.finished += update.microbatches
        self.version += 1
        self._users[self.version] = 0
        self._free(self.version - 1)

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
        """Report free places to the user; admitted ones stay admitted when the window shrinks.

        The user submits whole batches, so that more micro-batches than admitted may arrive.
        """
        total = self._returned + self._window + READ_AHEAD
        if self.is_root and total > self._admitted:
            self._admitted = total
            self._actions.append(Admit(total))

    def _start_next(self) -> None:
        first = next(iter(self._phases.values()), None)
        if first is None:
            return
        update = self._updates[0] if self._updates else None
        if update is not None and update.computed and self._exchange(update):
            self._run(RunStep(self.version, update.batches))
        elif first.finished == first.count:
            self._run(RunPhaseEnd(first.number, first.trains))
        else:
            self._start_pass()

    def _exchange(self, update: UpdateProgress) -> bool:
        """Send what other stages need for an update; return True if nothing is missing here."""
        traits = self.traits
        if traits.expects_shared and not update.shared:
            return False
        if traits.clip and not (self.is_leaf or update.norms):
            return False
        if not update.sent:
            update.sent = True
            if traits.expects_shared:
                self._actions.append(CompleteGradients(self.version))
            if traits.sends_shared:
                self._actions.append(SendShared(self.version))
            if traits.clip:
                self._actions.append(
                    CombineNorms(self.version, update.batches)
                    if self.is_root
                    else SendNorms(self.version)
                )
        return update.clip or not traits.clip

    def _start_pass(self) -> None:
        may_forward = bool(self._forwards) and self._may_forward(*self._forwards[0])
        may_backward = bool(self._backwards) and self._backwards[0].update == self.version
        if may_backward and not (may_forward and self._forward_next):
            self._start_backward()
        elif may_forward:
            self._start_forward()
        elif self._weights:
            if self._costly is not None and self._forwards and not self.in_flight:
                self._costly.delays_forward()
            self._run(self._weights.popleft())
        elif self._costly is not None:
            self._costly.waits()

    def _start_backward(self) -> None:
        self._forward_next = True
        forward = self._backwards.popleft()
        self._run(RunBackward(forward.microbatch, forward.version))

    def _may_forward(self, microbatch: MicrobatchId, update: int) -> bool:
        if self.is_root and self.in_flight >= self._window:
            return False
        phase, limit = self._phases[microbatch.phase], self.traits.activation_limit
        if not phase.trains:
            return not any(
                earlier.trains for earlier in self._phases.values() if earlier.number < phase.number
            )
        if limit is not None and self.held >= limit:
            return False
        return update <= self.version + self.max_delay

    def _start_forward(self) -> None:
        self._forward_next = False
        microbatch, update = self._forwards.popleft()
        trains = self._phases[microbatch.phase].trains
        self.in_flight += 1
        if trains:
            self._users[self.version] += 1
        else:
            update = self.version
        costly = trains and self._costly is not None and self._costly.defers_next()
        if costly:
            self._deferred.add(microbatch)
        self._run(RunForward(microbatch, self.version, trains, update, costly))

    def _run(self, run: Run) -> None:
        self._running = run
        self._trace.append(run)
        self._actions.append(run)

    def _name(self) -> str:
        if self.is_root:
            return "Root"
        return f"Leaf (stage {self.position})" if self.is_leaf else f"Stem (stage {self.position})"


def _check_first(arrived: bool, what: str, update: int) -> None:
    if arrived:
        raise _ProtocolError(f"{what} of update {update} arrived a second time")
