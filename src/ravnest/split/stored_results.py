"""Results of a run, kept in a file and compared with those of another run one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ravnest.split.check_runs import Run, is_gradient
from ravnest.split.spill_file import SpilledTensor, SpillFile, spillable

_NEAR_ZERO = 1e-4
"""Gradients below this fraction of the model's largest are compared relative to the largest."""
_PIECE = 1 << 20
"""Elements that are compared at once: the comparison is in float64."""


class StoredResults:
    """Results of one run by name; large ones are in a file."""

    def __init__(self, file: SpillFile) -> None:
        self._file = file
        self._places: dict[str, SpilledTensor | torch.Tensor] = {}
        self._largest: dict[str, float] = {}

    @classmethod
    @contextlib.contextmanager
    def of(cls, run: Run) -> Iterator[StoredResults]:
        """Run and store the results in a temporary file."""
        with SpillFile.temporary() as file:
            results = cls(file)
            run(results._store)
            yield results

    def differences(self, run: Run) -> dict[str, float]:
        """Return the relative difference of each result that is not bitwise equal, in program order."""
        found: dict[str, float] = {}
        missing = {name for name, largest in self._largest.items() if largest}

        def compare(name: str, tensor: torch.Tensor) -> None:
            missing.discard(name)
            difference = self._difference(name, tensor)
            if difference is not None:
                found[name] = difference

        run(compare)
        found |= dict.fromkeys(missing, float("inf"))
        return {name: found[name] for name in (*self._places, *found) if name in found}

    def _store(self, name: str, tensor: torch.Tensor) -> None:
        plain = tensor.detach().contiguous()
        self._largest[name] = _largest(plain)
        try:
            self._places[name] = self._file.write(plain) if spillable(plain) else plain
        except OSError:  # the disk is full
            self._places[name] = plain

    def _difference(self, name: str, actual: torch.Tensor) -> float | None:
        """Return the difference relative to the largest value; None if both have the same bits."""
        place = self._places.get(name)
        if place is None:
            return float("inf") if bool(actual.any()) else None
        expected = self._file.read(place) if isinstance(place, SpilledTensor) else place
        if expected.shape != actual.shape or expected.dtype != actual.dtype:
            return float("inf")
        if _same_bits(expected, actual):
            return None
        gradients = max((v for n, v in self._largest.items() if is_gradient(n)), default=0.0)
        tiny = torch.finfo(torch.float32).tiny
        return _largest_difference(expected, actual) / max(
            self._largest[name], _NEAR_ZERO * gradients, tiny
        )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(
        torch.equal(one, other) or bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
        for one, other in zip(_pieces(a), _pieces(b), strict=True)
    )


def _largest(tensor: torch.Tensor) -> float:
    return max((_largest_of_piece(piece) for piece in _pieces(tensor)), default=0.0)


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    pairs = zip(_pieces(a), _pieces(b), strict=True)
    return max(_largest_of_piece(_precise(one) - _precise(other)) for one, other in pairs)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.detach().reshape(-1)
    return (flat[first : first + _PIECE] for first in range(0, len(flat), _PIECE))


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest_of_piece(piece: torch.Tensor) -> float:
    return float(torch.nan_to_num(_precise(piece).abs(), nan=float("inf")).max())
