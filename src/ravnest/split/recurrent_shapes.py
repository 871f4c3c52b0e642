"""Shapes of recurrent layers for sequences whose length is a symbol.

torch's tracer finds the shape of an LSTM, GRU or RNN by a loop over its steps, which turns the length
into a plain number. Here the shape is computed from the sizes of the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey

from ravnest.split.recurrent import STATES


@contextmanager
def lengths_vary(enabled: bool) -> Iterator[None]:
    """Trace recurrent layers without a loop over their steps, if ``enabled``."""
    if not enabled:
        yield
        return
    key = DispatchKey.CompositeImplicitAutograd
    originals = {operator: operator.py_kernels[key] for operator in STATES}
    try:
        for operator, states in STATES.items():
            operator.py_kernels[key] = _many_states if states > 1 else _one_state
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, original in originals.items():
            operator.py_kernels[key] = original
            operator._dispatch_cache.clear()


def _many_states(
    x: torch.Tensor, hidden: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *options: Any
) -> tuple[torch.Tensor, ...]:
    """Return tensors with the shapes of the results of an LSTM; gradients flow as through it."""
    zero = sum((tensor.sum() for tensor in (*hidden, *weights)), x.sum()) * 0
    bidirectional, batch_first = options[-2:]
    features = hidden[0].shape[-1] * (2 if bidirectional else 1)
    first, second = x.shape[:2]
    steps, samples = (second, first) if batch_first else (first, second)
    output = x.new_empty(steps, samples, features)
    if batch_first:
        output = output.transpose(0, 1)
    return (output + zero, *(torch.empty_like(state) + zero for state in hidden))


def _one_state(
    x: torch.Tensor, hidden: torch.Tensor, weights: Sequence[torch.Tensor], *options: Any
) -> tuple[torch.Tensor, ...]:
    """Return tensors with the shapes of the results of a GRU or RNN."""
    return _many_states(x, [hidden], weights, *options)
