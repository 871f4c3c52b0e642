"""Forward passes of a stage: with a loss or chunks of it, without gradients, and of made-up inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ravnest.runtime.stage.loss_chunks import ChunkedLoss, Loss, LossChunk
from ravnest.runtime.stage.randomness import draws, microbatch_seed, seeded
from ravnest.split.chain import StagePass
from ravnest.split.deferred import DeferredGradients
from ravnest.split.graph import MODES, Mode, StageGraph, ValueSpec
from ravnest.split.module import StageModule
from ravnest.types import MicrobatchId

Accumulated = Callable[[], AbstractContextManager[dict[str, torch.Tensor]]]
"""Function that gives out the accumulated gradients of the stage by key, to be added to."""


@dataclass(frozen=True)
class LossPart:
    """Loss of a micro-batch and its weight in the loss of the whole batch."""

    compute: Loss
    weight: float = 1.0
    """0 if nothing in the micro-batch counts: its loss may not be a number, and its gradient is 0."""
    chunks: tuple[LossChunk, ...] = ()
    """Chunks of positions in which the loss is computed; needs ``ForwardPasses.chunked_loss``."""


@dataclass
class SavedForward:
    """State of a forward pass that its backward pass needs."""

    version: int
    inputs: tuple[Any, ...]
    parameters: Mapping[str, torch.Tensor]
    deferred: DeferredGradients | None
    loss_part: LossPart | None
    head_gradient: torch.Tensor | None = None
    """Gradient of the output of a pass whose loss was computed in chunks."""
    stage_pass: StagePass | None = None
    """None if activations are recomputed in the backward pass."""
    loss: torch.Tensor | None = None
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Values, before the forward, of the buffers that it has changed; for the recomputation."""


class ForwardPasses:
    """Forward passes of one stage. Used by one thread at a time."""

    def __init__(self, module: StageModule, seed: int, device: torch.device) -> None:
        self._module = module
        self._seed = seed
        self._device = device
        self._draws = {mode: draws(module.spec.graphs[mode]) for mode in MODES}
        self._changing: frozenset[str] | None = None
        """Buffers that a training forward changes; None before the first that is observed."""
        self.chunked_loss: ChunkedLoss | None = None
        """Used for micro-batches whose loss is computed in chunks."""

    def run(
        self,
        microbatch: MicrobatchId,
        saved: SavedForward,
        accumulated: Accumulated,
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[tuple[Any, ...], torch.Tensor | None]:
        """Return the outputs of a training forward or, at the last stage, the loss.

        A loss in chunks adds the gradients of its layer to ``accumulated``.
        """
        with self.randomness(microbatch, "train"):
            if saved.loss_part is not None and saved.loss_part.chunks:
                return self._run_in_chunks(saved, saved.loss_part, accumulated, buffers)
            outputs = self._module(
                *saved.inputs,
                parameters=saved.parameters,
                buffers=buffers,
                deferred=saved.deferred,
            )
            part = saved.loss_part
            return (outputs, None) if part is None else ((), part.compute(outputs))

    def _run_in_chunks(
        self,
        saved: SavedForward,
        part: LossPart,
        accumulated: Accumulated,
        buffers: Mapping[str, torch.Tensor] | None,
    ) -> tuple[tuple[Any, ...], torch.Tensor | None]:
        """Return the input of the last linear layer and, at first, the loss."""
        assert self.chunked_loss is not None
        x = self.chunked_loss.train.trunk(saved.inputs, saved.parameters, buffers, saved.deferred)
        if saved.head_gradient is not None:
            return (x,), None
        if part.weight == 0.0:
            return (x,), x.new_zeros(())
        with accumulated() as gradients:
            loss, saved.head_gradient = self.chunked_loss.backward(
                x, part.chunks, part.weight, saved.parameters, gradients
            )
        return (x,), loss

    def randomness(self, microbatch: MicrobatchId, mode: Mode) -> AbstractContextManager[None]:
        """Return a context in which the stage draws the micro-batch's own random numbers."""
        if not self._draws[mode]:
            return nullcontext()
        return seeded(microbatch_seed(self._seed, microbatch, self._module.spec.index), self._device)

    def run_without_gradients(
        self, microbatch: MicrobatchId, saved: SavedForward, accumulated: Accumulated
    ) -> tuple[tuple[Any, ...], torch.Tensor | None]:
        """Run a forward that is recomputed later; remember the buffers that it changes."""
        state = self._module.state_tensors()
        buffers = [e.key for e in self._module.spec.state if e.kind == "buffer"]
        before = {k: state[k].clone() for k in buffers if self._changing is None or k in self._changing}
        changes = {key: state[key]._version for key in before}
        with torch.no_grad():
            outputs, loss = self.run(microbatch, saved, accumulated)
        if self._changing is None:
            changed = {key for key, count in changes.items() if state[key]._version != count}
            self._changing = frozenset(changed | _statistics(self._module.graph))
        saved.buffers = {key: value for key, value in before.items() if key in self._changing}
        return outputs, loss

    def output(self, outputs: tuple[Any, ...]) -> Any:
        """Return the model's output, built from the last stage's outputs; None at other stages."""
        structure = self._module.graph.structure
        return None if structure is None else structure.build(iter(outputs))

    def example_output(self, rows: int, length: int | None = None) -> Any:
        """Return the model's output for made-up inputs of the last stage; only its shape means anything.

        ``rows`` is the number of samples, ``length`` their size in dimensions that vary, the largest by
        default.
        """
        with torch.no_grad(), seeded(self._seed, self._device):
            inputs, buffers = self._example(rows, length)
            return self.output(self._module(*inputs, buffers=buffers))

    def example_logits_shape(
        self, chunked: ChunkedLoss, rows: int
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and type of the logits of this number of samples."""
        with torch.no_grad(), seeded(self._seed, self._device):
            inputs, buffers = self._example(rows)
            x = chunked.train.trunk(inputs, buffers=buffers)
            return chunked.logits_shape(x), x.dtype

    def _example(
        self, rows: int, length: int | None = None
    ) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """Return made-up inputs of this number of samples, and copies of the buffers."""
        buffers = {
            e.key: self._module.state_tensors()[e.key].clone()
            for e in self._module.spec.state
            if e.kind == "buffer"
        }
        graph = self._module.graph
        sizes = {
            bounds.name: min(length or bounds.maximum or rows, bounds.maximum or rows)
            for bounds in graph.symbols
            if bounds.length
        }
        return [self._placed(_made_up(spec, rows, sizes)) for spec in graph.inputs], buffers

    def _placed(self, value: Any) -> Any:
        return value.to(self._device) if isinstance(value, torch.Tensor) else value


def _statistics(graph: StageGraph) -> set[str]:
    """Return the keys of running statistics, which normalisation changes without counting a change."""
    keys = {use.name: use.key for use in graph.state}
    return {
        keys[name]
        for operation in graph.operations
        if "_norm" in operation.target
        for name in operation.refs()
        if name in keys
    }


def _made_up(spec: ValueSpec, rows: int, sizes: Mapping[str, int]) -> torch.Tensor | int:
    """Return an input of a stage with arbitrary contents: noise, or zeros for whole numbers.

    ``sizes`` are those of symbols that do not count samples.
    """
    if spec.dtype is None:
        return rows
    shape = [d.factor * sizes.get(d.symbol, rows) if d.symbol else d.factor for d in spec.shape]
    if spec.dtype.is_floating_point:
        return torch.randn(shape, dtype=spec.dtype)
    return torch.zeros(shape, dtype=spec.dtype)
