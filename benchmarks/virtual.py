"""Training under virtual time: machines and stages of real nodes, in one thread, in a fixed order.

The order of computations and the weight versions are decided by the same code as in a real run
(``ScheduleMachine``, ``StageExecution``); threads and links are replaced by a queue of events. A run
therefore costs only its computations and is deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    RunBackward,
    RunForward,
    RunPhaseEnd,
    RunStep,
    SendBackward,
    SendForward,
    SendPhaseBegin,
    SendPhaseEnd,
)
from ravnest.runtime.schedule.machine import Schedule, ScheduleMachine
from ravnest.runtime.schedule.simulator import LinkCost, StageCost
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.split.module import StageModule
from ravnest.types import MicrobatchId

Samples = Iterable[tuple[torch.Tensor, Any]]
LossOf = Callable[[Any, Any], torch.Tensor]
Carry = Callable[[int, int, dict[str, Any]], dict[str, Any]]
"""Brings values from one stage to another: from, to, values."""


class VirtualPipeline:
    """Stages that train as a cluster would; one phase."""

    def __init__(
        self,
        modules: Sequence[StageModule],
        rule: UpdateRule,
        loss_of: LossOf,
        *,
        schedule: Schedule,
        window: int,
        cost: StageCost,
        link: LinkCost,
        update_frequency: int = 1,
        carry: Carry = lambda _from, _to, values: values,
    ) -> None:
        """All stages cost the same, as do all links. No weights may be shared between stages."""
        count = len(modules)
        self._executions = [
            StageExecution(module, rule, seed=0, stash=schedule == "async" and module is not modules[-1])
            for module in modules
        ]
        self._machines = [
            ScheduleMachine(
                position,
                count,
                schedule=schedule,
                window=window,
                update_frequency=update_frequency,
            )
            for position in range(count)
        ]
        self._loss_of = loss_of
        self._carry = carry
        self._cost = cost
        self._link = link
        self._now = 0.0
        self._heap: list[tuple[float, int, int, Event]] = []
        self._pushed = 0
        self._values: dict[tuple[int, MicrobatchId], dict[str, Any]] = {}
        self._targets: dict[MicrobatchId, Any] = {}
        self._samples: Iterator[tuple[torch.Tensor, Any]] = iter(())
        self._submitted = 0
        self._ended = False
        self.losses: list[float] = []
        """Of each micro-batch, in order."""
        self.stalenesses: list[int] = []
        """Of each micro-batch, at the Root."""

    def train(self, samples: Samples) -> None:
        """Train on all micro-batches: pairs of the model's one input and targets."""
        self._samples = iter(samples)
        self._push(0.0, 0, PhaseBegun(0, True))
        while self._heap:
            self._now, _, position, event = heapq.heappop(self._heap)
            for action in self._machines[position].handle(event, self._now):
                self._carry_out(position, action)

    def _push(self, delay: float, position: int, event: Event) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (self._now + delay, self._pushed, position, event))

    def _carry_out(self, position: int, action: Action) -> None:  # noqa: C901, PLR0912 - one case an action
        link = self._link
        match action:
            case RunForward(batch, version):
                self._forward(position, batch, version)
                self._push(self._cost.forward, position, Done())
            case RunBackward(batch, version):
                self._backward(position, batch, version)
                self._push(self._cost.backward, position, Done())
            case RunStep(_, count):
                self._executions[position].updates.step(count)
                self._push(self._cost.step, position, Done())
            case RunPhaseEnd():
                self._executions[position].updates.end_epoch()
                self._push(0.0, position, Done())
            case SendForward(batch):
                self._push(link.forward, position + 1, ForwardArrived(batch))
            case SendBackward(batch):
                self._push(link.backward, position - 1, BackwardArrived(batch))
            case SendPhaseBegin(phase, trains):
                self._push(link.forward, position + 1, PhaseBegun(phase, trains))
            case SendPhaseEnd(phase, count):
                self._push(link.forward, position + 1, PhaseEnded(phase, count))
            case FreeVersion(version):
                self._executions[position].free(version)
            case Admit(total):
                self._submit(total)
            case Finished():
                pass
            case Fail(reason):
                raise AssertionError(reason)
            case _:
                raise AssertionError(f"{action} has no place here")

    def _submit(self, admitted: int) -> None:
        while self._submitted < admitted and not self._ended:
            item = next(self._samples, None)
            if item is None:
                self._ended = True
                self._push(0.0, 0, PhaseEnded(0, self._submitted))
                return
            batch = MicrobatchId(0, self._submitted)
            (spec,) = self._executions[0].module.graph.inputs
            self._values[0, batch] = {spec.name: item[0]}
            self._targets[batch] = item[1]
            self._push(0.0, 0, ForwardArrived(batch))
            self._submitted += 1

    def _forward(self, position: int, batch: MicrobatchId, version: int) -> None:
        execution = self._executions[position]
        last = position == len(self._executions) - 1
        targets = self._targets.pop(batch) if last else None
        outputs, loss = execution.forward(
            batch,
            version,
            self._values.pop((position, batch)),
            (lambda o: self._loss_of(execution.output(o), targets)) if last else None,
        )
        if loss is None:
            self._values[position + 1, batch] = self._carry(position, position + 1, outputs)
        else:
            self.losses.append(loss)

    def _backward(self, position: int, batch: MicrobatchId, version: int) -> None:
        if position == 0:
            self.stalenesses.append(self._machines[0].version - version)
        gradients = self._values.pop((position, batch), {})
        back = self._executions[position].backward(batch, gradients, {})
        if position:
            self._values[position - 1, batch] = self._carry(position, position - 1, dict(back.inputs))
