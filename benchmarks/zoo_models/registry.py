"""Types of the zoo's entries, and a decorator that declares one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

BATCH = 4
"""Batch size of every model; no other dimension that a test may shrink has this size."""

Source = Literal["torchvision", "timm", "transformers", "torch.nn", "torch.jit"]
Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Reference:
    """Altered model that the stages are compared with."""

    alter: Callable[[nn.Module], None]
    note: str
    """Explanation for the report."""


@dataclass(frozen=True)
class ZooModel:
    """A model with inputs, built by ``make``."""

    name: str
    source: Source
    make: Callable[[], Example]
    refusal: str | None = None
    """Part of the error message that splitting must raise; None if the model must split."""
    reference: Reference | None = None
    """Set if the stages are not compared with the unchanged model."""

    def build(self, seed: int = 0) -> Example:
        """Return the model, its arguments and keyword arguments, reproducible for a seed."""
        torch.manual_seed(seed)
        return self.make()


def entry(
    models: list[ZooModel],
    source: Source,
    name: str | None = None,
    refusal: str | None = None,
    reference: Reference | None = None,
) -> Callable[[Callable[[], Example]], Callable[[], Example]]:
    """Return a decorator that adds a factory to ``models``, by default under its name with hyphens."""

    def register(make: Callable[[], Example]) -> Callable[[], Example]:
        given = name or make.__name__.replace("_", "-")
        models.append(ZooModel(given, source, make, refusal, reference))
        return make

    return register


def tokens(length: int, vocabulary: int = 99) -> torch.Tensor:
    """Return a batch of token ids without the small ones, which models use for padding."""
    return torch.randint(3, vocabulary, (BATCH, length))


def padding_mask(length: int) -> torch.Tensor:
    """Return an attention mask in which each row is one token shorter than the one before."""
    kept = length - torch.arange(BATCH)
    return (torch.arange(length) < kept[:, None]).long()


def image(size: int, channels: int = 3) -> torch.Tensor:
    """Return a batch of square images."""
    return torch.randn(BATCH, channels, size, size)
