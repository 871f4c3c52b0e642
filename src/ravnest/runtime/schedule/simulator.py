"""Simulation of a pipeline: the schedule machines under virtual time, with costs instead of tensors.

Predicts the rate of a pipeline, the staleness of its gradients and the number of weight versions that
each stage keeps. A link delays each message, and while it transfers one, the next ones wait.
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
    ClipNormArrived,
    CombineNorms,
    Done,
    Event,
    Fail,
    Finished,
    ForwardArrived,
    FreeVersion,
    NormsArrived,
    PhaseBegun,
    PhaseEnded,
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
)
from ravnest.runtime.schedule.machine import ScheduleMachine
from ravnest.runtime.schedule.notation import format_runs
from ravnest.runtime.schedule.progress import StageTraits
from ravnest.types import MicrobatchId, Schedule

DONE = Done()
_PAUSE_EVENTS = 50
"""Events between two calls of ``pause``; an event takes about 10 microseconds."""


@dataclass(frozen=True)
class StageCost:
    """Compute time of a stage, in seconds: forward, backward, update, deferred weight gradients."""

    forward: float
    backward: float
    """Time until the gradients of the inputs can be sent; without deferral, of the whole backward."""
    step: float = 0.0
    weights: float = 0.0
    deferring: StageCost | None = None
    """Cost of a micro-batch that defers costly weight gradients too; None if the stage has none."""

    @property
    def microbatch(self) -> float:
        """Compute time for one micro-batch, without its share of the update."""
        return self.forward + self.backward + self.weights


Costs = StageCost | tuple[StageCost, ...]
"""Cost of a stage: the same for every micro-batch, or a series of measured costs that repeats."""


def each_cost(costs: Costs) -> tuple[StageCost, ...]:
    """Return ``costs`` as a tuple, also if it is a single cost."""
    return (costs,) if isinstance(costs, StageCost) else costs


@dataclass(frozen=True)
class LinkCost:
    """Delay of an idle link between two stages in each direction, in seconds."""

    forward: float
    backward: float
    forward_busy: float = 0.0
    """Part of the delay during which the link is occupied: the time of the transfer."""
    backward_busy: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """A pipeline and the training phase to simulate; the user submits micro-batches without delay."""

    costs: tuple[Costs, ...]
    links: tuple[LinkCost, ...]
    """Links between neighbouring stages; one fewer than stages."""
    window: int
    update_size: int = 1
    """Micro-batches in an update."""
    schedule: Schedule = "async"
    microbatches: int = 100
    clip: bool = False
    """Updates wait for the norm of all stages' gradients."""
    activation_limits: tuple[int, ...] | None = None
    """Maximum number of micro-batches for which each stage keeps activations; None means no limit."""

    def __post_init__(self) -> None:
        limits = self.activation_limits
        assert self.costs, "a pipeline needs stages"
        assert len(self.links) == len(self.costs) - 1, "one link between each two stages"
        assert limits is None or len(limits) == len(self.costs), "one limit per stage"
        assert self.microbatches >= 1, "a phase to simulate needs micro-batches"

    @property
    def cost_period(self) -> int:
        """Number of micro-batches after which measured costs repeat; 1 if they are constant."""
        return max(len(each_cost(cost)) for cost in self.costs)


@dataclass(frozen=True)
class StageUsage:
    """Predicted use of one stage."""

    utilisation: float
    """Share of the makespan during which the stage computes."""
    mean_staleness: float
    """Mean number of updates between the forward of a micro-batch and the update it is part of."""
    max_staleness: int
    peak_versions: int
    """Maximum number of weight versions kept at once, including the newest."""
    peak_in_flight: int
    """Maximum number of micro-batches whose activations were kept at once."""


@dataclass(frozen=True)
class Span:
    """A computation with its start and end."""

    stage: int
    start: float
    end: float
    run: Run


@dataclass(frozen=True)
class Simulation:
    """Prediction for a scenario."""

    rate: float
    """Micro-batches per second, without ramp-up and drain."""
    makespan: float
    events: int
    stages: tuple[StageUsage, ...]
    timeline: tuple[Span, ...] = ()
    """Computations in order of their start; empty unless requested."""


@dataclass
class _LinkDirection:
    """One direction of a link."""

    delay: float
    busy: float
    free: float = 0.0
    """Time at which the next message can enter."""

    def send(self, now: float) -> float:
        """Return the seconds until a message sent now arrives."""
        start = max(now, self.free)
        self.free = start + self.busy
        return start - now + self.delay

    def send_empty(self, now: float) -> float:
        """Return the seconds until a message without tensors arrives, in order with earlier ones."""
        return max(self.free - now, 0.0) + self.delay


@dataclass
class _Stage:
    machine: ScheduleMachine
    costs: tuple[StageCost, ...]
    to_next: _LinkDirection
    to_previous: _LinkDirection
    busy: float = 0.0
    stalenesses: list[int] = field(default_factory=list)
    versions: int = 1
    peak_versions: int = 1
    peak_in_flight: int = 0
    deferring: set[int] = field(default_factory=set)
    """Numbers of the micro-batches whose costly weight gradients are deferred and not yet computed."""

    def cost(self, number: int) -> StageCost:
        """Return the cost of the micro-batch or update with this number."""
        cost = self.costs[number % len(self.costs)]
        return cost.deferring or cost if number in self.deferring else cost

    def usage(self, makespan: float) -> StageUsage:
        return StageUsage(
            utilisation=self.busy / makespan if makespan else 0.0,
            mean_staleness=math.fsum(self.stalenesses) / max(1, len(self.stalenesses)),
            max_staleness=max(self.stalenesses, default=0),
            peak_versions=self.peak_versions,
            peak_in_flight=self.peak_in_flight,
        )


Observe = Callable[[float, int, Action], None]
"""Function that is called with the time, the stage and each action, before it is carried out."""


class _Simulator:
    """Schedule machines of all stages and a queue of future events."""

    def __init__(self, scenario: Scenario, *, record: bool, observe: Observe | None = None) -> None:
        count = len(scenario.costs)
        links, none = scenario.links, _LinkDirection(0.0, 0.0)
        to_next = [*(_LinkDirection(link.forward, link.forward_busy) for link in links), none]
        to_previous = [none, *(_LinkDirection(link.backward, link.backward_busy) for link in links)]
        limits = scenario.activation_limits
        self.stages = [
            _Stage(
                ScheduleMachine(
                    position,
                    count,
                    schedule=scenario.schedule,
                    window=scenario.window,
                    traits=StageTraits(
                        defers=position > 0 and any(c.weights for c in each_cost(cost)),
                        may_defer_costly=position > 0
                        and scenario.schedule == "sync"
                        and any(c.deferring is not None for c in each_cost(cost)),
                        clip=scenario.clip,
                        activation_limit=limits[position] if limits else None,
                    ),
                ),
                each_cost(cost),
                to_next[position],
                to_previous[position],
            )
            for position, cost in enumerate(scenario.costs)
        ]
        self.now = 0.0
        self.finished: list[float] = []
        self.timeline: list[Span] | None = [] if record else None
        self.events = 0
        self._observe = observe
        self._heap: list[tuple[float, int, int, Event]] = []
        self._pushed = 0
        self._microbatches = scenario.microbatches
        self._update_size = scenario.update_size
        self._submitted = 0

    def run(self, until: int, pause: Callable[[], None] | None = None) -> None:
        """Run until ``until`` micro-batches have returned; if these are all, until no event is left.

        ``pause`` is called regularly.
        """
        self._push(0.0, 0, PhaseBegun(0, True))
        heap, stages, pop = self._heap, self.stages, heapq.heappop
        while heap and (len(self.finished) < until or until == self._microbatches):
            self.now, _, position, event = pop(heap)
            self.events += 1
            if pause is not None and self.events % _PAUSE_EVENTS == 0:
                pause()
            stage = stages[position]
            for action in stage.machine.handle(event, self.now):
                if self._observe is not None:
                    self._observe(self.now, position, action)
                self._carry_out(position, stage, action)
        if len(self.finished) < until:
            raise AssertionError(f"{len(self.finished)} of {until} micro-batches returned")

    def _push(self, delay: float, position: int, event: Event) -> None:
        # The count keeps simultaneous events in the order in which they were created.
        self._pushed += 1
        heapq.heappush(self._heap, (self.now + delay, self._pushed, position, event))

    def _carry_out(self, position: int, stage: _Stage, action: Action) -> None:  # noqa: C901 - one case per action
        match action:
            case RunForward() | RunBackward() | RunWeights() | RunStep() | RunPhaseEnd():
                self._compute(position, stage, action)
            case SendForward(microbatch):
                self._push(stage.to_next.send(self.now), position + 1, self._forward(microbatch))
            case SendBackward(microbatch):
                self._push(stage.to_previous.send(self.now), position - 1, BackwardArrived(microbatch))
            case FreeVersion():
                stage.versions -= 1
            case Finished():
                self.finished.append(self.now)
            case Admit(total):
                self._submit(total)
            case SendPhaseBegin(phase, trains):
                self._push(stage.to_next.send_empty(self.now), position + 1, PhaseBegun(phase, trains))
            case SendPhaseEnd(phase, count):
                self._push(stage.to_next.send_empty(self.now), position + 1, PhaseEnded(phase, count))
            case SendNorms(update):
                self._push(stage.to_previous.send_empty(self.now), position - 1, NormsArrived(update))
            case CombineNorms(update):
                self._push(0.0, position, ClipNormArrived(update))
            case SendClipNorm(update):
                self._push(stage.to_next.send_empty(self.now), position + 1, ClipNormArrived(update))
            case Fail(reason):
                raise AssertionError(reason)

    def _forward(self, microbatch: MicrobatchId) -> ForwardArrived:
        last = (microbatch.index + 1) % self._update_size == 0
        return ForwardArrived(microbatch, ends_batch=last, ends_update=last)

    def _compute(self, position: int, stage: _Stage, run: Run) -> None:
        seconds = 0.0
        if isinstance(run, RunForward | RunBackward | RunWeights):
            # An update changes the weights in place if no micro-batch uses them any more.
            stage.peak_versions = max(stage.peak_versions, stage.versions)
        match run:
            case RunForward(microbatch):
                if run.defers_costly:
                    stage.deferring.add(microbatch.index)
                seconds = stage.cost(microbatch.index).forward
                stage.peak_in_flight = max(stage.peak_in_flight, stage.machine.held)
            case RunBackward(microbatch, version):
                cost = stage.cost(microbatch.index)
                later = stage.machine.traits.defers or microbatch.index in stage.deferring
                seconds = cost.backward + (0.0 if later else cost.weights)
                stage.stalenesses.append(stage.machine.version - version)
            case RunWeights(microbatch):
                seconds = stage.cost(microbatch.index).weights
                stage.deferring.discard(microbatch.index)
            case RunStep(update):
                seconds = stage.costs[update % len(stage.costs)].step
                stage.versions += 1
        stage.busy += seconds
        self._push(seconds, position, DONE)
        if self.timeline is not None:
            self.timeline.append(Span(position, self.now, self.now + seconds, run))

    def _submit(self, admitted: int) -> None:
        while self._submitted < min(admitted, self._microbatches):
            self._push(0.0, 0, self._forward(MicrobatchId(0, self._submitted)))
            self._submitted += 1
            if self._submitted == self._microbatches:
                self._push(0.0, 0, PhaseEnded(0, self._microbatches))


def simulate(scenario: Scenario, *, record: bool = False, observe: Observe | None = None) -> Simulation:
    """Simulate the whole phase of a scenario; ``record`` keeps the timeline.

    An action is observed after everything that it depends on, so that ``observe`` can carry out real
    computations in the order of the schedule.
    """
    simulator = _Simulator(scenario, record=record, observe=observe)
    simulator.run(scenario.microbatches)
    return Simulation(
        rate=_measured_rate(simulator.finished, scenario),
        makespan=simulator.now,
        events=simulator.events,
        stages=tuple(stage.usage(simulator.now) for stage in simulator.stages),
        timeline=tuple(simulator.timeline or ()),
    )


def steady_rate(scenario: Scenario, rounds: int = 2, pause: Callable[[], None] | None = None) -> float:
    """Return the rate of an endless phase; ``scenario.microbatches`` is ignored.

    Cheaper than simulating a whole phase. ``pause`` is called about every half a millisecond: a caller
    that simulates in a background thread can release Python's lock there.
    """
    first, period = _ramp(scenario), _period(scenario)
    least = period * rounds
    last = first + max(least, math.ceil(scenario.cost_period / period) * period)
    count = last + 2 * (period + scenario.window)
    simulator = _Simulator(replace(scenario, microbatches=count), record=False)
    simulator.run(last + 1, pause)
    return _rate(simulator.finished, first, last)


def _measured_rate(finished: Sequence[float], scenario: Scenario) -> float:
    """Return the rate between two equal positions of the repeating pattern.

    If the phase is too short for that, return the overall rate.
    """
    first, period = _ramp(scenario), _period(scenario)
    # During the drain no forwards run in between, so the last micro-batches return too early.
    drain = max(scenario.window, scenario.update_size)
    rounds = (len(finished) - 1 - first - drain) // period
    if rounds < 1:
        return len(finished) / finished[-1] if finished[-1] else math.inf
    return _rate(finished, first, first + rounds * period)


def _rate(finished: Sequence[float], first: int, last: int) -> float:
    seconds = finished[last] - finished[first]
    return (last - first) / seconds if seconds > 0 else math.inf


def _ramp(scenario: Scenario) -> int:
    """Return the first micro-batch to measure from: the start-up burst decays in a few periods."""
    return max(2, math.ceil(3 * scenario.window / _period(scenario))) * _period(scenario) - 1


def _period(scenario: Scenario) -> int:
    """Return the number of micro-batches after which the pattern (nearly) repeats.

    That is an update, or a window if that is larger, rounded up to whole updates.
    """
    if scenario.schedule == "sync":
        return scenario.update_size
    return math.ceil(scenario.window / scenario.update_size) * scenario.update_size


def grid(timeline: Sequence[Span], tick: float) -> str:
    """Return the timeline as text: one row per stage, one column per tick, dots for idle time.

    Computations of zero duration are left out.
    """
    stages = 1 + max(span.stage for span in timeline)
    columns = round(max(span.end for span in timeline) / tick)
    rows = [["."] * columns for _ in range(stages)]
    for span in timeline:
        for column in range(round(span.start / tick), round(span.end / tick)):
            rows[span.stage][column] = format_runs([span.run])
    width = 1 + max(len(cell) for row in rows for cell in row)
    names = ["Root", *("Stem" for _ in range(stages - 2)), "Leaf"][:stages]
    return "\n".join(
        f"{name}  {''.join(cell.ljust(width) for cell in row).rstrip()}"
        for name, row in zip(names, rows, strict=True)
    )
