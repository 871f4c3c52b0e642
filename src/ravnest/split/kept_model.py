"""Keep the user's model as it is while it is captured and checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ravnest.split.plain_attributes import keep_attributes


@contextlib.contextmanager
def model_kept(
    model: nn.Module, written: Iterable[torch.Tensor] = (), *, attributes: bool = True
) -> Iterator[None]:
    """Put attributes, buffers and the tensors in ``written`` back afterwards.

    ``written`` are the parameters that forward writes to. The values of others are not copied, but a
    parameter that is given other memory (``weight.data = new``) gets its own back.
    """
    state = {id(each): each for each in (*model.parameters(), *model.buffers(), *written)}
    memory = [(tensor, tensor.detach()) for tensor in state.values()]
    copied = {id(each): each for each in (*model.buffers(), *written)}
    values = [(tensor, tensor.detach().clone()) for tensor in copied.values()]
    put_back = keep_attributes(model) if attributes else None
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for table, before in tables:
            table.update(before)
        if put_back is not None:
            put_back()
        with torch.no_grad():
            for tensor, own in memory:
                if tensor.data_ptr() != own.data_ptr() or tensor.shape != own.shape:
                    tensor.data = own
            for tensor, before_run in values:
                tensor.detach().copy_(before_run)
