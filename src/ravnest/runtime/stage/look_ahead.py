"""Prediction of a stage's weights after the next update, from the state of its optimizer.

A gradient that is one update late is applied to other weights than it was computed for. Optimizers move
in a similar direction from one update to the next, so that the step that their state describes, such
as Adam's ``lr * exp_avg / sqrt(exp_avg_sq)``, predicts the weights at that time. Nothing is stored: the
same state gives the same step again when the prediction is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adam, Adamax, NAdam, Optimizer

_LEAST_BYTES = 4
"""Weights with fewer bytes per element are not predicted: taking it back would round them."""

State = Mapping[str, Any]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class _Step:
    """Change of a weight: ``scale * numerator / denominator``."""

    scale: float
    numerator: torch.Tensor
    denominator: torch.Tensor | None = None

    def add_to(self, weight: torch.Tensor, sign: int) -> None:
        if self.denominator is None:
            weight.add_(self.numerator, alpha=sign * self.scale)
        else:
            weight.addcdiv_(self.numerator, self.denominator, value=sign * self.scale)


class LookAhead:
    """Steps that an optimizer is expected to make next, added to its weights and taken back.

    The state of the optimizer must not change in between; its learning rates may.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        weights: Mapping[str, torch.Tensor],
        state_of: Callable[[torch.Tensor], State] | None = None,
    ) -> None:
        """``weights`` are the optimizer's parameters by key, ``state_of`` returns the state of one."""
        self._optimizer = optimizer
        self._state_of = state_of or (lambda weight: optimizer.state.get(weight, {}))
        self._weights = dict(weights)
        self._find = next((find for kind, find in _STEPS if isinstance(optimizer, kind)), None)
        self._predicted: dict[str, Settings] = {}
        """Settings of the optimizer with which each weight was predicted."""

    @property
    def applied(self) -> bool:
        """True if the weights are predicted ones."""
        return bool(self._predicted)

    def apply(self) -> None:
        """Change the weights to those expected after the next update."""
        assert not self._predicted, "the weights are predicted already"
        if self._find is None:
            return
        settings = {
            parameter: {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        self._predicted = {
            key: settings[weight]
            for key, weight in self._weights.items()
            if weight in settings and weight.element_size() >= _LEAST_BYTES
        }
        self._add(self._weights, 1)

    def take_back(self) -> None:
        """End the prediction, if there is one."""
        self.undo(self._weights)
        self.forget()

    def undo(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Change copies of the weights to what they are without the prediction."""
        self._add(copies, -1)

    def forget(self) -> None:
        """End the prediction: the weights were replaced."""
        self._predicted = {}

    def _add(self, weights: Mapping[str, torch.Tensor], sign: int) -> None:
        with torch.no_grad():
            for key in self._predicted.keys() & weights.keys():
                step = self._step(self._weights[key], self._predicted[key])
                if step is not None:
                    step.add_to(weights[key], sign)

    def _step(self, weight: torch.Tensor, settings: Settings) -> _Step | None:
        """Return the expected step; None before the first update, or if the state does not tell it."""
        state = self._state_of(weight)
        return self._find(state, settings) if state and self._find is not None else None


def _adam(state: State, settings: Settings) -> _Step:
    first, second = settings["betas"]
    count = float(state["step"])
    squares = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    denominator = squares.sqrt().div_((1 - second**count) ** 0.5).add_(settings["eps"])
    return _Step(-float(settings["lr"]) / (1 - first**count), state["exp_avg"], denominator)


def _adamax(state: State, settings: Settings) -> _Step:
    correction = 1 - settings["betas"][0] ** float(state["step"])
    return _Step(-float(settings["lr"]) / correction, state["exp_avg"], state["exp_inf"])


def _sgd(state: State, settings: Settings) -> _Step | None:
    buffer = state.get("momentum_buffer")
    return None if buffer is None else _Step(-float(settings["lr"]), buffer)


_STEPS: tuple[tuple[type[Optimizer], Callable[[State, Settings], _Step | None]], ...] = (
    (Adam, _adam),
    (NAdam, _adam),
    (Adamax, _adamax),
    (SGD, _sgd),
)
"""Functions that read the expected step from the state of an optimizer."""
