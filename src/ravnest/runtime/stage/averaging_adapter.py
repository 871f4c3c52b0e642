"""The averaged tensors of a stage: weights and their moving averages, buffers, optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from ravnest.averaging.ports import RoundAverage
from ravnest.averaging.vectors import copy_like, flatten, is_finite, views
from ravnest.errors import SettingsError
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.inbox import WorkerInbox
from ravnest.runtime.stage.weight_average import WeightAverage
from ravnest.store.checkpoint import EMA
from ravnest.store.node_spec import RingSpec
from ravnest.wire.messages import RoundId


@dataclass(frozen=True)
class _Slot:
    """A tensor of a ring: a weight, a buffer, or the moving average or optimizer state of a weight."""

    key: str
    state_name: str = ""
    """Name in the optimizer's state, or ``EMA``; empty for the weight or buffer itself."""

    @property
    def is_average(self) -> bool:
        """True for the moving average of a weight."""
        return self.state_name == EMA

    def __str__(self) -> str:
        return f"{self.state_name} of {self.key}" if self.state_name else self.key


@dataclass(frozen=True, eq=False)
class _StoredAverage:
    """An average that waits for its Decision, or for the next update."""

    average: RoundAverage
    tensors: dict[int, dict[str, torch.Tensor]]
    """By ring and slot: the average; for weights that keep training, the change (average - copy)."""


class AveragingAdapter:
    """The tensors of a stage by ring; implements ``averaging.ports.WeightsPort``.

    Calls may come from any thread; all work on the stage is queued for the worker's thread.
    """

    def __init__(
        self,
        execution: StageExecution,
        inbox: WorkerInbox,
        rings: Iterable[RingSpec],
        *,
        with_optimizer: bool,
    ) -> None:
        self._execution = execution
        self._inbox = inbox
        tensors = execution.module.state_tensors()
        keys = {name: entry.key for entry in execution.module.spec.state for name in entry.names}
        optimizer = execution.updates.optimizer
        states = state_names(optimizer) if with_optimizer and optimizer is not None else {}
        weights = execution.trained()
        averages = () if execution.updates.average is None else (EMA,)
        self._stored: dict[RoundId, _StoredAverage] = {}
        self._waiting: list[_StoredAverage] = []
        """Averages to apply after the next update, in this order."""
        self._slots: dict[int, list[_Slot]] = {}
        for ring in rings:
            slots = [_Slot(keys[name]) for name in ring.names]
            for slot in list(slots):
                if slot.key in weights:
                    of_optimizer = states.get(tensors[slot.key].dim(), ())
                    slots += [_Slot(slot.key, name) for name in (*averages, *of_optimizer)]
            self._slots[ring.id] = sorted(slots, key=lambda slot: not self._moves(slot))

    def sizes(self) -> dict[int, int]:
        """Return the number of elements in each ring."""
        return {ring: _count(self._tensors(slots)) for ring, slots in self._slots.items()}

    def moving(self) -> dict[int, int]:
        """Return the number of elements of trained weights and their moving averages per ring.

        They come first.
        """
        return {
            ring: _count(self._tensors(filter(self._moves, slots)))
            for ring, slots in self._slots.items()
        }

    def copy(self, *, idle: bool, then: Callable[[dict[int, torch.Tensor]], None]) -> None:
        """Copy the tensors between two computations or, with ``idle``, when none is in flight."""

        def work() -> None:
            if idle:
                self._execution.catch_up()
            then({ring: self._copy(ring, slots) for ring, slots in self._slots.items()})

        if idle:
            self._inbox.post_when_idle(work)
        else:
            self._inbox.post(work)

    def _copy(self, ring: int, slots: Sequence[_Slot]) -> torch.Tensor:
        """Return the values as they will be after the waiting averages are applied.

        Otherwise the next average would apply the same change a second time.
        """
        tensors = _named(self._tensors(slots))
        vector = flatten(tensors)
        values = views(vector, tensors)
        self._execution.undo_prediction(
            {slot.key: values[str(slot)] for slot in slots if self._is_weight(slot)}
        )
        for waiting in self._waiting:
            for slot in slots:
                name = str(slot)
                if waiting.average.moves and self._moves(slot):
                    values[name].add_(waiting.tensors[ring][name])
                elif waiting.average.faulty and slot.state_name and not slot.is_average:
                    values[name].zero_()  # the optimizer state is reset
                else:
                    values[name].copy_(waiting.tensors[ring][name])
        return vector

    def fault(self, vectors: Mapping[int, torch.Tensor]) -> str:
        """Return why a copy must not enter an average; empty if it may."""
        for ring, slots in self._slots.items():
            if is_finite(vectors[ring]):
                continue
            named = views(vectors[ring], _named(self._tensors(slots)))
            return f"NaN or Inf in {next(name for name, part in named.items() if not is_finite(part))}"
        return ""

    def store(self, average: RoundAverage) -> None:
        """Store an average until its round is decided.

        Weights and their moving averages stay in the vector of the round, from which they are added or
        copied; the other tensors are replaced, and get memory of their own.
        """
        stored: dict[int, dict[str, torch.Tensor]] = {}
        for ring, slots in self._slots.items():
            tensors = self._tensors(slots)
            values = views(average.values[ring], _named(tensors))
            for slot in slots:
                if not self._moves(slot):
                    values[str(slot)] = copy_like(values[str(slot)], tensors[slot])
            stored[ring] = values
        self._stored[average.round] = _StoredAverage(average, stored)

    def settle(self, round_id: RoundId, *, commit: bool) -> None:
        """Apply the average of a round before any later work of the stage; or drop it."""
        stored = self._stored.pop(round_id, None)
        if stored is not None and commit:
            self._inbox.post(lambda: self._apply(stored))

    def _apply(self, stored: _StoredAverage) -> None:
        if stored.average.assign:
            self._assign(stored)
        else:
            self._waiting.append(stored)
            self._execution.after_step(lambda: self._apply_after_update(stored))

    def _apply_after_update(self, stored: _StoredAverage) -> None:
        self._waiting.remove(stored)
        if stored.average.faulty:
            self._reset(stored)
        else:
            self._add(stored)

    def _add(self, stored: _StoredAverage) -> None:
        """Add the change (average - copy) to weights and moving averages; replace the other tensors."""
        for ring, slots in self._slots.items():
            tensors = stored.tensors[ring]
            weights = filter(self._is_weight, slots)
            self._execution.add({slot.key: tensors[str(slot)] for slot in weights})
            if self._averages is not None:
                self._averages.add({s.key: tensors[str(s)] for s in slots if s.is_average})
            self._replace(slots, tensors)

    def _assign(self, stored: _StoredAverage) -> None:
        """Replace all tensors by the average."""
        for ring, slots in self._slots.items():
            tensors = stored.tensors[ring]
            weights = filter(self._is_weight, slots)
            self._execution.assign({slot.key: tensors[str(slot)] for slot in weights})
            if self._averages is not None:
                self._averages.assign({s.key: tensors[str(s)] for s in slots if s.is_average})
            self._replace(slots, tensors)

    def _reset(self, stored: _StoredAverage) -> None:
        """Replace all tensors by the average, and clear the optimizer's state, which is faulty too."""
        self._assign(stored)
        self._execution.updates.clear_state()

    @property
    def _averages(self) -> WeightAverage | None:
        return self._execution.updates.average

    def _moves(self, slot: _Slot) -> bool:
        """Return whether updates change the tensor while a round runs, so that the change is added."""
        return slot.is_average or self._is_weight(slot)

    def _is_weight(self, slot: _Slot) -> bool:
        return not slot.state_name and slot.key in self._execution.trained()

    def _replace(self, slots: Iterable[_Slot], average: Mapping[str, torch.Tensor]) -> None:
        """Replace buffers and optimizer state, in new memory: graphs in flight may use the old."""
        for slot in slots:
            if slot.is_average:
                continue
            if slot.state_name:
                state = self._state_of(slot.key)
                if slot.state_name in state:  # absent before the first update
                    state[slot.state_name] = average[str(slot)]
            elif not self._is_weight(slot):
                self._execution.module.replace_buffer(slot.key, average[str(slot)])

    def _tensors(self, slots: Iterable[_Slot]) -> dict[_Slot, torch.Tensor]:
        own = self._execution.module.state_tensors()
        return {slot: self._state(slot, own) if slot.state_name else own[slot.key] for slot in slots}

    def _state(self, slot: _Slot, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if slot.is_average:
            assert self._averages is not None
            return self._averages.tensors[slot.key]
        found = self._state_of(slot.key).get(slot.state_name)
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
    """Return the optimizer state that has the shape of its weight: names by number of dimensions.

    Found by a trial step on a small weight of each kind, because an optimizer has no state before its
    first step, and all clusters must know what they average.
    """
    dimensions = {p.dim() for group in optimizer.param_groups for p in group["params"]}
    return {count: _names_for(optimizer, count) for count in sorted(dimensions)}


def _is_averaged(value: object, name: str, weight: torch.Tensor) -> bool:
    """Return True for state with the weight's shape; the step count is not averaged."""
    if not isinstance(value, torch.Tensor) or name == "step":
        return False
    return value.is_floating_point() and value.shape == weight.shape


def _names_for(optimizer: Optimizer, dimensions: int) -> tuple[str, ...]:
    weight = torch.nn.Parameter(torch.zeros([2 + size for size in range(dimensions)]))
    weight.grad = torch.zeros_like(weight)
    group = {**optimizer.param_groups[0], "params": [weight]}
    trial = object.__new__(type(optimizer))
    step: Callable[[], object] = trial.step
    try:
        Optimizer.__init__(trial, [group], dict(optimizer.defaults))
        step()
    except Exception as error:  # a user's optimizer may raise anything
        raise SettingsError(
            f"average_optim=True cannot determine the state of {type(optimizer).__name__} ({error}); "
            "use average_optim=False"
        ) from error
    state = trial.state[weight].items()
    return tuple(sorted(name for name, value in state if _is_averaged(value, name, weight)))
