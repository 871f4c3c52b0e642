"""Example inputs of a model, bound to the parameters of its forward."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ravnest.errors import SplitError
from ravnest.split.structure import Structure, flatten, map_tensors
from ravnest.split.varying import Varying, find_varying

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """Example inputs by name, flattened into tensors."""

    names: tuple[str, ...]
    structures: tuple[Structure, ...]
    tensors: tuple[torch.Tensor, ...]
    positional: int
    """Number of inputs that are passed by position; the others are passed by keyword."""
    batch_size: int | None
    batch_dim: int
    varying: tuple[frozenset[int], ...] = ()
    """Other dimensions whose sizes vary, for each tensor, or nothing if there are none."""

    def leaf_paths(self) -> list[str]:
        """Return the dotted name of each tensor."""
        pairs = zip(self.names, self.structures, strict=True)
        return [path for name, structure in pairs for path in structure.leaf_paths(name)]

    def rebuild(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of forward with ``tensors`` in place of the example's."""
        leaves = iter(tensors)
        values = [structure.build(leaves) for structure in self.structures]
        args = tuple(values[: self.positional])
        return args, dict(zip(self.names[self.positional :], values[self.positional :], strict=True))

    def narrowed(self, batch_size: int, first: int = 0) -> Example:
        """Return the example with ``batch_size`` of its samples only, from ``first`` on."""
        tensors = tuple(
            t.narrow(self.batch_dim, first, batch_size) if self.has_batch(t) else t for t in self.tensors
        )
        return replace(self, tensors=tensors, batch_size=batch_size)

    def resized(self, batch_size: int) -> Example:
        """Return the example with ``batch_size`` samples, repeated if it has fewer."""
        if self.batch_size is None or batch_size <= self.batch_size:
            return self.narrowed(batch_size)
        index = torch.arange(batch_size) % self.batch_size
        tensors = tuple(
            t.index_select(self.batch_dim, index.to(t.device)) if self.has_batch(t) else t
            for t in self.tensors
        )
        return replace(self, tensors=tensors, batch_size=batch_size)

    def dynamic_dims(self, position: int) -> frozenset[int]:
        """Return the dimensions of a tensor that are captured as symbols."""
        batch = {self.batch_dim} if self.has_batch(self.tensors[position]) else set()
        return (self.varying[position] if self.varying else frozenset()) | batch

    def has_batch(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor's batch dimension has the batch's size."""
        dim = self.batch_dim
        return tensor.dim() > dim and self.batch_size == tensor.shape[dim]


def bind_example(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch_dim: int = 0,
    varying: Varying | None = None,
) -> Example:
    """Bind the example inputs to the parameter names of forward."""
    names, values, positional = _bind(model, args, kwargs)
    leaves: list[torch.Tensor] = []
    structures = []
    for name, value in zip(names, values, strict=True):
        plain = map_tensors(value, torch.Tensor.detach)
        found, structure = flatten(plain, name)
        leaves += found
        structures.append(structure)
        if not found and value is not None:
            logger.info(
                "the input %s is not a tensor: its value %r becomes a constant of the stages",
                name,
                value,
            )
    if not leaves:
        raise SplitError(
            "the model cannot be captured without example inputs: give example_args=(tensor, ...) or "
            "example_kwargs={name: tensor, ...}"
        )
    sizes = Counter(t.shape[batch_dim] for t in leaves if t.dim() > batch_dim)
    batch = sizes.most_common(1)[0][0] if sizes else None
    if batch == 0:
        raise SplitError("the example inputs have no sample: their batch size is 0")
    if batch == 1:
        leaves = [_doubled(t, batch_dim) for t in leaves]
        batch = 2
    example = Example(tuple(names), tuple(structures), tuple(leaves), positional, batch, batch_dim)
    if not varying:
        return example
    return replace(
        example, varying=find_varying(varying, example.leaf_paths(), example.tensors, batch_dim)
    )


def _doubled(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Repeat a batch of one to two samples: export captures a size of 1 as a constant."""
    if tensor.dim() > dim and tensor.shape[dim] == 1:
        return torch.cat([tensor, tensor], dim)
    return tensor


def _bind(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[str], list[Any], int]:
    """Return names and values in signature order, and how many are passed by position."""
    try:
        signature = inspect.signature(model.forward)
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise SplitError(f"the example inputs do not fit the model's forward: {error}") from error
    names: list[str] = []
    values: list[Any] = []
    keyword: list[tuple[str, Any]] = []
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}_{position}" for position in range(len(value))]
            values += value
        elif kind is inspect.Parameter.VAR_KEYWORD:
            keyword += value.items()
        elif name in kwargs:
            keyword.append((name, value))
        else:
            names.append(name)
            values.append(value)
    positional = len(names)
    return names + [name for name, _ in keyword], values + [v for _, v in keyword], positional
