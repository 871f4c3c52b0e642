"""What a stage computes: outputs of micro-batches, their gradients, updates of its weights.

Knows nothing of networks or schedules: it is told which micro-batch, with which version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ravnest.errors import StageInputError
from ravnest.runtime.schedule.events import Batch
from ravnest.runtime.stage.randomness import batch_seed, draws, seeded
from ravnest.runtime.stage.updates import LookAhead, UpdateRule, Updates
from ravnest.runtime.stage.weight_versions import WeightVersions
from ravnest.split.chain import StagePass
from ravnest.split.graph import MODES, Mode
from ravnest.split.module import StageModule

Values = dict[str, Any]
"""Tensors and plain numbers by name, as they cross a boundary."""
Loss = Callable[[tuple[Any, ...]], torch.Tensor]
"""From the outputs of the last stage to the loss."""


@dataclass(frozen=True)
class Gradients:
    """What goes back to the stage before."""

    inputs: dict[str, torch.Tensor]
    shared: dict[str, torch.Tensor]
    """Of weights that an earlier stage owns, summed over this stage and those behind."""


@dataclass
class _UnderWay:
    version: int
    inputs: tuple[Any, ...]
    parameters: Mapping[str, torch.Tensor]
    done: StagePass | None
    """None where activations are computed again in backward."""
    loss: torch.Tensor | None
    loss_of: Loss | None


class StageExecution:
    """One stage at work. Used by one thread at a time."""

    def __init__(
        self,
        module: StageModule,
        rule: UpdateRule,
        *,
        seed: int,
        stash: bool,
        recompute: bool = False,
    ) -> None:
        """``stash``: updates overtake micro-batches, so that versions must be kept."""
        spec = module.spec
        self.module = module
        self._seed = seed
        self._recompute = recompute
        self._device = next((t.device for t in module.state_tensors().values()), torch.device("cpu"))
        self._draws = {mode: draws(spec.graphs[mode]) for mode in MODES}
        owned = {e.key for e in spec.state if e.stages[0] == spec.index}
        parameters = module.parameters_by_key()
        trained = {k: p for k, p in parameters.items() if p.requires_grad and k in owned}
        self._borrowed: dict[str, torch.Tensor] = {
            key: p for key, p in parameters.items() if p.requires_grad and key not in owned
        }
        self._lent = [e.key for e in spec.state if e.key in trained and len(e.stages) > 1]
        self._versions = WeightVersions(
            trained, stash=stash, look_ahead=LookAhead() if rule.look_ahead and stash else None
        )
        self._versions.memory.update(
            tensor.untyped_storage().data_ptr() for tensor in module.state_tensors().values()
        )
        self.updates = Updates(rule, trained)
        self._under_way: dict[Batch, _UnderWay] = {}
        self._after_step: list[Callable[[], None]] = []
        self.assignments = 0
        """Calls of ``assign`` so far."""
        self._places = {
            e.key: min(p for p in e.positions if p >= 0) for e in spec.state if e.key in trained
        }
        self.last_users = {e.key: e.stages[-1] for e in spec.state}
        """Of each tensor that this stage holds, the last stage that does."""
        module.train()

    @property
    def index(self) -> int:
        """The stage's place in the pipeline."""
        return self.module.spec.index

    @property
    def under_way(self) -> int:
        """Micro-batches that wait for their backward."""
        return len(self._under_way)

    @property
    def versions(self) -> int:
        """Copies of the weights that are held."""
        return len(self._versions)

    def forward(
        self, batch: Batch, version: int, values: Mapping[str, Any], loss_of: Loss | None = None
    ) -> tuple[Values, float | None]:
        """Outputs by name, and the loss at the last stage, where ``loss_of`` is given."""
        parameters = {**self._versions.at(version), **self._borrowed}
        inputs = self._receive(values, gradients=True)
        if self._recompute:
            with torch.no_grad():
                outputs, loss = self._run(batch, inputs, parameters, loss_of)
            kept = _UnderWay(version, inputs, parameters, None, None, loss_of)
        else:
            outputs, loss = self._run(batch, inputs, parameters, loss_of)
            done = StagePass(self.module, inputs, outputs, parameters)
            kept = _UnderWay(version, inputs, parameters, done, loss, loss_of)
        self._under_way[batch] = kept
        return self._send(outputs), None if loss is None else float(loss.detach())

    def backward(
        self, batch: Batch, gradients: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> Gradients:
        """Gradients for the stage before; those of this stage's weights are added up for the update.

        ``gradients`` are of this stage's outputs by name (none at the last stage, which has the
        loss); ``shared`` are those of weights that this stage or an earlier one owns.
        """
        kept = self._under_way.pop(batch)
        self._versions.delay = self.updates.done - kept.version
        done, loss = kept.done, kept.loss
        if done is None:
            done, loss = self._again(batch, kept)
        if loss is not None:
            ends: list[tuple[Any, torch.Tensor | None]] = [(loss, None)]
        else:
            outputs = zip(self.module.graph.outputs, done.outputs, strict=True)
            ends = [
                (tensor, self._fitting(gradients[spec.name], tensor, spec.name))
                for spec, tensor in outputs
                if spec.name in gradients
            ]
        of_inputs, found = done.backward(ends, shared)
        back = {
            spec.name: gradient
            for spec, gradient in zip(self.module.graph.inputs, of_inputs, strict=True)
            if gradient is not None
        }
        passed = {k: g for k, g in shared.items() if k not in kept.parameters}
        passed |= {k: g for k, g in found.items() if k in self._borrowed}
        self.updates.add(found, kept=(*back.values(), *passed.values()))
        return Gradients(back, passed)

    def evaluate(self, batch: Batch, version: int, values: Mapping[str, Any]) -> tuple[Values, Any]:
        """Outputs by name without gradients, in evaluation mode; and the model's output at the end."""
        self.module.eval()
        try:
            parameters = {**self._versions.at(version), **self._borrowed}
            inputs = self._receive(values, gradients=False)
            with torch.no_grad():
                outputs, _ = self._run(batch, inputs, parameters, None)
            return self._send(outputs), self.output(outputs)
        finally:
            self.module.train()

    def output(self, outputs: tuple[Any, ...]) -> Any:
        """The model's output from the last stage's outputs; None at other stages."""
        structure = self.module.graph.structure
        return None if structure is None else structure.build(iter(outputs))

    def step(self, count: int, total_norm: float | None = None) -> None:
        """Update the weights with the mean of ``count`` gradients."""
        self.updates.step(count, total_norm)
        self.catch_up()

    def after_step(self, change: Callable[[], None]) -> None:
        """Have something else change the weights: after the next update, when no graph is based on
        those in place, or in ``catch_up``.
        """
        self._after_step.append(change)

    def catch_up(self) -> None:
        """Make the changes that wait for an update; nothing is under way."""
        waiting, self._after_step = self._after_step, []
        for change in waiting:
            change()

    def trained(self) -> Mapping[str, torch.Tensor]:
        """The weights that this stage owns and trains, in place."""
        return self._versions.weights

    def add(self, changes: Mapping[str, torch.Tensor]) -> None:
        """Add to the weights; micro-batches under way keep the versions that they have."""
        with torch.no_grad():
            for key, change in changes.items():
                self._versions.weights[key].add_(self.to_device(change))
        self._versions.moved(changes)

    def assign(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace weights; micro-batches under way keep the versions that they have."""
        with torch.no_grad():
            for key, weight in weights.items():
                self._versions.weights[key].copy_(weight)
        self.assignments += 1
        if not self._under_way:
            self._versions.renew()

    def free(self, version: int) -> None:
        """Nothing under way uses this version any more."""
        self._versions.free(version)

    def lend(self) -> Values:
        """Copies of the weights that later stages use too."""
        own = self.module.parameters_by_key()
        return {key: own[key].detach().clone() for key in self._lent}

    def borrow(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take new values of weights that an earlier stage owns; others are left alone."""
        for key, value in values.items():
            if key in self._borrowed:
                tensor = self._fitting(value, self._borrowed[key], key)
                self._borrowed[key] = tensor.requires_grad_()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where the stage computes."""
        return tensor.to(self._device, non_blocking=True)

    def norms(self) -> list[tuple[int, float]]:
        """The norm of each gradient that was added up so far, with its place in the model."""
        return [(self._places[key], norm) for key, norm in self.updates.norms().items()]

    def settle(self) -> None:
        """Write borrowed weights into the module too, so that its state can be saved."""
        own = self.module.parameters_by_key()
        with torch.no_grad():
            for key, value in self._borrowed.items():
                if value is not own[key]:
                    own[key].copy_(value)

    def _run(
        self,
        batch: Batch,
        inputs: tuple[Any, ...],
        parameters: Mapping[str, torch.Tensor],
        loss_of: Loss | None,
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[tuple[Any, ...], torch.Tensor | None]:
        mode: Mode = "train" if self.module.training else "eval"
        seed = batch_seed(self._seed, batch, self.index)
        with seeded(seed, self._device) if self._draws[mode] else nullcontext():
            outputs = self.module(*inputs, parameters=parameters, buffers=buffers)
            return outputs, None if loss_of is None else loss_of(outputs)

    def _again(self, batch: Batch, kept: _UnderWay) -> tuple[StagePass, torch.Tensor | None]:
        """The forward once more, with gradients; running statistics are not moved twice."""
        buffers = {
            e.key: tensor.clone()
            for e in self.module.spec.state
            if e.kind == "buffer"
            for tensor in (self.module.state_tensors()[e.key],)
        }
        outputs, loss = self._run(batch, kept.inputs, kept.parameters, kept.loss_of, buffers)
        return StagePass(self.module, kept.inputs, outputs, kept.parameters), loss

    def _receive(self, values: Mapping[str, Any], *, gradients: bool) -> tuple[Any, ...]:
        inputs = []
        for spec in self.module.graph.inputs:
            if spec.name not in values:
                raise StageInputError(f"stage {self.index} lacks its input {spec.name}")
            value = values[spec.name]
            if isinstance(value, torch.Tensor):
                value = self.to_device(value.detach()).requires_grad_(gradients and spec.gradient)
            inputs.append(value)
        return tuple(inputs)

    def _send(self, outputs: tuple[Any, ...]) -> Values:
        """Outputs cut off from the graph; a weight among them is copied, for it will change."""
        sent: Values = {}
        for spec, value in zip(self.module.graph.outputs, outputs, strict=True):
            if isinstance(value, torch.Tensor):
                plain = value.detach()
                shares = plain.untyped_storage().data_ptr() in self._versions.memory
                sent[spec.name] = plain.clone() if shares else plain
            else:
                sent[spec.name] = value
        return sent

    def _fitting(self, value: torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
        if value.shape != like.shape or value.dtype != like.dtype:
            raise StageInputError(
                f"what arrived for {name} has shape {list(value.shape)} and dtype {value.dtype}, "
                f"expected {list(like.shape)} and {like.dtype}"
            )
        return self.to_device(value.detach())
