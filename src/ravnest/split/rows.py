"""Batches cut along their rows (dimension 0), and rows of an example made different."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ravnest.split.structure import map_tensors, tensors_in

_Value = TypeVar("_Value")
_SPREAD = 0.3
"""Standard deviation of the noise added to a varied tensor, relative to its range of values."""


def cut_rows(value: _Value, sizes: Sequence[int], *, multiples: bool = False) -> list[_Value] | None:
    """Cut a nested value into parts of ``sizes`` rows; None where no tensor in it can be cut.

    The batch has ``sum(sizes)`` rows. Tensors with that many rows are cut into views without a copy;
    everything else is part of each result as it is. ``multiples`` also cuts tensors with a multiple
    of that many rows, such as an output of one row per token.
    """
    batch = sum(sizes)
    if not any(_rows_per_sample(tensor, batch, multiples) for tensor in tensors_in(value)):
        return None
    parts = []
    first = 0
    for size in sizes:
        parts.append(map_tensors(value, _narrower(batch, first, size, multiples)))
        first += size
    return parts


def repeat_rows(value: _Value, batch: int, rows: int, *, multiples: bool = False) -> _Value:
    """Return a copy of a nested value with ``rows`` rows, repeated where it has fewer."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        factor = _rows_per_sample(tensor, batch, multiples)
        if not factor:
            return tensor
        index = torch.arange(rows, device=tensor.device) % batch
        samples = tensor.detach().reshape(batch, factor, *tensor.shape[1:])
        return samples.index_select(0, index).flatten(0, 1)

    return map_tensors(value, change)  # type: ignore[no-any-return]


def vary_floats(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a copy with seeded noise, within the range of the tensor's own values.

    Probabilities remain probabilities, and logarithms of them stay negative. A tensor of one value
    is scaled by 0.5 to 1.5, a tensor of zeros becomes normal noise.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor.clone()
    values = tensor.detach().float()
    finite = values[torch.isfinite(values)]
    if not finite.numel():
        return tensor.clone()
    low, high = finite.min(), finite.max()
    noise = torch.randn(tensor.shape, generator=generator).to(tensor.device)
    if low < high:
        varied = torch.where(
            torch.isfinite(values), (values + _SPREAD * (high - low) * noise).clamp(low, high), values
        )
    elif low == 0:
        varied = noise
    else:
        varied = values * (0.5 + torch.rand(tensor.shape, generator=generator)).to(tensor.device)
    return varied.to(tensor.dtype)


def shuffle_rows(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a copy whose values change places between rows, each position on its own.

    Each position keeps its set of values. Where all rows are the same, values change places within
    each row instead.
    """
    if not tensor.dim() or not tensor.numel():
        return tensor.clone()
    flat = tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach().unsqueeze(1)
    dim = 1 if bool((flat == flat[:1]).all()) else 0
    order = torch.rand(flat.shape, generator=generator).argsort(dim).to(tensor.device)
    return flat.gather(dim, order).reshape(tensor.shape)


def _rows_per_sample(tensor: torch.Tensor, batch: int, multiples: bool) -> int:
    """Return how many rows each sample has in a tensor; 0 where the tensor has no batch dimension."""
    if not tensor.dim() or not batch or not tensor.shape[0]:
        return 0
    factor, rest = divmod(tensor.shape[0], batch)
    return factor if not rest and (factor == 1 or multiples) else 0


def _narrower(
    batch: int, first: int, size: int, multiples: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        factor = _rows_per_sample(tensor, batch, multiples)
        return tensor.narrow(0, first * factor, size * factor) if factor else tensor

    return change
