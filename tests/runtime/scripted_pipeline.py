"""Real stages and schedule machines without threads: the test decides what happens next."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ravnest.runtime.schedule.events import (
    Action,
    Admit,
    BackwardArrived,
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
    RunStep,
    RunWeights,
    SendBackward,
    SendForward,
    SendPhaseBegin,
    SendPhaseEnd,
    WeightsInterrupted,
)
from ravnest.runtime.schedule.machine import ScheduleMachine
from ravnest.runtime.stage.execution import LossPart, StageExecution
from ravnest.types import MicrobatchId


@dataclass
class _Stage:
    machine: ScheduleMachine
    execution: StageExecution
    inbox: deque[Event] = field(default_factory=deque)
    running: Run | None = None
    values: dict[MicrobatchId, Mapping[str, Any]] = field(default_factory=dict)
    """Inputs that arrived, then outputs to send."""
    gradients: dict[MicrobatchId, Mapping[str, Any]] = field(default_factory=dict)


class ScriptedPipeline:
    """Pipeline that trains one phase; a random order decides which stage goes on."""

    def __init__(
        self,
        machines: Sequence[ScheduleMachine],
        executions: Sequence[StageExecution],
        data: Sequence[tuple[dict[str, Any], torch.Tensor]],
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        update_size: int = 1,
        interrupts: bool = False,
    ) -> None:
        """``data``: the first stage's values and the targets of each micro-batch.

        Each micro-batch is a batch of its own; ``update_size`` of them are an update. ``interrupts``:
        what has arrived interrupts weight gradients, as in a worker.
        """
        self._interrupts = interrupts
        self._stages = [_Stage(m, e) for m, e in zip(machines, executions, strict=True)]
        self._data = data
        self._loss = loss
        self._update_size = update_size
        self._submitted = 0
        self.runs: list[tuple[int, Run]] = []
        """Stage and computation, in the order in which they were done."""
        self.stale = 0
        """Backwards that an update had overtaken."""
        self.versions = [0] * len(self._stages)
        """Maximum number of copies of the weights at each stage."""

    def train(self, order: random.Random) -> None:
        """Run the phase to its end."""
        self._handle(0, PhaseBegun(0, trains=True))
        while choices := [
            (at, compute)
            for at, stage in enumerate(self._stages)
            for compute in (True, False)
            if (stage.running if compute else stage.inbox)
        ]:
            at, compute = order.choice(choices)
            if compute:
                self._compute(at)
            else:
                self._handle(at, self._stages[at].inbox.popleft())

    def _handle(self, at: int, event: Event) -> None:
        for action in self._stages[at].machine.handle(event, 0.0):
            self._perform(at, action)

    def _perform(self, at: int, action: Action) -> None:
        stage = self._stages[at]
        match action:
            case SendForward(microbatch):
                self._stages[at + 1].values[microbatch] = stage.values.pop(microbatch)
                self._stages[at + 1].inbox.append(self._arrival(microbatch))
            case SendBackward(microbatch):
                self._stages[at - 1].gradients[microbatch] = stage.gradients.pop(microbatch)
                self._stages[at - 1].inbox.append(BackwardArrived(microbatch))
            case SendPhaseBegin(phase, trains):
                self._stages[at + 1].inbox.append(PhaseBegun(phase, trains))
            case SendPhaseEnd(phase, count):
                self._stages[at + 1].inbox.append(PhaseEnded(phase, count))
            case FreeVersion(version):
                stage.execution.free(version)
            case Admit(total):
                self._submit(total)
            case Finished():
                pass
            case Fail(reason):
                raise AssertionError(reason)
            case run:
                stage.running = run  # type: ignore[assignment]

    def _arrival(self, microbatch: MicrobatchId) -> ForwardArrived:
        return ForwardArrived(microbatch, ends_update=(microbatch.index + 1) % self._update_size == 0)

    def _submit(self, total: int) -> None:
        root = self._stages[0]
        for number in range(self._submitted, min(total, len(self._data))):
            root.values[MicrobatchId(0, number)] = self._data[number][0]
            root.inbox.append(self._arrival(MicrobatchId(0, number)))
            if number + 1 == len(self._data):
                root.inbox.append(PhaseEnded(0, len(self._data)))
        self._submitted = max(self._submitted, min(total, len(self._data)))

    def _compute(self, at: int) -> None:
        stage = self._stages[at]
        run, stage.running = stage.running, None
        assert run is not None
        execution = stage.execution
        done: Event = Done()
        match run:
            case RunForward(microbatch, version, _, update):
                targets = self._data[microbatch.index][1]
                last = at == len(self._stages) - 1
                part = LossPart(lambda outputs: self._loss(outputs[0], targets)) if last else None
                values = stage.values.pop(microbatch)
                outputs, _ = execution.forward(microbatch, version, values, part, late=update > version)
                if not last:
                    stage.values[microbatch] = outputs
            case RunBackward(microbatch, version):
                self.stale += version != stage.machine.version
                back = execution.backward(microbatch, stage.gradients.pop(microbatch, {}))
                if at:
                    stage.gradients[microbatch] = back
            case RunWeights(microbatch):
                has_arrived = self._interrupts and bool(stage.inbox)
                if not execution.weight_gradients(microbatch, lambda: has_arrived):
                    done = WeightsInterrupted()
            case RunStep(_, batches):
                execution.step(batches)
        if isinstance(done, Done):
            self.runs.append((at, run))
        self.versions[at] = max(self.versions[at], execution.versions)
        self._handle(at, done)
