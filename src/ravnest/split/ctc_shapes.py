"""Shape of a CTC loss while a model is captured.

torch's tracer looks at the kernel behind it, which has an internal result whose size depends on the
lengths. The loss itself does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey

_OPERATORS = (torch.ops.aten.ctc_loss.IntList, torch.ops.aten.ctc_loss.Tensor)
_MEAN = 1
_NONE = 0


@contextmanager
def ctc_loss_captured() -> Iterator[None]:
    """Trace ``ctc_loss`` as one operation whose shape follows from its arguments."""
    key = DispatchKey.CompositeImplicitAutograd
    before = {operator: operator.py_kernels.get(key) for operator in _OPERATORS}
    try:
        for operator in _OPERATORS:
            operator.py_kernels[key] = _loss
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernel in before.items():
            if kernel is None:
                del operator.py_kernels[key]
            else:
                operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()


def _loss(
    log_probs: torch.Tensor,
    _targets: torch.Tensor,
    _input_lengths: Any,
    _target_lengths: Any,
    _blank: int = 0,
    reduction: int = _MEAN,
    _zero_infinity: bool = False,
) -> torch.Tensor:
    """Return a tensor with the shape of the loss; gradients flow as through it."""
    each = log_probs.sum((0, 2)) if log_probs.dim() > 2 else log_probs.sum()
    return each if reduction == _NONE else each.sum()
