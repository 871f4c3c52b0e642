"""Gradients that become ``.grad``, as ``loss.backward()`` makes them, without needless copies."""

from __future__ import annotations

import torch
from torch import nn


def add_gradient(parameter: nn.Parameter, gradient: torch.Tensor, taken: set[int]) -> None:
    """Add to ``.grad``. The gradient becomes the parameter's own and the caller forgets it.

    One that shares memory with something in ``taken`` (``memory_of``) is copied; what becomes
    ``.grad`` as it is, is added to ``taken``.
    """
    if parameter.grad is None:
        parameter.grad = gradient if _can_take(gradient, parameter, taken) else gradient.clone()
        taken.add(memory_of(gradient))
    elif parameter.grad.is_sparse or gradient.is_sparse:
        parameter.grad = parameter.grad + gradient
    else:
        parameter.grad.add_(gradient)


def memory_of(tensor: torch.Tensor) -> int:
    """Where a tensor's data is; tensors that share memory have the same."""
    return 0 if tensor.is_sparse else tensor.untyped_storage().data_ptr()


def _can_take(gradient: torch.Tensor, parameter: torch.Tensor, taken: set[int]) -> bool:
    """Whether a gradient can become ``.grad`` as it is: nothing else uses its memory."""
    return (
        not gradient.is_sparse
        and gradient.stride() == parameter.stride()
        and gradient.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
        and memory_of(gradient) not in taken
    )
