"""What of a stage is averaged, and how: weights, statistics, the state of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from ravnest.averaging.vectors import copy_like, flatten, is_finite, views
from ravnest.averaging.weights_port import RoundAverage
from ravnest.errors import SettingsError
from ravnest.runtime.stage.worker import Worker
from ravnest.store.node_spec import RingSpec
from ravnest.wire.messages import RoundId

Vectors = dict[int, torch.Tensor]
"""By ring, all its tensors one after the other."""


@dataclass(frozen=True)
class _Slot:
    """A tensor of a ring: a weight, a buffer, or what the optimizer keeps of a weight."""

    key: str
    kept_as: str = ""
    """In the optimizer's state; empty for the tensor itself."""

    def __str__(self) -> str:
        return f"{self.kept_as} of {self.key}" if self.kept_as else self.key


@dataclass(frozen=True, eq=False)
class _Prepared:
    """An average that waits for its verdict, or for an update."""

    assign: bool
    faulty: bool
    parts: dict[int, dict[str, torch.Tensor]]
    """By ring and slot: the average; of weights that train on, how they are to move."""

    @property
    def moves(self) -> bool:
        """Whether weights move by a difference."""
        return not (self.assign or self.faulty)


class AveragingAdapter:
    """The tensors of a stage by ring; implements the ``Stage`` of ``averaging.service``.

    Calls may come from any thread: what touches the stage is left to the worker's.
    """

    def __init__(self, worker: Worker, rings: Iterable[RingSpec], *, with_optimizer: bool) -> None:
        self._worker = worker
        self._execution = execution = worker.execution
        tensors = execution.module.state_tensors()
        keys = {name: entry.key for entry in execution.module.spec.state for name in entry.names}
        optimizer = execution.updates.optimizer
        kept = state_names(optimizer) if with_optimizer and optimizer is not None else {}
        weights = execution.trained()
        self._prepared: dict[RoundId, _Prepared] = {}
        self._waiting: list[_Prepared] = []
        """To be applied after the next update, in this order."""
        self._slots: dict[int, list[_Slot]] = {}
        for ring in rings:
            slots = [_Slot(keys[name]) for name in ring.names]
            for slot in list(slots):
                if slot.key in weights:
                    slots += [_Slot(slot.key, name) for name in kept.get(tensors[slot.key].dim(), ())]
            self._slots[ring.id] = sorted(slots, key=lambda slot: not self._is_weight(slot))

    def sizes(self) -> dict[int, int]:
        """Numbers in each ring."""
        return {ring: _count(self._tensors(slots)) for ring, slots in self._slots.items()}

    def moving(self) -> dict[int, int]:
        """The numbers of weights that train; they come first."""
        return {
            ring: _count(self._tensors(filter(self._is_weight, slots)))
            for ring, slots in self._slots.items()
        }

    def hold(self, *, idle: bool, then: Callable[[Vectors], None]) -> None:
        """Copy what is averaged: between two computations, or when nothing is under way."""

        def copy() -> None:
            if idle:
                self._execution.catch_up()
            then({ring: self._copy(ring, slots) for ring, slots in self._slots.items()})

        self._worker.post(lambda: self._worker.when_idle(copy) if idle else copy())

    def _copy(self, ring: int, slots: Sequence[_Slot]) -> torch.Tensor:
        """As it will be when the averages are applied that wait for an update: they count as applied,
        or the next average would move the weights by the same once more.
        """
        tensors = _named(self._tensors(slots))
        vector = flatten(tensors)
        values = views(vector, tensors)
        for waiting in self._waiting:
            for slot in slots:
                name = str(slot)
                if waiting.moves and self._is_weight(slot):
                    values[name].add_(waiting.parts[ring][name])
                elif waiting.faulty and slot.kept_as:
                    values[name].zero_()  # the optimizer starts anew
                else:
                    values[name].copy_(waiting.parts[ring][name])
        return vector

    def fault(self, vectors: Mapping[int, torch.Tensor]) -> str:
        """Why a copy must not enter an average; empty if it may."""
        for ring, slots in self._slots.items():
            if is_finite(vectors[ring]):
                continue
            parts = views(vectors[ring], _named(self._tensors(slots)))
            return f"NaN or Inf in {next(name for name, part in parts.items() if not is_finite(part))}"
        return ""

    def prepare(self, average: RoundAverage) -> None:
        """Keep an average until its round is settled.

        Weights stay in the vector of the round, from which they are added or copied; the rest will
        be replaced, and gets memory of its own.
        """
        parts: dict[int, dict[str, torch.Tensor]] = {}
        for ring, slots in self._slots.items():
            tensors = self._tensors(slots)
            values = views(average.values[ring], _named(tensors))
            for slot in slots:
                if not self._is_weight(slot):
                    values[str(slot)] = copy_like(values[str(slot)], tensors[slot])
            parts[ring] = values
        self._prepared[average.round] = _Prepared(average.assign, average.faulty, parts)

    def settle(self, round_id: RoundId, *, commit: bool) -> None:
        """Apply the average of a round, before all that is asked of the worker later; or drop it."""
        prepared = self._prepared.pop(round_id, None)
        if prepared is not None and commit:
            self._worker.post(lambda: self._apply(prepared))

    def _apply(self, prepared: _Prepared) -> None:
        if prepared.assign:
            self._assign(prepared)
        else:
            self._waiting.append(prepared)
            self._execution.after_step(lambda: self._change(prepared))

    def _change(self, prepared: _Prepared) -> None:
        self._waiting.remove(prepared)
        if prepared.faulty:
            self._start_anew(prepared)
        else:
            self._add(prepared)

    def _add(self, prepared: _Prepared) -> None:
        """Weights move by what the average differs from the copy; the rest becomes the average."""
        for ring, slots in self._slots.items():
            part = prepared.parts[ring]
            self._execution.add({slot.key: part[str(slot)] for slot in filter(self._is_weight, slots)})
            self._replace(slots, part)

    def _assign(self, prepared: _Prepared) -> None:
        """Everything becomes the average."""
        for ring, slots in self._slots.items():
            part = prepared.parts[ring]
            weights = filter(self._is_weight, slots)
            self._execution.assign({slot.key: part[str(slot)] for slot in weights})
            self._replace(slots, part)
        self._worker.renew()

    def _start_anew(self, prepared: _Prepared) -> None:
        """What the optimizer keeps is no better than the weights that it made."""
        self._assign(prepared)
        if self._execution.updates.optimizer is not None:
            self._execution.updates.optimizer.state.clear()

    def _is_weight(self, slot: _Slot) -> bool:
        return not slot.kept_as and slot.key in self._execution.trained()

    def _replace(self, slots: Iterable[_Slot], average: Mapping[str, torch.Tensor]) -> None:
        """Buffers and optimizer state, in new memory: graphs under way may hold on to the old."""
        for slot in slots:
            if slot.kept_as:
                state = self._state_of(slot.key)
                if slot.kept_as in state:  # else no update has been made yet
                    state[slot.kept_as] = average[str(slot)]
            elif not self._is_weight(slot):
                self._execution.module.replace_buffer(slot.key, average[str(slot)])

    def _tensors(self, slots: Iterable[_Slot]) -> dict[_Slot, torch.Tensor]:
        own = self._execution.module.state_tensors()
        return {slot: self._kept(slot, own) if slot.kept_as else own[slot.key] for slot in slots}

    def _kept(self, slot: _Slot, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found = self._state_of(slot.key).get(slot.kept_as)
        return torch.zeros_like(own[slot.key]) if found is None else found

    def _state_of(self, key: str) -> dict[str, torch.Tensor]:
        optimizer = self._execution.updates.optimizer
        assert optimizer is not None
        found: dict[str, torch.Tensor] = optimizer.state.get(self._execution.trained()[key], {})
        return found


def _count(tensors: Mapping[_Slot, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _named(tensors: Mapping[_Slot, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(slot): tensor for slot, tensor in tensors.items()}


def state_names(optimizer: Optimizer) -> dict[int, tuple[str, ...]]:
    """What an optimizer keeps of a weight that has the weight's shape, by the number of dimensions.

    Found with a small weight of each kind, as an optimizer keeps nothing before its first step, and
    all clusters must know what they average.
    """
    dimensions = {p.dim() for group in optimizer.param_groups for p in group["params"]}
    return {count: _names_for(optimizer, count) for count in sorted(dimensions)}


def _is_like(kept: object, name: str, weight: torch.Tensor) -> bool:
    """Numbers of a weight; the count of steps is none, although it has the shape of a single number."""
    if not isinstance(kept, torch.Tensor) or name == "step":
        return False
    return kept.is_floating_point() and kept.shape == weight.shape


def _names_for(optimizer: Optimizer, dimensions: int) -> tuple[str, ...]:
    weight = torch.nn.Parameter(torch.zeros([2 + size for size in range(dimensions)]))
    weight.grad = torch.zeros_like(weight)
    group = {**optimizer.param_groups[0], "params": [weight]}
    trial = object.__new__(type(optimizer))
    step: Callable[[], object] = trial.step
    try:
        Optimizer.__init__(trial, [group], dict(optimizer.defaults))
        step()
    except Exception as error:  # whatever a user's optimizer does
        raise SettingsError(
            f"average_optim=True cannot find out what {type(optimizer).__name__} keeps ({error}); "
            "use average_optim=False"
        ) from error
    kept = trial.state[weight].items()
    return tuple(sorted(name for name, value in kept if _is_like(value, name, weight)))
