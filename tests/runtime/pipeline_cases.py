"""Schedule machines of a whole pipeline over FIFO links, driven in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

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
    GatherNorms,
    PhaseBegun,
    PhaseEnded,
    ResultArrived,
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
from ravnest.runtime.schedule.machine import Schedule, ScheduleMachine
from ravnest.types import MicrobatchId


@dataclass(frozen=True)
class Phase:
    trains: bool
    count: int


@dataclass
class Pipeline:
    """Pipeline whose next event is chosen from a list of sources; each delivers its oldest event."""

    count: int
    phases: tuple[Phase, ...]
    schedule: Schedule = "async"
    window: int = 4
    update_frequency: int = 1
    clip: bool = False
    windows: tuple[int, ...] = ()
    """Window sizes to which the window changes during the run."""

    activation_limits: tuple[int | None, ...] = ()
    """Activation limit of each stage; stages without an entry have no limit."""

    machines: list[ScheduleMachine] = field(init=False)
    logs: list[list[Action]] = field(init=False)
    peak: int = 0
    admitted: int = 0
    submitted: int = 0

    def __post_init__(self) -> None:
        self.machines = [
            ScheduleMachine(
                position,
                self.count,
                schedule=self.schedule,
                window=self.window,
                update_frequency=self.update_frequency,
                clip=self.clip,
                activation_limit=self.activation_limits[position]
                if position < len(self.activation_limits)
                else None,
            )
            for position in range(self.count)
        ]
        self.logs = [[] for _ in self.machines]
        self.sources: dict[str, tuple[int, deque[Event]]] = {
            "user": (0, deque(self._script())),
            "window": (0, deque(WindowSet(size) for size in self.windows)),
        }
        for position in range(self.count):
            for kind in ("forward", "backward", "done"):
                self.sources[f"{kind}{position}"] = position, deque()

    def _script(self) -> list[Event]:
        script: list[Event] = []
        for number, phase in enumerate(self.phases):
            script.append(PhaseBegun(number, phase.trains))
            script += [ForwardArrived(MicrobatchId(number, index)) for index in range(phase.count)]
            script.append(PhaseEnded(number, phase.count))
        return script

    def ready(self) -> list[str]:
        return [name for name, (_, queue) in self.sources.items() if queue and self._may(name, queue[0])]

    def _may(self, name: str, event: Event) -> bool:
        blocked = (
            name == "user" and isinstance(event, ForwardArrived) and self.submitted == self.admitted
        )
        return not blocked

    def step(self, name: str) -> None:
        position, queue = self.sources[name]
        event = queue.popleft()
        self.submitted += name == "user" and isinstance(event, ForwardArrived)
        actions = self.machines[position].handle(event, 0.0)
        self.logs[position] += actions
        for action in actions:
            self._carry_out(position, action)
        self.peak = max(self.peak, self.machines[0].in_flight)

    def run(self, choose: Callable[[list[str]], str] = lambda ready: ready[0]) -> Pipeline:
        while ready := self.ready():
            self.step(choose(ready))
        return self

    def _send(self, kind: str, position: int, event: Event) -> None:
        self.sources[f"{kind}{position}"][1].append(event)

    def _carry_out(self, position: int, action: Action) -> None:
        match action:
            case RunForward() | RunBackward() | RunStep() | RunPhaseEnd():
                assert not self.sources[f"done{position}"][1], "two computations at once"
                self._send("done", position, Done())
            case GatherNorms(update):
                assert position == 0, "only the Root gathers norms"
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
                self._send("forward", position + 1, ForwardArrived(microbatch))
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

    def finished(self) -> list[MicrobatchId]:
        return [action.microbatch for action in self.logs[0] if isinstance(action, Finished)]
