"""Add gradients to ``.grad`` as ``loss.backward()`` does, without needless copies."""

from __future__ import annotations

import torch
from torch import nn


def add_gradient(parameter: nn.Parameter, gradient: torch.Tensor, taken: set[int]) -> None:
    """Add a gradient to ``.grad``. The parameter takes over the tensor; the caller must not use it.

    A gradient whose memory (``memory_of``) is in ``taken`` is copied. Memory that becomes ``.grad``
    without a copy is added to ``taken``.
    """
    parameter.grad = sum_gradients(parameter.grad, gradient, parameter, taken)


def sum_gradients(
    old: torch.Tensor | None, gradient: torch.Tensor, parameter: torch.Tensor, taken: set[int]
) -> torch.Tensor:
    """Return the sum, formed in ``old`` if there is one; see ``add_gradient``."""
    if old is None:
        return own_gradient(gradient, parameter, taken)
    if old.is_sparse or gradient.is_sparse:
        return old + gradient
    return old.add_(gradient)


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, which tensors that share memory have in common."""
    return 0 if tensor.is_sparse else tensor.untyped_storage().data_ptr()


def own_gradient(gradient: torch.Tensor, parameter: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """Return the gradient itself if nothing else uses its memory, else a copy; update ``taken``."""
    if gradient.is_sparse:
        return gradient.clone()
    memory = gradient.untyped_storage()
    start = memory.data_ptr()
    alone = start not in taken and memory.nbytes() == parameter.nbytes
    taken.add(start)
    return gradient if alone and gradient.stride() == parameter.stride() else gradient.clone()
