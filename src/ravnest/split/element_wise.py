"""Optimizers that update each element of a tensor on its own."""

from __future__ import annotations

import torch

_ELEMENT_WISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


def element_wise(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Return True for an optimizer that updates each element of a tensor on its own.

    Only such an optimizer gives blocks of rows the updates of the whole tensor.
    """
    return optimizer in _ELEMENT_WISE
