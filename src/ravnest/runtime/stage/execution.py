"""Computations of a stage: forward and backward passes of micro-batches, and updates of its weights.

This module knows neither networks nor schedules: the caller names the micro-batch and the version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ravnest.errors import SettingsError, StageInputError
from ravnest.host import return_freed_memory
from ravnest.runtime.stage.forward_passes import ForwardPasses, LossPart, SavedForward
from ravnest.runtime.stage.updates import UpdateRule, Updates
from ravnest.runtime.stage.weight_versions import WeightVersions
from ravnest.split.chain import StagePass
from ravnest.split.deferred import DeferredGradients, deferrable_keys
from ravnest.split.gradients import sum_gradients
from ravnest.split.lstm_deferral import has_costly_deferral
from ravnest.split.module import StageModule
from ravnest.split.written_state import written_weights
from ravnest.types import MicrobatchId

__all__ = ["LossPart", "StageExecution"]

Values = dict[str, Any]
"""Tensors and numbers by name, as stages exchange them."""


class StageExecution:
    """Computations of one stage. Used by one thread at a time."""

    def __init__(
        self,
        module: StageModule,
        rule: UpdateRule,
        *,
        seed: int,
        stash: bool,
        kept: int | None = None,
        defer: bool = False,
        frugal: bool = False,
    ) -> None:
        """Prepare the stage for training.

        ``stash``: updates happen between forward and backward, so versions must be kept. ``kept``: the
        most micro-batches whose activations are kept at once; those of the others are recomputed in
        their backward passes. ``defer``: ``backward`` leaves the weight gradients that it can to
        ``weight_gradients``. ``frugal``: memory is short, and what activations have used is returned to
        the system before an update.
        """
        spec = module.spec
        if stash and (written := written_weights(spec)):
            raise SettingsError(
                f"forward writes to the weight {written[0]}, as Embedding(max_norm=1) or a clamp does: "
                'with schedule="async" an update can overtake the write and lose it. Use schedule="sync"'
            )
        self.module = module
        self._stash = stash
        self._frugal = frugal
        self._kept = kept
        self._differentiates = spec.has_gradients
        """False if a forward pass leaves nothing for a backward pass."""
        deferrable = deferrable_keys(spec.graphs["train"])
        self.defers = defer and any(e.trainable and e.key in deferrable for e in spec.state)
        """True if ``weight_gradients`` must be called for each micro-batch."""
        self.may_defer_costly = defer and has_costly_deferral(spec.graphs["train"])
        """True if ``forward`` may be called with ``costly``."""
        self._captures = _few_others(module, deferrable)
        """True if the weight gradients that are not deferred take little memory."""
        self._device = next((t.device for t in module.state_tensors().values()), torch.device("cpu"))
        self.passes = ForwardPasses(module, seed, self._device)
        owned = {e.key for e in spec.state if e.stages[0] == spec.index}
        parameters = module.parameters_by_key()
        trained = {k: p for k, p in parameters.items() if p.requires_grad and k in owned}
        self._replicas: dict[str, torch.Tensor] = {
            key: p for key, p in parameters.items() if p.requires_grad and key not in owned
        }
        """Weights that an earlier stage owns."""
        self._shared_keys = [e.key for e in spec.state if e.key in trained and len(e.stages) > 1]
        self.shared_from_next = frozenset(
            e.key
            for e in spec.state
            if e.stages[-1] > spec.index and e.key in {*trained, *self._replicas}
        )
        """Weights whose gradients come from later stages too."""
        self._replica_gradients: dict[str, torch.Tensor] = {}
        """Gradients of replicas, accumulated for the update in progress."""
        self.updates = Updates(rule, trained, {e.key: e.model_names[0] for e in spec.state})
        look_ahead = self.updates.look_ahead() if rule.look_ahead else None
        self._versions = WeightVersions(trained, stash=stash, look_ahead=look_ahead)
        averages = {} if self.updates.average is None else self.updates.average.tensors
        self._versions.memory.update(
            tensor.untyped_storage().data_ptr()
            for tensor in (*module.state_tensors().values(), *averages.values())
        )
        self._saved: dict[MicrobatchId, SavedForward] = {}
        self._deferred: dict[MicrobatchId, SavedForward] = {}
        """Micro-batches whose weight gradients are still to be computed."""
        self._after_step: list[Callable[[], None]] = []
        self.assignments = 0
        """Number of calls of ``assign``."""
        self._positions = {
            e.key: min(p for p in e.positions if p >= 0) for e in spec.state if e.key in trained
        }
        self.last_users = {e.key: e.stages[-1] for e in spec.state}
        """Last stage that uses each tensor of this stage."""
        module.train()

    @property
    def index(self) -> int:
        """Position of the stage in the pipeline."""
        return self.module.spec.index

    @property
    def awaiting_backward(self) -> int:
        """Number of micro-batches that wait for their backward pass."""
        return len(self._saved)

    @property
    def sends_shared(self) -> bool:
        """True if an earlier stage owns weights that this stage uses."""
        return bool(self._replicas)

    @property
    def versions(self) -> int:
        """Number of copies of the weights."""
        return len(self._versions)

    def forward(
        self,
        microbatch: MicrobatchId,
        version: int,
        values: Mapping[str, Any],
        loss_part: LossPart | None = None,
        *,
        late: bool = False,
        costly: bool = False,
    ) -> tuple[Values, float | None]:
        """Return the outputs by name or, if ``loss_part`` is given (at the last stage), the loss.

        The last stage does not return its outputs: only the loss needs them. ``late``: another update
        comes before the one that the gradient is part of. ``costly``: weight gradients whose deferral
        takes additional time are deferred too; ``weight_gradients`` must be called.
        """
        parameters = {**self._versions.at(version, late=late), **self._replicas}
        inputs = self._receive(values, gradients=True)
        if not self._differentiates and loss_part is None:
            return self._forward_frozen(
                microbatch, SavedForward(version, inputs, parameters, None, None)
            )
        deferred = self._new_deferred(costly=costly)
        saved = SavedForward(version, inputs, parameters, deferred, loss_part)
        if self._make_room():
            outputs, loss = self.passes.run(microbatch, saved, self._accumulated)
            saved.stage_pass = StagePass(self.module, inputs, outputs, parameters)
            saved.loss = loss
        else:
            outputs, loss = self.passes.run_without_gradients(microbatch, saved, self._accumulated)
        self._saved[microbatch] = saved
        return (self._send(outputs), None) if loss is None else ({}, float(loss.detach()))

    def _forward_frozen(
        self, microbatch: MicrobatchId, saved: SavedForward
    ) -> tuple[Values, float | None]:
        """Return the outputs of a stage that trains nothing; keep only that the micro-batch is here."""
        with torch.no_grad():
            outputs, _ = self.passes.run(microbatch, saved, self._accumulated)
        self._saved[microbatch] = SavedForward(saved.version, (), {}, None, None)
        return self._send(outputs), None

    def computed_from(self, microbatch: MicrobatchId) -> tuple[Values, dict[str, torch.Tensor]] | None:
        """Return the inputs by name and the state by key that the output was computed from.

        None if the micro-batch does not wait for its backward pass: the weights may be other ones then.
        A stage that trains nothing does not keep its inputs.
        """
        saved = self._saved.get(microbatch)
        if saved is None or len(saved.inputs) < len(self.module.graph.inputs):
            return None
        names = (spec.name for spec in self.module.graph.inputs)
        state = {**self.module.state_tensors(), **saved.buffers, **saved.parameters}
        return dict(zip(names, saved.inputs, strict=True)), state

    def _new_deferred(self, *, costly: bool) -> DeferredGradients | None:
        """Return the place for weight gradients that the backward pass leaves; None if there are none.

        Without deferral these are the ones that are added in place at the end of the pass.
        """
        if self.defers or costly:
            return DeferredGradients(captures=self._captures, costly=costly)
        return None if self._frugal else DeferredGradients(sums_only=True)

    def backward(
        self, microbatch: MicrobatchId, gradients: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the gradients of the inputs by name; accumulate those of this stage's weights.

        ``gradients`` belong to this stage's outputs, by name (empty at the last stage, which has the
        loss). If the stage defers, ``weight_gradients`` accumulates the others later.
        """
        saved = self._saved.pop(microbatch)
        if not self._differentiates and saved.loss_part is None:
            return {}
        stage_pass, loss = saved.stage_pass, saved.loss
        if saved.loss_part is not None and saved.loss_part.weight == 0.0:
            return self._without_loss(microbatch, saved)
        if stage_pass is None:
            stage_pass, loss = self._recompute_forward(microbatch, saved)
        ends: list[tuple[Any, torch.Tensor | None]]
        if saved.head_gradient is not None:
            ends = [(stage_pass.outputs[0], saved.head_gradient)]
        elif loss is not None:
            assert saved.loss_part is not None
            ends = [(loss, torch.full_like(loss, saved.loss_part.weight))]
        else:
            outputs = zip(self.module.graph.outputs, stage_pass.outputs, strict=True)
            ends = [
                (tensor, self._checked(gradients[spec.name], tensor, spec.name))
                for spec, tensor in outputs
                if spec.name in gradients
            ]
        if saved.deferred is not None and saved.deferred.captures:
            of_inputs = stage_pass.capture(ends, saved.deferred, self._accumulate)
        else:
            with self._accumulated() as accumulated:
                of_inputs = stage_pass.accumulate(ends, accumulated, saved.deferred)
        if self.defers or (saved.deferred is not None and saved.deferred.costly):
            self._defer(microbatch, saved)
        elif saved.deferred:
            self._add_deferred(saved.deferred)
        return {
            spec.name: gradient
            for spec, gradient in zip(self.module.graph.inputs, of_inputs, strict=True)
            if gradient is not None
        }

    @contextmanager
    def _accumulated(self) -> Iterator[dict[str, torch.Tensor]]:
        """Give out the accumulated gradients by key, and keep them as they are afterwards."""
        gradients = {**self._replica_gradients, **self.updates.take_gradients()}
        yield gradients
        self._replica_gradients = {k: g for k, g in gradients.items() if k in self._replicas}
        self.updates.set_gradients(gradients)

    def weight_gradients(
        self, microbatch: MicrobatchId, interrupted: Callable[[], bool] = lambda: False
    ) -> bool:
        """Accumulate the weight gradients that ``backward`` has left, if that is not done yet.

        Return ``False`` if ``interrupted`` has ended this after one of them; the next call continues.
        """
        saved = self._deferred.get(microbatch)
        left = None if saved is None else saved.deferred
        if left is not None and not self._add_deferred(left, interrupted):
            return False
        self._deferred.pop(microbatch, None)
        return True

    def _add_deferred(
        self, deferred: DeferredGradients, interrupted: Callable[[], bool] = lambda: False
    ) -> bool:
        taken: set[int] = set()
        # An owned weight's gradient is part of no message, so that it can be changed in place.
        sums = None if self._frugal else self.updates.gradients

        def take(key: str, gradient: torch.Tensor) -> None:
            self._accumulate(key, gradient, taken)

        return deferred.compute(take, sums, interrupted)

    def add_shared(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Accumulate gradients that later stages found for weights held here."""
        own = self.module.parameters_by_key()
        taken: set[int] = set()
        for key, gradient in gradients.items():
            self._accumulate(key, self._checked(gradient, own[key], key), taken)

    def take_shared(self) -> dict[str, torch.Tensor]:
        """Return the accumulated gradients of weights that an earlier stage owns, and reset them."""
        taken, self._replica_gradients = self._replica_gradients, {}
        return taken

    def _accumulate(self, key: str, gradient: torch.Tensor, taken: set[int]) -> None:
        """Add the gradient of a weight; ``taken`` is memory that gradients use (``add_gradient``)."""
        if key in self._replicas:
            old = self._replica_gradients.get(key)
            replica = self._replicas[key]
            self._replica_gradients[key] = sum_gradients(old, gradient, replica, taken)
        self.updates.add(key, gradient, taken)

    def _defer(self, microbatch: MicrobatchId, saved: SavedForward) -> None:
        """Keep the part of a forward that the deferred weight gradients need."""
        saved.stage_pass, saved.loss, saved.inputs, saved.head_gradient = None, None, (), None
        self._deferred[microbatch] = saved

    def _without_loss(self, microbatch: MicrobatchId, saved: SavedForward) -> dict[str, torch.Tensor]:
        """Return zeros: the micro-batch does not count in the loss of its batch."""
        inputs = zip(self.module.graph.inputs, saved.inputs, strict=True)
        back = {
            s.name: torch.zeros_like(v) for s, v in inputs if isinstance(v, torch.Tensor) and s.gradient
        }
        saved.deferred = None
        if self.defers:
            self._defer(microbatch, saved)
        return back

    def evaluate(self, microbatch: MicrobatchId, values: Mapping[str, Any]) -> tuple[Values, Any]:
        """Return outputs by name, in evaluation mode and without gradients, and the model's output.

        The newest weights are used, or their moving average if there is one. The model's output is None
        except at the last stage.
        """
        assert not self._versions.predicted, "an evaluation needs weights that are not predicted"
        self.module.eval()
        try:
            parameters = {**self.evaluated(), **self._replicas}
            inputs = self._receive(values, gradients=False)
            with torch.no_grad(), self.passes.randomness(microbatch, "eval"):
                outputs = self.module(*inputs, parameters=parameters)
            return self._send(outputs), self.output(outputs)
        finally:
            self.module.train()

    def evaluate_in_chunks(
        self, microbatch: MicrobatchId, values: Mapping[str, Any], sizes: Sequence[int]
    ) -> Iterator[Any]:
        """Yield the model's output for chunks of positions, as ``evaluate`` computes it for all."""
        assert self.passes.chunked_loss is not None
        self.module.eval()
        try:
            parameters = {**self.evaluated(), **self._replicas}
            inputs = self._receive(values, gradients=False)
            with self.passes.randomness(microbatch, "eval"):
                for outputs in self.passes.chunked_loss.evaluate(inputs, parameters, sizes):
                    yield self.output(outputs)
        finally:
            self.module.train()

    def output(self, outputs: tuple[Any, ...]) -> Any:
        """Return the model's output, built from the last stage's outputs; None at other stages."""
        return self.passes.output(outputs)

    def step(self, batches: int, total_norm: float | None = None) -> None:
        """Update the weights with the mean gradient of this number of batches."""
        newest = self.updates.done
        self._versions.before_update(
            in_use=any(saved.version == newest for saved in self._saved.values())
        )
        if self._frugal:
            return_freed_memory()
        self.updates.step(batches, total_norm)
        self.catch_up()
        self.updates.average_weights()

    def after_step(self, change: Callable[[], None]) -> None:
        """Call ``change`` after the next update, or in ``catch_up``.

        At that point no autograd graph uses the weights in place, so they may be changed.
        """
        self._after_step.append(change)

    def catch_up(self) -> None:
        """Make the changes that wait for an update now; no micro-batch is in flight."""
        waiting, self._after_step = self._after_step, []
        for change in waiting:
            change()

    def trained(self) -> Mapping[str, torch.Tensor]:
        """Return the weights that this stage owns and trains (not copies), as ``predicted`` says."""
        return self._versions.weights

    def evaluated(self) -> Mapping[str, torch.Tensor]:
        """Return the values of ``trained`` that are validated and delivered (not copies)."""
        average = self.updates.average
        return self._versions.weights if average is None else average.tensors

    def add(self, changes: Mapping[str, torch.Tensor]) -> None:
        """Add ``changes`` to the weights; micro-batches in flight keep their versions."""
        with torch.no_grad():
            for key, change in changes.items():
                self._versions.weights[key].add_(self.to_device(change))

    def assign(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace weights; micro-batches in flight keep their versions."""
        with torch.no_grad():
            for key, weight in weights.items():
                self._versions.weights[key].copy_(weight)
        self.assignments += 1
        self._versions.renew(in_use=bool(self._saved))

    def keep_versions(self) -> None:
        """Let updates happen between forward and backward from now on; no micro-batch is in flight."""
        self._stash = self._versions.stash = True

    @property
    def predicted(self) -> bool:
        """True if the newest weights are predicted ones, which the next update takes back."""
        return self._versions.predicted

    def undo_prediction(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Change copies of the newest weights to what they are without a prediction."""
        self._versions.undo_prediction(copies)

    def free(self, version: int) -> None:
        """Free a version that no micro-batch in flight uses."""
        self._versions.free(version)

    def shared_weights(self, *, trains: bool) -> Values:
        """Return the owned weights that later stages use too; copies if updates may overtake them.

        ``trains``: for training, else for an evaluation. Without a stash, the later stages must have
        received them before they can contribute to the next update, so that the message may share the
        memory of the weights.
        """
        own = self.module.parameters_by_key() if trains else self.evaluated()
        plain = {key: own[key].detach() for key in self._shared_keys}
        return {key: weight.clone() for key, weight in plain.items()} if self._stash else plain

    def update_replicas(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take new values of weights that an earlier stage owns; ignore all other values."""
        for key, value in values.items():
            if key in self._replicas:
                tensor = self._checked(value, self._replicas[key], key)
                self._replicas[key] = self.module.replace_parameter(key, tensor)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the stage's device."""
        return tensor.to(self._device, non_blocking=True)

    def norms(self) -> list[tuple[int, float]]:
        """Return the norm of each accumulated gradient, with the parameter's position in the model."""
        return [(self._positions[key], norm) for key, norm in self.updates.norms().items()]

    def write_replicas(self) -> None:
        """Write the replicas of shared weights to the module, so that its state can be saved."""
        own = self.module.parameters_by_key()
        with torch.no_grad():
            for key, value in self._replicas.items():
                if value is not own[key]:
                    own[key].copy_(value)

    def _make_room(self) -> bool:
        """Return whether a forward may keep its activations; compute deferred gradients to make room.

        One place stays free while a micro-batch waits that must be recomputed.
        """
        if self._kept is None:
            return True
        waiting = any(saved.stage_pass is None for saved in self._saved.values())
        return self._held_below(self._kept - waiting)

    def _held_below(self, limit: int) -> bool:
        """Return whether less than ``limit`` micro-batches have activations or deferred gradients.

        If not, compute deferred gradients, the oldest first, as far as that helps.
        """
        kept = sum(saved.stage_pass is not None for saved in self._saved.values())
        while self._deferred and kept < limit <= kept + len(self._deferred):
            self.weight_gradients(next(iter(self._deferred)))
        return kept + len(self._deferred) < limit

    def _recompute_forward(
        self, microbatch: MicrobatchId, saved: SavedForward
    ) -> tuple[StagePass, torch.Tensor | None]:
        """Repeat the forward with gradients; running statistics are not updated a second time."""
        self._held_below(max(self._kept or 0, 1))
        outputs, loss = self.passes.run(microbatch, saved, self._accumulated, saved.buffers)
        return StagePass(self.module, saved.inputs, outputs, saved.parameters), loss

    def _receive(self, values: Mapping[str, Any], *, gradients: bool) -> tuple[Any, ...]:
        inputs = []
        for spec in self.module.graph.inputs:
            if spec.name not in values:
                raise StageInputError(f"stage {self.index} has not received its input {spec.name}")
            value = values[spec.name]
            if isinstance(value, torch.Tensor):
                value = self.to_device(value.detach()).requires_grad_(gradients and spec.gradient)
            inputs.append(value)
        return tuple(inputs)

    def _send(self, outputs: tuple[Any, ...]) -> Values:
        """Return detached outputs; a weight among them is copied, since updates change it."""
        sent: Values = {}
        for spec, value in zip(self.module.graph.outputs, outputs, strict=True):
            if isinstance(value, torch.Tensor):
                plain = value.detach()
                shares = plain.untyped_storage().data_ptr() in self._versions.memory
                sent[spec.name] = plain.clone() if shares else plain
            else:
                sent[spec.name] = value
        return sent

    def _checked(self, value: torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
        if value.shape != like.shape or value.dtype != like.dtype:
            raise StageInputError(
                f"the tensor received for {name} has shape {list(value.shape)} and dtype {value.dtype}, "
                f"expected {list(like.shape)} and {like.dtype}"
            )
        return self.to_device(value.detach())


_FEW_BYTES = 1 << 20


def _few_others(module: StageModule, deferrable: frozenset[str]) -> bool:
    """Return whether the gradients that cannot be deferred may exist twice during a backward pass."""
    sizes = {key: p.nbytes for key, p in module.parameters_by_key().items() if p.requires_grad}
    others = sum(size for key, size in sizes.items() if key not in deferrable)
    return others <= max(_FEW_BYTES, sum(sizes.values()) // 64)
