"""Add gradients to ``.grad`` as ``loss.backward()`` does, without needless copies."""

from __future__ import annotations

import functools

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


_MOST_TERMS = 256
"""Longest rows of products that are added in place. Kernels divide longer ones into several sums."""
_LARGE_ELEMENTS = 1 << 18
"""Size of a sum from which it pays to add a product in place, even if that takes a call in Python."""


def saves_product(terms: int, total: torch.Tensor) -> bool:
    """Return whether it saves time to add a product of this number of terms to ``total`` in place."""
    return terms <= _MOST_TERMS and total.numel() >= _LARGE_ELEMENTS and total.is_cpu


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Add ``left @ right`` to ``total`` in place; return False, and do nothing, if bits would change.

    A product of its own takes memory of the size of ``total`` and the time to write and read it. Whether
    a kernel forms the same sums without it depends on the shapes; it is tried once for each.
    """
    if not product_adds_exactly(total, left, right):
        return False
    total.addmm_(left, right)
    return True


def product_adds_exactly(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether ``left @ right`` can be added to ``total`` in place without a change of bits."""
    if total.device.type != "cpu" or left.shape[1] > _MOST_TERMS or left.dtype != total.dtype:
        return False
    if not (total.is_contiguous() and left.t().is_contiguous() and right.is_contiguous()):
        return False
    return _same_bits(
        (*left.shape, *left.stride()),
        (*right.shape, *right.stride()),
        total.dtype,
        torch.get_num_threads(),
    )


@functools.cache
def _same_bits(left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype, _threads: int) -> bool:
    """Return whether sums with a product have the same bits in one step and in two.

    Matrices are given by their sizes and strides.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (left[:2], left[2:]), (right[:2], right[2:]), ((left[0], right[1]), (right[1], 1))
    a, b, total = (
        torch.empty_strided(size, stride, dtype=dtype).normal_(generator=generator)
        for size, stride in shapes
    )
    product = a.mm(b).add_(total)
    return torch.equal(product, total.addmm_(a, b))
