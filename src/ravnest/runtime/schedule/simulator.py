"""The schedule under virtual time: the very machines that train, fed with costs instead of tensors.

Predicts the rate of a pipeline, how stale its gradients are and how many versions of the weights
each stage holds. A link delays a message; what it is busy with makes others wait.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ravnest.runtime.schedule.events import (
    Action,
    Admit,
    BackwardArrived,
    Batch,
    Done,
    Event,
    Fail,
    Finished,
    ForwardArrived,
    FreeVersion,
    PhaseBegun,
    PhaseEnded,
    Run,
    RunBackward,
    RunForward,
    RunPhaseEnd,
    RunStep,
    SendBackward,
    SendBegin,
    SendEnd,
    SendForward,
)
from ravnest.runtime.schedule.machine import Schedule, ScheduleMachine, show

DONE = Done()
_BREATH = 50
"""Events, of about 10 microseconds each."""


@dataclass(frozen=True)
class StageCost:
    """Seconds that a stage computes: a micro-batch forward, the same backward, an update."""

    forward: float
    backward: float
    step: float = 0.0


Costs = StageCost | tuple[StageCost, ...]
"""What a stage computes: every micro-batch the same, or as measured, in turn."""


def each_cost(costs: Costs) -> tuple[StageCost, ...]:
    """One or several costs as several."""
    return (costs,) if isinstance(costs, StageCost) else costs


@dataclass(frozen=True)
class LinkCost:
    """Seconds from one stage to the next, and back, on a link where nothing waits."""

    forward: float
    backward: float
    forward_busy: float = 0.0
    """Seconds of these during which nothing else can enter the link: those of the transfer."""
    backward_busy: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """A pipeline and the training phase that it is to run; its user is never late."""

    costs: tuple[Costs, ...]
    links: tuple[LinkCost, ...]
    """One fewer than stages."""
    window: int
    update_frequency: int = 1
    schedule: Schedule = "async"
    batches: int = 100
    holds: tuple[int, ...] | None = None
    """Of how many micro-batches each stage keeps activations at most; None is no limit."""

    def __post_init__(self) -> None:
        assert self.costs, "a pipeline has stages"
        assert len(self.links) == len(self.costs) - 1, "a link between each two stages"
        assert self.holds is None or len(self.holds) == len(self.costs), "a hold for each stage"
        assert self.batches >= 1, "a phase to simulate has micro-batches"

    @property
    def varieties(self) -> int:
        """Micro-batches after which measured costs repeat; 1 where all are alike."""
        return max(len(each_cost(cost)) for cost in self.costs)


@dataclass(frozen=True)
class StageUse:
    """What a scenario made of one stage."""

    utilisation: float
    """Share of the makespan in which it computes."""
    mean_staleness: float
    """Updates made here between the forward of a micro-batch and the update that it is part of."""
    max_staleness: int
    peak_versions: int
    """Versions of the weights held at once, the newest among them."""
    peak_in_flight: int
    """Micro-batches whose activations were held at once."""


@dataclass(frozen=True)
class Span:
    """A computation and when it ran."""

    stage: int
    start: float
    end: float
    run: Run


@dataclass(frozen=True)
class Simulation:
    """The prediction."""

    rate: float
    """Micro-batches a second, ramp-up and drain left out."""
    makespan: float
    events: int
    stages: tuple[StageUse, ...]
    timeline: tuple[Span, ...] = ()
    """In order of start; only where it was asked for."""


@dataclass
class _Way:
    """One direction of a link."""

    delay: float
    busy: float
    free: float = 0.0
    """When the next message can enter."""

    def pass_through(self, now: float) -> float:
        """Seconds until a message that is sent now arrives."""
        start = max(now, self.free)
        self.free = start + self.busy
        return start - now + self.delay

    def in_order(self, now: float) -> float:
        """The same for a message of no size, behind those sent before."""
        return max(self.free - now, 0.0) + self.delay


@dataclass
class _Stage:
    machine: ScheduleMachine
    costs: tuple[StageCost, ...]
    ahead: _Way
    """To the next stage."""
    back: _Way
    """To the one before."""
    busy: float = 0.0
    stalenesses: list[int] = field(default_factory=list)
    versions: int = 1
    peak_versions: int = 1
    peak_in_flight: int = 0

    def cost(self, number: int) -> StageCost:
        """Of the micro-batch or update with this number."""
        return self.costs[number % len(self.costs)]

    def use(self, makespan: float) -> StageUse:
        return StageUse(
            utilisation=self.busy / makespan if makespan else 0.0,
            mean_staleness=math.fsum(self.stalenesses) / max(1, len(self.stalenesses)),
            max_staleness=max(self.stalenesses, default=0),
            peak_versions=self.peak_versions,
            peak_in_flight=self.peak_in_flight,
        )


class _World:
    """The machines, and what is going to happen to them when."""

    def __init__(self, scenario: Scenario, *, record: bool) -> None:
        count = len(scenario.costs)
        ahead = [*(_Way(link.forward, link.forward_busy) for link in scenario.links), _Way(0.0, 0.0)]
        back = [_Way(0.0, 0.0), *(_Way(link.backward, link.backward_busy) for link in scenario.links)]
        self.stages = [
            _Stage(
                ScheduleMachine(
                    position,
                    count,
                    schedule=scenario.schedule,
                    window=scenario.window,
                    update_frequency=scenario.update_frequency,
                    hold=scenario.holds[position] if scenario.holds else None,
                ),
                each_cost(cost),
                ahead[position],
                back[position],
            )
            for position, cost in enumerate(scenario.costs)
        ]
        self.now = 0.0
        self.finished: list[float] = []
        self.timeline: list[Span] | None = [] if record else None
        self.events = 0
        self._heap: list[tuple[float, int, int, Event]] = []
        self._pushed = 0
        self._batches = scenario.batches
        self._submitted = 0

    def run(self, until: int, breathe: Callable[[], None] | None = None) -> None:
        """Go on until so many micro-batches have come back and, if they are all, nothing is left.

        ``breathe`` is called now and then.
        """
        self._push(0.0, 0, PhaseBegun(0, True))
        heap, stages, pop = self._heap, self.stages, heapq.heappop
        while heap and (len(self.finished) < until or until == self._batches):
            self.now, _, position, event = pop(heap)
            self.events += 1
            if breathe is not None and self.events % _BREATH == 0:
                breathe()
            stage = stages[position]
            for action in stage.machine.handle(event, self.now):
                self._carry_out(position, stage, action)
        if len(self.finished) < until:
            raise AssertionError(f"{len(self.finished)} of {until} micro-batches came back")

    def _push(self, delay: float, position: int, event: Event) -> None:
        # The count keeps what happens at one moment in the order in which it was caused.
        self._pushed += 1
        heapq.heappush(self._heap, (self.now + delay, self._pushed, position, event))

    def _carry_out(self, position: int, stage: _Stage, action: Action) -> None:
        match action:
            case RunForward() | RunBackward() | RunStep() | RunPhaseEnd():
                self._compute(position, stage, action)
            case SendForward(batch):
                self._push(stage.ahead.pass_through(self.now), position + 1, ForwardArrived(batch))
            case SendBackward(batch):
                self._push(stage.back.pass_through(self.now), position - 1, BackwardArrived(batch))
            case FreeVersion():
                stage.versions -= 1
            case Finished():
                self.finished.append(self.now)
            case Admit(total):
                self._submit(total)
            case SendBegin(phase, trains):
                self._push(stage.ahead.in_order(self.now), position + 1, PhaseBegun(phase, trains))
            case SendEnd(phase, count):
                self._push(stage.ahead.in_order(self.now), position + 1, PhaseEnded(phase, count))
            case Fail(reason):
                raise AssertionError(reason)

    def _compute(self, position: int, stage: _Stage, run: Run) -> None:
        seconds = 0.0
        match run:
            case RunForward(batch):
                seconds = stage.cost(batch.index).forward
                stage.peak_in_flight = max(stage.peak_in_flight, stage.machine.in_flight)
            case RunBackward(batch, version):
                seconds = stage.cost(batch.index).backward
                stage.stalenesses.append(stage.machine.version - version)
            case RunStep(update):
                seconds = stage.cost(update).step
                stage.versions += 1
                stage.peak_versions = max(stage.peak_versions, stage.versions)
        stage.busy += seconds
        self._push(seconds, position, DONE)
        if self.timeline is not None:
            self.timeline.append(Span(position, self.now, self.now + seconds, run))

    def _submit(self, admitted: int) -> None:
        while self._submitted < min(admitted, self._batches):
            self._push(0.0, 0, ForwardArrived(Batch(0, self._submitted)))
            self._submitted += 1
            if self._submitted == self._batches:
                self._push(0.0, 0, PhaseEnded(0, self._batches))


def simulate(scenario: Scenario, *, record: bool = False) -> Simulation:
    """Run the scenario's phase from its first micro-batch to its last."""
    world = _World(scenario, record=record)
    world.run(scenario.batches)
    return Simulation(
        rate=_steady_rate(world.finished, scenario),
        makespan=world.now,
        events=world.events,
        stages=tuple(stage.use(world.now) for stage in world.stages),
        timeline=tuple(world.timeline or ()),
    )


def steady_rate(scenario: Scenario, rounds: int = 2, breathe: Callable[[], None] | None = None) -> float:
    """The rate of a phase that goes on, whatever its ``batches``; cheaper than to simulate it all.

    ``breathe`` is called every half a millisecond or so: whoever simulates beside a thread that has
    better to do can let it have Python's lock.
    """
    first, period = _ramp(scenario), _period(scenario)
    # Sync repeats itself to the letter, unless its costs vary.
    least = period * (1 if scenario.schedule == "sync" else rounds)
    last = first + max(least, math.ceil(scenario.varieties / period) * period)
    world = _World(replace(scenario, batches=last + 2 * (period + scenario.window)), record=False)
    world.run(last + 1, breathe)
    return _rate(world.finished, first, last)


def _steady_rate(finished: Sequence[float], scenario: Scenario) -> float:
    """Between two micro-batches at the same place of the pattern; overall where there are too few."""
    first, period = _ramp(scenario), _period(scenario)
    # The last ones come back with no forward in between, and so too early.
    drain = 0 if scenario.schedule == "sync" else scenario.window
    rounds = (len(finished) - 1 - first - drain) // period
    if rounds < 1:
        return len(finished) / finished[-1] if finished[-1] else math.inf
    return _rate(finished, first, first + rounds * period)


def _rate(finished: Sequence[float], first: int, last: int) -> float:
    seconds = finished[last] - finished[first]
    return (last - first) / seconds if seconds > 0 else math.inf


def _ramp(scenario: Scenario) -> int:
    """The first micro-batch to measure from. The wave of the start dies down in some rounds."""
    return scenario.update_frequency - 1 if scenario.schedule == "sync" else 3 * _period(scenario)


def _period(scenario: Scenario) -> int:
    """After so many micro-batches the pattern repeats, or nearly so: what is under way comes back
    once, in whole updates.
    """
    if scenario.schedule == "sync":
        return scenario.update_frequency
    return math.ceil(scenario.window / scenario.update_frequency) * scenario.update_frequency


def grid(timeline: Sequence[Span], tick: float) -> str:
    """A row a stage, a column a tick: what each stage computes; dots where it waits.

    Computations of no duration are not shown.
    """
    stages = 1 + max(span.stage for span in timeline)
    columns = round(max(span.end for span in timeline) / tick)
    rows = [["."] * columns for _ in range(stages)]
    for span in timeline:
        for column in range(round(span.start / tick), round(span.end / tick)):
            rows[span.stage][column] = show([span.run])
    width = 1 + max(len(cell) for row in rows for cell in row)
    names = ["Root", *("Stem" for _ in range(stages - 2)), "Leaf"][:stages]
    return "\n".join(
        f"{name}  {''.join(cell.ljust(width) for cell in row).rstrip()}"
        for name, row in zip(names, rows, strict=True)
    )
