"""Gradients that become ``.grad``, as ``loss.backward()`` makes them, without needless copies."""

from __future__ import annotations

import torch
from torch import nn


def add_gradient(parameter: nn.Parameter, gradient: torch.Tensor, taken: set[int]) -> None:
    """Add to ``.grad``. The gradient becomes the parameter's own and the caller forgets it.

    One that shares memory with something in ``taken`` (``memory_of``) is copied; what becomes
    ``.grad`` as it is, is added to ``taken``.
    """
    old = parameter.grad
    if old is None:
        parameter.grad = _own(gradient, parameter, taken)
    elif old.is_sparse or gradient.is_sparse:
        parameter.grad = old + gradient
    else:
        old.add_(gradient)


def memory_of(tensor: torch.Tensor) -> int:
    """Where a tensor's data is; tensors that share memory have the same."""
    return 0 if tensor.is_sparse else tensor.untyped_storage().data_ptr()


def _own(gradient: torch.Tensor, parameter: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The gradient as it is if nothing else uses its memory, which is ``taken`` then; else a copy."""
    if gradient.is_sparse:
        return gradient.clone()
    memory = gradient.untyped_storage()
    start = memory.data_ptr()
    alone = start not in taken and memory.nbytes() == parameter.nbytes
    taken.add(start)
    return gradient if alone and gradient.stride() == parameter.stride() else gradient.clone()
