"""Schedule machines of a whole pipeline over FIFO links, driven in any order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ravnest.runtime.schedule.events import (
    Action,
    Admit,
    BackwardArrived,
    ClipNormArrived,
    CombineNorms,
    Done,
    Event,
    Fail,
    Finished,
    ForwardArrived,
    NormsArrived,
    PhaseBegun,
    PhaseEnded,
    ResultArrived,
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
from ravnest.runtime.schedule.machine import ScheduleMachine
from ravnest.runtime.schedule.progress import StageTraits
from ravnest.types import MicrobatchId, Schedule


@dataclass(frozen=True)
class Phase:
    """A phase of ``batches`` batches of the user."""

    trains: bool
    batches: int


@dataclass
class Pipeline:
    """Machines and the events that can happen next: each source delivers its oldest event."""

    count: int
    phases: tuple[Phase, ...]
    schedule: Schedule = "async"
    window: int = 4
    parts: int = 1
    """Micro-batches in a training batch."""
    update_frequency: int = 1
    """Batches in an update."""
    clip: bool = False
    defers: bool = False
    users: tuple[int, ...] = ()
    """Stages that use one shared weight, in order; the first owns it."""
    windows: tuple[int, ...] = ()
    """Sizes to which the window changes on the way."""
    activation_limits: tuple[int | None, ...] = ()
    """Limits of the stages; none where there are too few."""
    interruptions: int = 0
    """Times that the deferred weight gradients of each micro-batch are interrupted."""

    machines: list[ScheduleMachine] = field(init=False)
    logs: list[list[Action]] = field(init=False)
    """Actions of each stage, without computations that were interrupted."""
    interrupted: Counter[tuple[int, MicrobatchId]] = field(init=False)
    peak: int = 0
    """Maximum number of micro-batches in flight."""
    held: list[int] = field(init=False)
    """Maximum number of micro-batches for which each stage kept activations."""
    admitted: int = 0
    submitted: int = 0

    def __post_init__(self) -> None:
        self.machines = [
            ScheduleMachine(
                position,
                self.count,
                schedule=self.schedule,
                window=self.window,
                traits=self.traits(position),
            )
            for position in range(self.count)
        ]
        self.logs = [[] for _ in self.machines]
        self.interrupted = Counter()
        self.held = [0 for _ in self.machines]
        self.sources: dict[str, tuple[int, deque[Event]]] = {
            "user": (0, deque(self._script())),
            "window": (0, deque(WindowSet(size) for size in self.windows)),
        }
        for position in range(self.count):
            for kind in ("forward", "backward", "done"):
                self.sources[f"{kind}{position}"] = position, deque()

    def traits(self, position: int) -> StageTraits:
        """Return the traits of a stage."""
        limits, users = self.activation_limits, self.users
        return StageTraits(
            defers=self.defers and position > 0,
            expects_shared=position in users[:-1],
            sends_shared=position in users[1:],
            clip=self.clip,
            activation_limit=limits[position] if position < len(limits) else None,
        )

    def microbatches(self, phase: int) -> list[MicrobatchId]:
        """Return the micro-batches of a phase; batches are split in training only."""
        described = self.phases[phase]
        parts = self.parts if described.trains else 1
        return [MicrobatchId(phase, index) for index in range(described.batches * parts)]

    def arrival(self, microbatch: MicrobatchId) -> ForwardArrived:
        """Return the arrival of a micro-batch at a stage."""
        if not self.phases[microbatch.phase].trains:
            return ForwardArrived(microbatch, ends_update=False)
        number = microbatch.index + 1
        return ForwardArrived(
            microbatch,
            ends_batch=number % self.parts == 0,
            ends_update=number % (self.parts * self.update_frequency) == 0,
        )

    def _script(self) -> list[Event]:
        script: list[Event] = []
        for number, phase in enumerate(self.phases):
            microbatches = self.microbatches(number)
            script.append(PhaseBegun(number, phase.trains))
            script += [self.arrival(microbatch) for microbatch in microbatches]
            script.append(PhaseEnded(number, len(microbatches)))
        return script

    def ready(self) -> list[str]:
        """Return the names of the sources that can deliver an event."""
        return [name for name, (_, queue) in self.sources.items() if queue and self._may(name, queue[0])]

    def _may(self, name: str, event: Event) -> bool:
        blocked = (
            name == "user" and isinstance(event, ForwardArrived) and self.submitted >= self.admitted
        )
        return not blocked

    def step(self, name: str) -> None:
        """Deliver the oldest event of a source."""
        position, queue = self.sources[name]
        event = queue.popleft()
        self.submitted += name == "user" and isinstance(event, ForwardArrived)
        machine = self.machines[position]
        actions = machine.handle(event, 0.0)
        for action in actions:
            if not self._interrupts(position, action):
                self.logs[position].append(action)
                self._carry_out(position, action)
        self.peak = max(self.peak, self.machines[0].in_flight)
        if any(isinstance(action, RunForward) and action.trains for action in actions):
            self.held[position] = max(self.held[position], machine.held)

    def run(self, choose: Callable[[list[str]], str] = lambda ready: ready[0]) -> Pipeline:
        """Deliver events until none is left; ``choose`` picks the source."""
        while ready := self.ready():
            self.step(choose(ready))
        return self

    def _interrupts(self, position: int, action: Action) -> bool:
        """Return whether a computation is interrupted; its stage then hears of it."""
        if not isinstance(action, RunWeights):
            return False
        stage = position, action.microbatch
        if self.interrupted[stage] >= self.interruptions:
            return False
        self.interrupted[stage] += 1
        self._send("done", position, WeightsInterrupted())
        return True

    def _send(self, kind: str, position: int, event: Event) -> None:
        self.sources[f"{kind}{position}"][1].append(event)

    def _carry_out(self, position: int, action: Action) -> None:
        match action:
            case RunForward() | RunBackward() | RunWeights() | RunStep() | RunPhaseEnd():
                assert Done() not in self.sources[f"done{position}"][1], "two computations at once"
                self._send("done", position, Done())
            case CombineNorms(update):
                assert position == 0, "only the Root combines norms"
                self._send("done", position, ClipNormArrived(update))
            case Admit(total):
                assert position == 0, "only the Root admits"
                assert total > self.admitted
                self.admitted = total
            case Fail(reason):
                raise AssertionError(reason)
            case _:
                self._carry(position, action)

    def _carry(self, position: int, action: Action) -> None:
        match action:
            case SendForward(microbatch):
                self._send("forward", position + 1, self.arrival(microbatch))
            case SendPhaseBegin(phase, trains):
                self._send("forward", position + 1, PhaseBegun(phase, trains))
            case SendPhaseEnd(phase, count):
                self._send("forward", position + 1, PhaseEnded(phase, count))
            case SendClipNorm(update):
                self._send("forward", position + 1, ClipNormArrived(update))
            case SendBackward(microbatch):
                self._send("backward", position - 1, BackwardArrived(microbatch))
            case SendResult(microbatch):
                self._send("backward", position - 1, ResultArrived(microbatch))
            case SendNorms(update):
                self._send("backward", position - 1, NormsArrived(update))
            case SendShared(update):
                # Stages in between pass them on at once.
                owner = self.users[self.users.index(position) - 1]
                self._send("backward", owner, SharedArrived(update))

    def finished(self) -> list[MicrobatchId]:
        """Return the micro-batches that have returned to the Root, in order."""
        return [action.microbatch for action in self.logs[0] if isinstance(action, Finished)]
