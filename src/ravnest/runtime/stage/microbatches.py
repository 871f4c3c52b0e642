"""The micro-batches that a stage has in hand: what is known of each, and what is computed with it.

The worker says what to compute and sends what comes of it; this knows neither links nor schedules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ravnest.errors import RunError
from ravnest.runtime.control.run_status import MicrobatchResult
from ravnest.runtime.schedule.events import Batch
from ravnest.runtime.stage.execution import Loss, StageExecution
from ravnest.runtime.stage.leaf import Leaf
from ravnest.split.structure import Structure, flatten, map_tensors
from ravnest.wire.messages import (
    Backward,
    Forward,
    ForwardResult,
    Message,
    MicrobatchId,
    PhaseBegin,
    PhaseEnd,
    PhaseKind,
    StageTiming,
    ValidationResult,
)

SHARED = "shared/"
"""Prefix of the weights that several stages use, among the values of a message."""


@dataclass
class Microbatch:
    """What is known of a micro-batch at this stage."""

    id: MicrobatchId
    size: int
    digests: dict[str, str]
    values: dict[str, Any]
    item: Any = None
    """What the Root loaded, where Root and Leaf are one node."""
    outputs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)
    answer: ForwardResult | None = None
    loss: float | None = None
    norms: tuple[tuple[int, float], ...] = ()
    timings: tuple[StageTiming, ...] = ()
    """Of the stages behind."""
    version: int = 0
    began: float = 0.0
    """When its forward started here."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0


class MicrobatchStore:
    """Micro-batches and phases of one stage. Used by one thread."""

    def __init__(self, execution: StageExecution, leaf: Leaf | None) -> None:
        """``leaf`` belongs to the last stage."""
        self.execution = execution
        self._leaf = leaf
        self._batches: dict[Batch, Microbatch] = {}
        self._phases: dict[int, PhaseBegin] = {}
        self._ends: dict[int, PhaseEnd] = {}
        self._lent = -1, -1
        """Version of the shared weights that the stages behind have, and the count of assignments."""
        self._losses: list[float] = []
        self._samples = 0
        self.last: Microbatch | None = None
        """The micro-batch whose backward was the last."""
        self.run = ""

    # What is known

    def begin(self, begin: PhaseBegin) -> None:
        """A phase has begun."""
        self.run = begin.run
        self._phases[begin.phase] = begin

    def end(self, end: PhaseEnd) -> None:
        """No further micro-batch belongs to a phase."""
        self._ends[end.phase] = end

    def phase(self, number: int) -> PhaseBegin:
        """A phase that is not over here."""
        return self._phases[number]

    def end_of(self, number: int) -> PhaseEnd:
        """The end of a phase that is not over here."""
        return self._ends[number]

    def add(self, held: Microbatch) -> Batch:
        """A micro-batch has arrived; ``RunError`` if it is of another run."""
        batch = self._known(held.id)
        self._batches[batch] = held
        return batch

    def returned(self, head: Backward, values: Mapping[str, Any]) -> Batch:
        """Gradients of a micro-batch have arrived."""
        batch = self._known(head.batch)
        held = self._held(batch)
        held.gradients = dict(values)
        held.loss, held.norms, held.timings = head.loss, head.norms, head.timings
        return batch

    def answered(self, head: ForwardResult, values: Mapping[str, Any]) -> Batch:
        """The Leaf's answer to a micro-batch has arrived."""
        batch = self._known(head.batch)
        held = self._held(batch)
        held.answer, held.outputs = head, dict(values)
        return batch

    def _known(self, batch: MicrobatchId) -> Batch:
        if batch.run != self.run:
            raise RunError(
                f"micro-batch {batch.index} belongs to run {batch.run[:8]}, not to {self.run[:8]}"
            )
        return Batch(batch.phase, batch.index)

    def _held(self, batch: Batch) -> Microbatch:
        if batch not in self._batches:
            raise RunError(
                f"micro-batch {batch.index} of phase {batch.phase} came back, but it was not sent"
            )
        return self._batches[batch]

    # What is computed

    def forward(self, batch: Batch, version: int, *, trains: bool) -> Microbatch:
        """Outputs of a micro-batch; at the Leaf its loss, or its answer."""
        held = self._batches[batch]
        held.version = version
        kind = self._phases[batch.phase].kind
        shared = _shared_in(held.values)
        self.execution.borrow(shared)
        item = self._item(kind, batch, held)
        if trains:
            loss_of = self._loss_of(item)
            outputs, held.loss = self.execution.forward(batch, version, held.values, loss_of)
        else:
            outputs, output = self.execution.evaluate(batch, version, held.values)
            if self._leaf is not None:
                held.answer, outputs = self._answer(self._leaf, kind, held.id, output, item)
        if self._leaf is None:
            outputs |= self._passed_on(shared, version)
        held.outputs, held.values = outputs, {}
        return held

    def backward(self, batch: Batch, *, with_norms: bool) -> Microbatch:
        """Gradients of a micro-batch, added up here and ready for the stage before."""
        held = self._batches[batch]
        shared = _shared_in(held.gradients)
        back = self.execution.backward(batch, held.gradients, shared)
        held.gradients = {**back.inputs, **{SHARED + k: g for k, g in back.shared.items()}}
        if with_norms:
            held.norms = (*self.execution.norms(), *held.norms)
        if held.loss is not None:
            self._losses.append(held.loss)
        self.last = held
        self._samples += held.size
        return held

    def take_samples(self) -> int:
        """Samples whose gradients were computed since the last call."""
        samples, self._samples = self._samples, 0
        return samples

    def step(self, count: int, clip: float | None) -> float | None:
        """Update the weights with the mean of ``count`` gradients; the mean of their losses."""
        self.execution.step(count, clip)
        losses, self._losses = self._losses[:count], self._losses[count:]
        return sum(losses) / len(losses) if losses else None

    def end_phase(self, number: int) -> ValidationResult | None:
        """The phase is over here; at the Leaf, the figure of a validation."""
        begin, end = self._phases.pop(number), self._ends.pop(number)
        if begin.kind == "train":
            self.execution.updates.end_epoch()
        if self._leaf is None:
            return None
        if end.count == 0:
            self._leaf.begin(begin.kind, loads=self.execution.index > 0)
        self._leaf.end(begin.kind, end.count, exhausted=end.exhausted)
        if begin.kind != "validate":
            return None
        score = self._leaf.score()
        return ValidationResult(begin.run, number, score.name, score.value, score.samples)

    def total_norm(self, count: int) -> float:
        """At the Root: the norm of the mean of ``count`` gradients, over all stages."""
        assert self.last is not None
        norms = torch.tensor([norm for _, norm in sorted(self.last.norms)])
        return float(torch.linalg.vector_norm(norms)) / count

    def _item(self, kind: PhaseKind, batch: Batch, held: Microbatch) -> Any:
        """What the loss compares with: the Leaf's labels, or in a cluster of one the Root's batch.

        Labels are iterated only once the phase before is used up, in the order of the Root.
        """
        if self._leaf is None or kind == "predict":
            return None
        own = held.item is not None
        if batch.index == 0:
            self._leaf.begin(kind, loads=not own)
        item = held.item if own else self._leaf.item(kind, batch.index, held.size, held.digests)
        return map_tensors(item, self.execution.to_device)

    def _loss_of(self, item: Any) -> Loss | None:
        leaf = self._leaf
        if leaf is None:
            return None
        return lambda outputs: leaf.loss(self.execution.output(outputs), item)

    def _passed_on(self, shared: Mapping[str, torch.Tensor], version: int) -> dict[str, Any]:
        """Weights that stages behind use too: those of stages before, and new values of our own."""
        last_users, index = self.execution.last_users, self.execution.index
        passed = {k: v for k, v in shared.items() if last_users.get(k, index + 1) > index}
        newest = version, self.execution.assignments
        if newest != self._lent:
            self._lent = newest
            passed |= self.execution.lend()
        return {SHARED + key: value for key, value in passed.items()}

    def _answer(
        self, leaf: Leaf, kind: PhaseKind, batch: MicrobatchId, output: Any, item: Any
    ) -> tuple[ForwardResult, dict[str, Any]]:
        if kind == "validate":
            return ForwardResult(batch, leaf.judge(output, item)), {}
        leaves, structure = flatten(output)
        values = {str(place): leaf for place, leaf in enumerate(leaves)}
        return ForwardResult(batch, None, json.dumps(structure.to_json())), values

    # What goes out

    def forward_message(self, batch: Batch) -> Message:
        """For the stage behind."""
        held = self._batches[batch]
        outputs, held.outputs = held.outputs, {}
        # Stages that share a weight must hold the same; its gradients may be compressed as any.
        exact = frozenset(name for name in outputs if name.startswith(SHARED))
        return Message(Forward(held.id, held.size, held.digests), outputs, exact)

    def backward_message(self, batch: Batch, timings: tuple[StageTiming, ...]) -> Message:
        """For the stage before; the micro-batch leaves the desk."""
        held = self._batches.pop(batch)
        return Message(Backward(held.id, timings, held.loss, held.norms), held.gradients)

    def outcome_message(self, batch: Batch) -> Message:
        """For the stage before; the micro-batch leaves the desk."""
        held = self._batches.pop(batch)
        assert held.answer is not None
        return Message(held.answer, held.outputs)

    def look(self, batch: Batch) -> Microbatch:
        """A micro-batch on the desk."""
        return self._batches[batch]

    def finished(self, batch: Batch) -> MicrobatchResult | None:
        """At the Root, a micro-batch is done with; the Leaf's answer, without gradients."""
        held = self._batches.pop(batch)
        if held.answer is None:
            return None
        return MicrobatchResult(_rebuild(held.answer, held.outputs), held.answer.value)


def _shared_in(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Take the weights that several stages use out of a message's values."""
    names = [name for name in values if name.startswith(SHARED)]
    return {name.removeprefix(SHARED): values.pop(name) for name in names}


def _rebuild(answer: ForwardResult, values: Mapping[str, Any]) -> Any:
    if not answer.structure:
        return None
    structure = Structure.from_json(json.loads(answer.structure))
    return structure.build(iter([values[str(place)] for place in range(len(values))]))
