"""Micro-batches of one stage: their state and the computations on them.

The worker decides what to compute and sends the results; this module knows neither links nor schedules.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ravnest.errors import RunError
from ravnest.runtime.batch_parts import part_sizes
from ravnest.runtime.control.run_status import MicrobatchResult
from ravnest.runtime.random_state import RandomState
from ravnest.runtime.stage.execution import LossPart, StageExecution
from ravnest.runtime.stage.leaf import LabelChunk, LabelPart, Leaf
from ravnest.runtime.stage.loss_chunks import LossChunk
from ravnest.split.structure import Structure, flatten, map_tensors
from ravnest.types import MicrobatchId
from ravnest.wire.messages import (
    Backward,
    Forward,
    ForwardResult,
    GradientNorms,
    Message,
    PhaseBegin,
    PhaseEnd,
    PhaseKind,
    SharedWeights,
    StageTiming,
    ValidationResult,
)

SHARED = "shared/"
"""Prefix of the names of weights that several stages use, in a message."""


@dataclass(frozen=True)
class RootCut:
    """Position of the Root's data at a checkpoint."""

    epoch: int
    batches: int
    """Batches of the open phase that are part of the checkpoint."""
    microbatches: int
    samples: int
    data: str
    """Digest of those batches as they were loaded."""
    random: RandomState | None
    """State of the generators when the iteration of the phase's loader began, or at the end of it."""
    ended: bool = False
    """The last phase is the end of training."""


@dataclass
class Microbatch:
    """State of a micro-batch at this stage."""

    id: MicrobatchId
    batch_size: int
    """Number of samples in the user's batch."""
    values: dict[str, Any]
    """Inputs of the stage, until the forward."""
    part: int = 0
    """Position in the user's batch."""
    parts: int = 1
    """Micro-batches in the user's batch."""
    ends_update: bool = True
    """True for the last micro-batch of an update."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of the batch as the Root loaded it, with its first part."""
    item: Any = None
    """Batch as loaded at the Root, with its first part, if the node is both Root and Leaf."""
    checkpoint: bool = False
    """A checkpoint is taken after the update that the micro-batch ends."""
    cut: RootCut | None = None
    """Position of the data after the micro-batch, with ``checkpoint``; at the Root."""
    outputs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)
    result: ForwardResult | None = None
    """Result of the Leaf, in a phase without gradients."""
    loss: float | None = None
    """Loss times its weight in the loss of the batch."""
    timings: tuple[StageTiming, ...] = ()
    """Timings of the following stages."""
    version: int = 0
    """Version of the weights that the forward used."""
    costly: bool = False
    """Weight gradients whose deferral takes additional time are deferred too."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0

    @property
    def size(self) -> int:
        """Number of samples."""
        return part_sizes(self.batch_size, self.parts)[self.part]

    @property
    def ends_batch(self) -> bool:
        """True for the last micro-batch of a batch."""
        return self.part == self.parts - 1


class MicrobatchStore:
    """Micro-batches and phases of one stage. Used by one thread."""

    def __init__(self, execution: StageExecution, leaf: Leaf | None) -> None:
        """``leaf`` is given at the last stage only."""
        self.execution = execution
        self._leaf = leaf
        self._microbatches: dict[MicrobatchId, Microbatch] = {}
        self._begins: dict[int, PhaseBegin] = {}
        self._ends: dict[int, PhaseEnd] = {}
        self._cuts: dict[int, RootCut] = {}
        """Positions of the data at the ends of phases that a checkpoint follows; at the Root."""
        self._shared_version = -1, -1, False, False
        """Version in which shared weights were last sent to the following stages, the number of
        assignments until then, and whether they were predicted, or moving averages."""
        self._labels: list[LabelPart] = []
        """Labels of the batch in progress, by part; at the Leaf."""
        self._loss: float | None = None
        """Sum of the losses of the update in progress."""
        self._norms: dict[int, tuple[tuple[int, float], ...]] = {}
        """Gradient norms of the later stages, by update."""
        self._shared: dict[int, dict[str, torch.Tensor]] = {}
        """Gradients that later stages found for weights held here, by update."""
        self._weights: dict[tuple[str, MicrobatchId], dict[str, Any]] = {}
        """New weights of earlier stages, by run and by the micro-batch that uses them first."""
        self._samples = 0
        self.last: Microbatch | None = None
        """Micro-batch of the most recent backward."""
        self.run = ""

    # Phases and arrivals

    def begin_phase(self, begin: PhaseBegin) -> None:
        """Register a phase that begins."""
        self.run = begin.run
        self._begins[begin.phase] = begin
        if begin.first and self._leaf is not None:
            loads = self.execution.index > 0
            self._leaf.begin(begin.kind, begin.epoch, loads=loads)
            if loads:
                self._leaf.skip(begin.kind, begin.batches, begin.samples)

    def end_phase(self, end: PhaseEnd, cut: RootCut | None = None) -> None:
        """Register the end of a phase: all its micro-batches have arrived."""
        self._ends[end.phase] = end
        if cut is not None:
            self._cuts[end.phase] = cut

    def progress(self, cut: RootCut | None, *, between_phases: bool) -> dict[str, Any]:
        """Return the position of the data that this node loads, for a checkpoint."""
        leaf = None if self._leaf is None else self._leaf.random_state(between_phases=between_phases)
        return {"root": None if cut is None else asdict(cut), "leaf": leaf}

    def take_cut(self, phase: int) -> RootCut | None:
        """Return the position of the data after a phase; None on nodes other than the Root."""
        return self._cuts.pop(phase, None)

    def phase_begin(self, number: int) -> PhaseBegin:
        """Return the begin message of a phase that is not over here."""
        return self._begins[number]

    def phase_end(self, number: int) -> PhaseEnd:
        """Return the end message of a phase that is not over here."""
        return self._ends[number]

    def check_run(self, run: str) -> None:
        """Raise ``RunError`` if a message belongs to another run."""
        if run != self.run:
            raise RunError(f"a message of run {run[:8]} arrived, but this is run {self.run[:8]}")

    def add(self, microbatch: Microbatch) -> None:
        """Store a micro-batch that has arrived, with the shared weights that arrived before it."""
        weights = self._weights.pop((self.run, microbatch.id), {})
        microbatch.values |= {SHARED + key: weight for key, weight in weights.items()}
        self._microbatches[microbatch.id] = microbatch

    def add_weights(self, head: SharedWeights, weights: Mapping[str, Any]) -> None:
        """Keep new values of weights that earlier stages own, for a micro-batch that arrives later.

        Stages in between pass them on at once, so that they may arrive before the begin of the phase.
        """
        self._weights.setdefault((head.run, head.microbatch), {}).update(weights)

    def add_gradients(self, head: Backward, values: Mapping[str, Any]) -> MicrobatchId:
        """Store gradients of a micro-batch that have arrived and return its id."""
        microbatch = self._returned(head.microbatch)
        microbatch.gradients = dict(values)
        microbatch.loss, microbatch.timings = head.loss, head.timings
        return head.microbatch

    def add_result(self, head: ForwardResult, values: Mapping[str, Any]) -> MicrobatchId:
        """Store the Leaf's result for a micro-batch and return its id."""
        microbatch = self._returned(head.microbatch)
        microbatch.result, microbatch.outputs = head, dict(values)
        return head.microbatch

    def get(self, microbatch_id: MicrobatchId) -> Microbatch:
        """Return a micro-batch that is in flight here."""
        return self._microbatches[microbatch_id]

    def _returned(self, microbatch_id: MicrobatchId) -> Microbatch:
        if microbatch_id not in self._microbatches:
            raise RunError(f"{microbatch_id} came back, but it was not sent")
        return self._microbatches[microbatch_id]

    # Computations

    def forward(
        self,
        microbatch_id: MicrobatchId,
        version: int,
        *,
        trains: bool,
        late: bool = False,
        costly: bool = False,
    ) -> Microbatch:
        """Compute the outputs of a micro-batch; at the Leaf also its loss or result.

        ``late``: another update comes before the one that the gradient is part of. ``costly``: weight
        gradients whose deferral takes additional time are deferred too.
        """
        microbatch = self._microbatches[microbatch_id]
        microbatch.version, microbatch.costly = version, costly
        kind = self._begins[microbatch_id.phase].kind
        shared = _pop_shared(microbatch.values)
        self.execution.update_replicas(shared)
        item = self._item(kind, microbatch)
        if trains:
            part = self._loss_part(item, microbatch)
            outputs, loss = self.execution.forward(
                microbatch_id, version, microbatch.values, part, late=late, costly=costly
            )
            if loss is not None and part is not None:
                microbatch.loss = loss * part.weight if part.weight else 0.0
        elif self._leaf is not None and kind == "validate":
            outputs, microbatch.result = {}, self._validate(self._leaf, microbatch, item.item)
        else:
            outputs, output = self.execution.evaluate(microbatch_id, microbatch.values)
            if self._leaf is not None:
                microbatch.result, outputs = self._result(microbatch_id, output)
        if self._leaf is None:
            outputs |= self._shared_for_next(shared, version, trains=trains)
        microbatch.outputs, microbatch.values = outputs, {}
        return microbatch

    def backward(self, microbatch_id: MicrobatchId) -> Microbatch:
        """Compute the gradients for the previous stage and those that are not deferred."""
        microbatch = self._microbatches[microbatch_id]
        microbatch.gradients = dict(self.execution.backward(microbatch_id, microbatch.gradients))
        if microbatch.loss is not None:
            self._loss = microbatch.loss + (self._loss or 0.0)
        self.last = microbatch
        self._samples += microbatch.size
        return microbatch

    def add_shared(self, update: int, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Keep the gradients of weights that this stage holds; return the others, to be passed on."""
        held = self.execution.shared_from_next
        kept = self._shared.setdefault(update, {})
        kept |= {key: gradient for key, gradient in gradients.items() if key in held}
        return {key: gradient for key, gradient in gradients.items() if key not in held}

    def has_shared(self, update: int) -> bool:
        """Return whether all gradients that later stages send for an update have arrived."""
        return self._shared.get(update, {}).keys() == self.execution.shared_from_next

    def add_norms(self, head: GradientNorms) -> None:
        """Keep the gradient norms of the later stages."""
        self._norms[head.update] = head.norms

    def complete(self, update: int) -> None:
        """Add the gradients of later stages to those of this stage; all of the update are computed."""
        self.execution.add_shared(self._shared.pop(update, {}))

    def norms(self, update: int) -> tuple[tuple[int, float], ...]:
        """Return the gradient norms of this and all later stages."""
        return (*self.execution.norms(), *self._norms.pop(update, ()))

    def take_samples(self) -> int:
        """Return the number of samples whose gradients were computed since the last call."""
        samples, self._samples = self._samples, 0
        return samples

    def step(self, batches: int, clip: float | None) -> float | None:
        """Update the weights with the mean gradient of the batches; return the mean of their losses."""
        self.execution.step(batches, clip)
        loss, self._loss = self._loss, None
        return None if loss is None else loss / batches

    def finish_phase(self, number: int) -> ValidationResult | None:
        """Finish a phase at this stage; at the Leaf, return the result of a validation."""
        begin, end = self._begins.pop(number), self._ends.pop(number)
        if begin.kind == "train":
            self.execution.updates.end_epoch()
        if self._leaf is None:
            return None
        if end.count == 0:
            self._leaf.begin(begin.kind, begin.epoch, loads=self.execution.index > 0)
        self._leaf.end(begin.kind, end.count, exhausted=end.exhausted)
        if begin.kind != "validate":
            return None
        score = self._leaf.score()
        return ValidationResult(
            begin.run, number, score.name, score.value, score.samples, dict(score.metrics)
        )

    def _item(self, kind: PhaseKind, microbatch: Microbatch) -> LabelPart:
        """Return the labels for the loss: the Leaf's, or the Root's batch in a cluster of one node.

        A new iteration of the labels begins with the first micro-batch of a phase, when the previous
        phase is used up, so that the order is that of the Root.
        """
        leaf = self._leaf
        if leaf is None or kind == "predict":
            return LabelPart(None)
        if microbatch.part == 0:
            own, index = microbatch.item is not None, microbatch.id.index
            if index == 0:
                leaf.begin(kind, self._begins[microbatch.id.phase].epoch, loads=not own)
            item = microbatch.item
            if not own:
                item = leaf.item(kind, index, microbatch.batch_size, microbatch.digests)
            self._labels = leaf.split(item, microbatch.batch_size, microbatch.parts)
        part = self._labels[microbatch.part]
        return replace(part, item=map_tensors(part.item, self.execution.to_device))

    def _loss_part(self, labels: LabelPart, microbatch: Microbatch) -> LossPart | None:
        leaf = self._leaf
        if leaf is None:
            return None
        if microbatch.ends_batch:
            self._labels = []
        return LossPart(
            lambda outputs: leaf.loss(self.execution.output(outputs), labels.item),
            labels.weight,
            tuple(self._loss_chunk(leaf, chunk) for chunk in leaf.chunk(labels.item)),
        )

    def _loss_chunk(self, leaf: Leaf, chunk: LabelChunk) -> LossChunk:
        return LossChunk(
            chunk.size,
            lambda outputs: leaf.chunk_loss(self.execution.output(outputs), chunk.item),
            chunk.weight,
        )

    def _shared_for_next(
        self, shared: Mapping[str, torch.Tensor], version: int, *, trains: bool
    ) -> dict[str, Any]:
        """Return weights that the following stages use: earlier stages' and new values of our own."""
        last_users, index = self.execution.last_users, self.execution.index
        passed = {k: v for k, v in shared.items() if last_users.get(k, index + 1) > index}
        execution = self.execution
        averaged = execution.updates.average is not None and not trains
        newest = version, execution.assignments, execution.predicted, averaged
        if newest != self._shared_version:
            self._shared_version = newest
            passed |= execution.shared_weights(trains=trains)
        return {SHARED + key: value for key, value in passed.items()}

    def _validate(self, leaf: Leaf, microbatch: Microbatch, item: Any) -> ForwardResult:
        """Return the result of a validation, in chunks of positions if the loss of training is."""
        execution, values = self.execution, microbatch.values
        chunked = execution.passes.chunked_loss
        chunks = [LabelChunk(item, 0, 1.0)]
        if chunked is not None and chunked.evaluates:
            chunks = leaf.validation_chunks(item)
        outputs: Iterable[Any]
        if len(chunks) > 1:
            sizes = [chunk.size for chunk in chunks]
            outputs = execution.evaluate_in_chunks(microbatch.id, values, sizes)
        else:
            outputs = [execution.evaluate(microbatch.id, values)[1]]
        return ForwardResult(self.run, microbatch.id, leaf.measure(outputs, chunks))

    def _result(self, microbatch_id: MicrobatchId, output: Any) -> tuple[ForwardResult, dict[str, Any]]:
        leaves, structure = flatten(output)
        values = {str(position): leaf for position, leaf in enumerate(leaves)}
        return ForwardResult(self.run, microbatch_id, None, json.dumps(structure.to_json())), values

    # Messages and results

    def forward_messages(self, microbatch_id: MicrobatchId) -> Iterator[Message]:
        """Yield the messages for the next stage: shared weights, one in each, and the micro-batch.

        Stages that share a weight must have the same values, so that weights are never compressed.
        """
        microbatch = self._microbatches[microbatch_id]
        outputs, microbatch.outputs = microbatch.outputs, {}
        for key, weight in _pop_shared(outputs).items():
            yield Message(SharedWeights(self.run, microbatch_id), {key: weight})
        head = Forward(
            self.run,
            microbatch_id,
            microbatch.batch_size,
            microbatch.part,
            microbatch.parts,
            microbatch.ends_update,
            microbatch.digests,
            microbatch.checkpoint,
        )
        yield Message(head, outputs)

    def backward_message(self, microbatch_id: MicrobatchId, timings: tuple[StageTiming, ...]) -> Message:
        """Return the message for the previous stage; the micro-batch leaves the store."""
        microbatch = self._microbatches.pop(microbatch_id)
        head = Backward(self.run, microbatch_id, timings, microbatch.loss)
        gradients, microbatch.gradients = microbatch.gradients, {}  # ``last`` does not keep them
        return Message(head, gradients)

    def result_message(self, microbatch_id: MicrobatchId) -> Message:
        """Return the result for the previous stage; the micro-batch leaves the store."""
        microbatch = self._microbatches.pop(microbatch_id)
        assert microbatch.result is not None
        return Message(microbatch.result, microbatch.outputs)

    def finish(self, microbatch_id: MicrobatchId) -> MicrobatchResult | None:
        """Remove a micro-batch at the Root; return the Leaf's result in a phase without gradients."""
        microbatch = self._microbatches.pop(microbatch_id)
        if microbatch.result is None:
            return None
        output = _rebuild(microbatch.result, microbatch.outputs)
        return MicrobatchResult(output, microbatch.result.value)


def _pop_shared(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Remove the weights that several stages use from a message's values and return them."""
    names = [name for name in values if name.startswith(SHARED)]
    return {name.removeprefix(SHARED): values.pop(name) for name in names}


def _rebuild(result: ForwardResult, values: Mapping[str, Any]) -> Any:
    if not result.structure:
        return None
    structure = Structure.from_json(json.loads(result.structure))
    return structure.build(iter([values[str(position)] for position in range(len(values))]))
