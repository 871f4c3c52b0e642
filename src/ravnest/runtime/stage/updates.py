"""Updates of a stage's weights: gradients are accumulated, clipped and passed to the optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ravnest.errors import SettingsError, StageFormatError
from ravnest.runtime.stage.look_ahead import LookAhead
from ravnest.runtime.stage.optimizer_state import FieldValue, OptimizerState, PackedState
from ravnest.runtime.stage.packed_tensor import PackedTensor
from ravnest.runtime.stage.weight_average import WeightAverage
from ravnest.split.element_wise import element_wise
from ravnest.split.gradients import add_gradient
from ravnest.split.graph import StateSpec
from ravnest.store.checkpoint import EMA, LazyTensor
from ravnest.types import StateForm

_ROUNDING = 1e-6

OptimizerParams = Mapping[str, Any] | Callable[[list[tuple[str, nn.Parameter]]], Any]


@dataclass(frozen=True)
class UpdateRule:
    """Optimizer, scheduler and clipping chosen by the user; each stage applies them to its weights."""

    optimizer: type[Optimizer] | None = None
    optimizer_params: OptimizerParams = field(default_factory=dict)
    scheduler: Callable[..., Any] | None = None
    scheduler_params: Mapping[str, Any] = field(default_factory=dict)
    scheduler_each_epoch: bool = True
    scheduler_steps: float = 1.0
    """Steps of the scheduler per update, if it is not stepped each epoch."""
    clip: float | None = None
    """Largest norm of the gradients of the whole model."""
    clip_value: float | None = None
    """Largest absolute value of an element of a gradient."""
    plateau_metric: str = ""
    """Metric that a ``ReduceLROnPlateau`` scheduler gets; empty: the first one."""
    look_ahead: bool = False
    """Run forwards whose gradients are late on predicted weights (``LookAhead``)."""
    stop_on_nan: int | None = 1
    """Updates in a row with a loss that is not finite after which training stops; None: never."""
    ema: float | None = None
    """Decay of the exponential moving average of the weights; None: there is none."""
    state: StateForm = "float32"
    """Form of the optimizer's state between updates."""

    def check(self) -> None:
        """Raise ``SettingsError`` if no stage could use the settings; it says what to pass instead."""
        optimizer = self.optimizer
        if optimizer is None:
            raise SettingsError(
                "Node needs an optimizer to train: Node(optimizer=torch.optim.AdamW, "
                "optimizer_params={'lr': 1e-3})"
            )
        if isinstance(optimizer, Optimizer):
            raise SettingsError(
                f"optimizer is an instance of {type(optimizer).__name__}: pass the class, "
                f"optimizer=torch.optim.{type(optimizer).__name__}, and its settings as "
                "optimizer_params; each stage creates its own instance"
            )
        if not callable(optimizer):
            raise SettingsError(f"optimizer must be a class of torch.optim, not {optimizer!r}")
        if isinstance(optimizer, type) and _needs_closure(optimizer):
            raise SettingsError(
                f"{optimizer.__name__} evaluates the loss several times per step (a closure), which a "
                "pipeline cannot do; use another optimizer, such as torch.optim.AdamW"
            )
        for name, limit in (("clip_grad_norm", self.clip), ("clip_grad_value", self.clip_value)):
            if limit is not None and not limit > 0:
                raise SettingsError(f"{name} must be a positive number, not {limit!r}")
        if self.state == "int8" and not getattr(optimizer, "__module__", "").startswith("torch.optim."):
            name = getattr(optimizer, "__name__", repr(optimizer))
            raise SettingsError(
                f"optimizer_state='int8' updates parameters one after the other, which {name} may not "
                "expect: use an optimizer of torch.optim, or optimizer_state='float32'"
            )
        if self.clip is not None and self.clip_value is not None:
            raise SettingsError("give clip_grad_norm or clip_grad_value, not both")

    def check_row_blocks(self, state: Iterable[StateSpec]) -> None:
        """Raise ``SettingsError`` if the optimizer would not update blocks of rows as a whole tensor."""
        cut = next((e.model_names[0] for e in state if e.rows is not None and e.trainable), None)
        name = getattr(self.optimizer, "__name__", repr(self.optimizer))
        if cut is not None and self.optimizer is not None and not element_wise(self.optimizer):
            raise SettingsError(
                f"the plan cuts {cut} along its rows, and {name} may read tensors as a whole: use an "
                "optimizer that updates each element on its own, such as torch.optim.AdamW, or pass "
                "optimizer= to clusterize, which then plans with whole tensors"
            )


class Updates:
    """Optimizer, scheduler and accumulated gradients of one stage."""

    def __init__(
        self,
        rule: UpdateRule,
        parameters: Mapping[str, nn.Parameter],
        names: Mapping[str, str] | None = None,
    ) -> None:
        """``parameters``: the parameters that this stage trains, by key. ``names``: their names in the
        model, if they are not the keys.
        """
        self._rule = rule
        self._parameters = dict(parameters)
        self._names = names or {}
        self._optimizer: Optimizer | None = None
        self._state: OptimizerState | None = None
        self._scheduler: Any = None
        self._scheduler_steps = 0
        """Steps that the scheduler has made after updates."""
        self._scheduler_due = 0.0
        """Part of the scheduler's next step that the updates so far have made due; below 0: updates of
        an epoch that began anew make no steps until it is 0."""
        self._epoch_steps = 0.0
        """Steps of the scheduler that the updates of the epoch so far have made due."""
        self.done = 0
        """Number of updates so far."""
        self.average: WeightAverage | None = None
        """Moving average of the weights; None if none is kept, or nothing trains."""
        if self._parameters:
            if rule.ema is not None:
                self.average = WeightAverage(rule.ema, self._parameters)
            self._optimizer = _make_optimizer(rule, self._parameters, names or {})
            make_state = PackedState if rule.state == "int8" else OptimizerState
            self._state = make_state(self._optimizer, self._parameters)
            if rule.scheduler is not None:
                self._scheduler = _make_scheduler(rule, self._optimizer)

    @property
    def stop_on_nan(self) -> int | None:
        """Updates in a row with a loss that is not finite after which training stops; None: never."""
        return self._rule.stop_on_nan

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Weights that this stage trains, by their names in the model."""
        return {self._names.get(key, key): weight for key, weight in self._parameters.items()}

    @property
    def learning_rates(self) -> list[float]:
        """Learning rates of the optimizer's parameter groups; empty if nothing trains."""
        return [] if self._optimizer is None else [g["lr"] for g in self._optimizer.param_groups]

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the first parameter group in the next update; None if nothing trains."""
        return float(self.learning_rates[0]) if self.learning_rates else None

    @property
    def optimizer(self) -> Optimizer | None:
        """Optimizer of the stage; None if nothing trains."""
        return self._optimizer

    @property
    def state(self) -> OptimizerState | None:
        """State of the optimizer between updates; None if nothing trains."""
        return self._state

    def look_ahead(self) -> LookAhead | None:
        """Return predictions of the weights by the optimizer's state; None if nothing trains."""
        if self._optimizer is None or self._state is None:
            return None
        return LookAhead(self._optimizer, self._parameters, self._state.values)

    def clear_state(self) -> None:
        """Forget the optimizer's state."""
        if self._state is not None:
            self._state.clear()

    def add(self, key: str, gradient: torch.Tensor, taken: set[int]) -> None:
        """Accumulate a gradient, if the weight is trained here; see ``add_gradient``."""
        if (parameter := self._parameters.get(key)) is not None:
            add_gradient(parameter, gradient, taken)

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Accumulated gradients by key."""
        return {key: p.grad for key, p in self._parameters.items() if p.grad is not None}

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return the accumulated gradients by key, and hold them no longer."""
        taken: dict[str, torch.Tensor] = {}
        for key, parameter in self._parameters.items():
            if parameter.grad is not None:
                taken[key], parameter.grad = parameter.grad, None
        return taken

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Hold accumulated gradients; keys that are not trained here are ignored."""
        for key, parameter in self._parameters.items():
            if key in gradients:
                parameter.grad = gradients[key]

    def norms(self) -> dict[str, float]:
        """Return the norm of each gradient accumulated so far."""
        return {
            key: float(torch.linalg.vector_norm(parameter.grad))
            for key, parameter in self._parameters.items()
            if parameter.grad is not None
        }

    def step(self, count: int, total_norm: float | None = None) -> None:
        """Apply the mean of ``count`` gradients.

        ``total_norm`` is the norm of the whole model's mean gradient; without it, gradients are clipped
        by the norm of this stage alone.
        """
        self.done += 1
        if self._optimizer is None or self._state is None:
            return
        self._take_mean(count)
        self._clip(total_norm)
        self._state.step(self.done)
        self._optimizer.zero_grad(set_to_none=True)
        if not self._rule.scheduler_each_epoch and not isinstance(self._scheduler, ReduceLROnPlateau):
            self._step_scheduler_after_update()

    def average_weights(self) -> None:
        """Include the weights after an update in their moving average, if there is one."""
        if self.average is not None:
            self.average.update(first=self.done == 1)

    def end_epoch(self) -> None:
        """Step the scheduler after the stage's last update of an epoch."""
        self._epoch_steps = 0.0
        if self._rule.scheduler_each_epoch and not isinstance(self._scheduler, ReduceLROnPlateau):
            self._step_scheduler()

    def validated(self, value: float, metrics: Mapping[str, float]) -> None:
        """Pass the result of a validation to a ``ReduceLROnPlateau`` scheduler."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(metrics.get(self._rule.plateau_metric, value))

    def capture(self) -> tuple[dict[str, torch.Tensor | LazyTensor], dict[str, Any]]:
        """Return the optimizer's tensors, by ``key/field``, and everything else as plain values.

        The tensors are not copies; packed ones are unpacked when they are loaded. Nothing is accumulated
        between two updates.
        """
        tensors: dict[str, torch.Tensor | LazyTensor] = {}
        plain: dict[str, Any] = {
            "done": self.done,
            "scheduler_steps": self._scheduler_steps,
            "scheduler_due": self._scheduler_due,
            "epoch_steps": self._epoch_steps,
        }
        if self._optimizer is None or self._state is None:
            return tensors, plain
        if self.average is not None:
            # In a checkpoint they follow their weights, also to stages that are cut elsewhere.
            tensors |= {f"{key}/{EMA}": average for key, average in self.average.tensors.items()}
        fields: dict[str, dict[str, Any]] = {}
        for key in self._parameters:
            for name, value in self._state.fields(key).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key}/{name}"] = value
                elif isinstance(value, PackedTensor):
                    tensors[f"{key}/{name}"] = LazyTensor(torch.float32, value.shape, value.unpack)
                else:
                    fields.setdefault(key, {})[name] = value
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        scheduler = None if self._scheduler is None else self._scheduler.state_dict()
        return tensors, plain | {"fields": fields, "groups": groups, "scheduler": scheduler}

    def stored(self, name: str, tensor: torch.Tensor) -> FieldValue:
        """Return a tensor of a checkpoint, by ``key/field``, in the form in which it is kept."""
        is_average = name.rpartition("/")[2] == EMA
        return tensor if is_average or self._state is None else self._state.stored(name, tensor)

    def restore(self, tensors: Mapping[str, FieldValue], plain: Mapping[str, Any]) -> None:
        """Continue from what ``capture`` has returned; ``StageFormatError`` if it does not fit.

        ``tensors`` are those of a checkpoint that have gone through ``stored``.
        """
        self.done, self._scheduler_steps = plain["done"], plain["scheduler_steps"]
        # Older checkpoints lack them: less than one step is lost.
        self._scheduler_due = plain.get("scheduler_due", 0.0)
        self._epoch_steps = plain.get("epoch_steps", 0.0)
        if self._optimizer is None or self._state is None:
            return
        groups = plain["groups"]
        if len(groups) != len(self._optimizer.param_groups):
            raise StageFormatError(
                f"the checkpoint has {len(groups)} parameter groups, the optimizer has "
                f"{len(self._optimizer.param_groups)}: use the optimizer_params of the earlier run"
            )
        for group, stored in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(stored)
        averages: dict[str, torch.Tensor] = {}
        states: dict[str, dict[str, Any]] = {key: dict(f) for key, f in plain["fields"].items()}
        for name, value in tensors.items():
            key, _, field_name = name.rpartition("/")
            if field_name == EMA:
                averages[key] = value
            else:
                states.setdefault(key, {})[field_name] = value
        if self.average is not None:
            self.average.restore(averages)
        for key, state in states.items():
            if key in self._parameters:
                self._state.restore(key, state)
        if self._scheduler is not None and plain["scheduler"] is not None:
            self._scheduler.load_state_dict(plain["scheduler"])

    def _step_scheduler_after_update(self) -> None:
        """Make the steps that are due. Updates count with the ratio at which they were made: a plan with
        other clusters has another one.
        """
        self._scheduler_due += self._rule.scheduler_steps
        self._epoch_steps += self._rule.scheduler_steps
        steps = max(int(self._scheduler_due + _ROUNDING), 0)
        for _ in range(steps):
            self._step_scheduler()
        self._scheduler_steps += steps
        self._scheduler_due -= steps

    def _step_scheduler(self) -> None:
        """Step the scheduler, unless it has reached its last step: ``OneCycleLR`` fails beyond it."""
        scheduler = self._scheduler
        total = getattr(scheduler, "total_steps", None)
        if scheduler is not None and (total is None or scheduler.last_epoch < total - 1):
            scheduler.step()

    def _take_mean(self, count: int) -> None:
        if count > 1:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.div_(count)

    def _clip(self, total_norm: float | None) -> None:
        clip = self._rule.clip
        if self._rule.clip_value is not None:
            nn.utils.clip_grad_value_(self._parameters.values(), self._rule.clip_value)
        if clip is None:
            return
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if total_norm is None:
            total = nn.utils.get_total_norm(gradients)
        else:
            total = torch.tensor(total_norm, dtype=torch.float32)
        nn.utils.clip_grads_with_norm_(self._parameters.values(), clip, total)


def _make_optimizer(
    rule: UpdateRule, parameters: Mapping[str, nn.Parameter], names: Mapping[str, str]
) -> Optimizer:
    assert rule.optimizer is not None
    given = rule.optimizer_params
    make: Callable[..., Optimizer] = rule.optimizer
    try:
        if callable(given):
            groups = given([(names.get(key, key), p) for key, p in parameters.items()])
            if isinstance(groups, tuple) and len(groups) == 2 and isinstance(groups[1], Mapping):
                return make(groups[0], **groups[1])
            return make(groups)
        return make(list(parameters.values()), **given)
    except (TypeError, ValueError, KeyError) as error:
        raise SettingsError(f"the optimizer does not accept optimizer_params: {error}") from error


def _make_scheduler(rule: UpdateRule, optimizer: Optimizer) -> Any:
    assert rule.scheduler is not None
    try:
        return rule.scheduler(optimizer, **rule.scheduler_params)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"lr_scheduler does not accept lr_scheduler_params: {error}") from error


def _needs_closure(optimizer: type[Optimizer]) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
