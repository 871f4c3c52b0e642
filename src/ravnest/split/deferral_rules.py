"""Formulas of weight gradients that can be deferred, by operator.

They call the kernels that autograd calls, so that the results are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class DeferralRule:
    """Positions of an operator's input, weight and bias, and its formulas."""

    input: int
    weight: int
    bias: int
    dimensions: Collection[int] | None
    """Dimensions of the input for which the formulas hold; ``None`` for two or more."""
    input_gradient: Callable[[SavedCall], torch.Tensor]
    weight_gradients: Callable[[SavedCall, bool], tuple[torch.Tensor, torch.Tensor | None]] | None = None
    """Gradients of the weight and, if the flag is set, of the bias; None if there are factors."""
    factors: Callable[[SavedCall], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None
    """Matrices whose product is the gradient of the weight; the sum of the rows of the third is the
    gradient of the bias."""
    any_layout: bool = False
    """True if the kernel for an input that is not contiguous does not depend on what needs gradients."""

    def fits(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether the operator's arguments are of the kind that the formulas cover."""
        if not (weight.requires_grad and torch.is_grad_enabled() and x.dtype == weight.dtype):
            return False
        return x.dim() >= 2 if self.dimensions is None else x.dim() in self.dimensions


class SavedCall(NamedTuple):
    """Values that the formulas read."""

    gradient: torch.Tensor
    """Gradient of the operator's output."""
    x: torch.Tensor
    weight: torch.Tensor
    arguments: tuple[Any, ...]
    """All arguments of the operator, without its tensors."""


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _linear_input(saved: SavedCall) -> torch.Tensor:
    return _rows(saved.gradient).mm(saved.weight).view(saved.x.shape)


def _linear_factors(saved: SavedCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = _rows(saved.gradient)
    return rows.t(), _rows(saved.x), rows


def _addmm_input(saved: SavedCall) -> torch.Tensor:
    return saved.gradient.mm(saved.weight.t())


def _addmm_factors(saved: SavedCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return saved.x.t(), saved.gradient, saved.gradient


def _convolution(dimensions: int) -> DeferralRule:
    """Return the rule of a convolution over this number of dimensions."""

    def backward(saved: SavedCall, mask: list[bool]) -> tuple[Any, ...]:
        given = [*saved.arguments[3:], *_CONVOLUTION_DEFAULTS[max(len(saved.arguments) - 3, 0) :]]
        stride, padding, dilation = (_each(value, dimensions) for value in given[:3])
        found: tuple[Any, ...] = torch.ops.aten.convolution_backward(
            saved.gradient,
            saved.x,
            saved.weight,
            [saved.weight.shape[0]],
            stride,
            padding,
            dilation,
            False,  # transposed
            [0] * dimensions,  # output padding
            given[3],
            mask,
        )
        return found

    def of_input(saved: SavedCall) -> torch.Tensor:
        result: torch.Tensor = backward(saved, [True, False, False])[0]
        return result

    def of_weights(saved: SavedCall, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        return backward(saved, [False, True, bias])[1:]

    return DeferralRule(0, 1, 2, (dimensions + 2,), of_input, of_weights, any_layout=True)


_CONVOLUTION_DEFAULTS = (1, 0, 1, 1)
"""Stride, padding, dilation and groups."""


def _each(value: Any, dimensions: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * dimensions if len(values) == 1 else values


RULES = {
    "aten::linear.default": DeferralRule(0, 1, 2, None, _linear_input, factors=_linear_factors),
    "aten::addmm.default": DeferralRule(1, 2, 0, (2,), _addmm_input, factors=_addmm_factors),
    "aten::conv1d.default": _convolution(1),
    "aten::conv2d.default": _convolution(2),
    "aten::conv3d.default": _convolution(3),
}
"""Rules by the name of the operator."""
