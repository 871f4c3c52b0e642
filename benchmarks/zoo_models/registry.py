"""What an entry of the zoo is, and how one is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

BATCH = 4
"""Examples in the batch of every model. No other dimension that a test may shrink has this size."""

Source = Literal["torchvision", "timm", "transformers", "torch.nn", "torch.jit"]
Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Reference:
    """What the stages are compared with: the model, altered."""

    alter: Callable[[nn.Module], None]
    note: str
    """Says in the report what is compared, and why."""


@dataclass(frozen=True)
class ZooModel:
    """A model and inputs for it, made anew at each call of ``make``."""

    name: str
    source: Source
    make: Callable[[], Example]
    refusal: str | None = None
    """Part of the message that splitting it must end with; None for a model that must split."""
    reference: Reference | None = None
    """Set where the stages are not compared with the model as it is."""

    def build(self, seed: int = 0) -> Example:
        """The model, its arguments and keyword arguments: the same ones for the same seed."""
        torch.manual_seed(seed)
        return self.make()


def entry(
    models: list[ZooModel],
    source: Source,
    name: str | None = None,
    refusal: str | None = None,
    reference: Reference | None = None,
) -> Callable[[Callable[[], Example]], Callable[[], Example]]:
    """Decorator that adds a factory to ``models`` under its own name, underscores as hyphens."""

    def register(make: Callable[[], Example]) -> Callable[[], Example]:
        given = name or make.__name__.replace("_", "-")
        models.append(ZooModel(given, source, make, refusal, reference))
        return make

    return register


def tokens(length: int, vocabulary: int = 99) -> torch.Tensor:
    """A batch of token ids; 0 and 1 are left out because models read them as padding."""
    return torch.randint(3, vocabulary, (BATCH, length))


def padding_mask(length: int) -> torch.Tensor:
    """An attention mask in which each row of the batch ends one token earlier than the last."""
    kept = length - torch.arange(BATCH)
    return (torch.arange(length) < kept[:, None]).long()


def image(size: int, channels: int = 3) -> torch.Tensor:
    """A batch of square images."""
    return torch.randn(BATCH, channels, size, size)
