"""Task of a small GPT that sorts: it reads digits and continues with the same digits in order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

LENGTH, KINDS = 6, 8
WIDTH, LAYERS, BATCH = 32, 4, 32


def sequences(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield digits followed by the same digits in order, and the next token at each position."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        drawn = torch.randint(0, KINDS, (BATCH, LENGTH), generator=draw)
        whole = torch.cat([drawn, drawn.sort(1).values], 1)
        yield whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy over all positions."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
