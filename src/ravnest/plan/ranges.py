"""Sums, maxima and distinct bytes over any run of units ``[start, stop)``, for many runs at once.

Every ``grid(starts, stops)`` takes two ascending arrays and returns a value for each start (row) with
each stop (column). The value is meaningless if the start is not before the stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ravnest.plan.memory import FloatArray
from ravnest.plan.profile import TensorProfile

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class RangeSum:
    """Sum of a value over the units of a run."""

    prefix: FloatArray

    @classmethod
    def of(cls, values: Sequence[float]) -> RangeSum:
        """Prepare the queries for these values of the units."""
        return cls(np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64)))))

    def grid(self, starts: IntArray, stops: IntArray) -> FloatArray:
        """Return the sums of all runs."""
        return self.prefix[stops][None, :] - self.prefix[starts][:, None]


@dataclass(frozen=True)
class RangeMax:
    """Largest value among the units of a run: a table of the maxima of 1, 2, 4, ... units."""

    table: FloatArray
    level: IntArray
    """For each length, the row of the table to use: floor(log2(length))."""

    @classmethod
    def of(cls, values: Sequence[float] | FloatArray) -> RangeMax:
        """Prepare the queries for these values of the units."""
        rows = [np.asarray(values, dtype=np.float64)]
        width = 1
        while 2 * width <= len(values):
            row = rows[-1].copy()
            row[:-width] = np.maximum(rows[-1][:-width], rows[-1][width:])
            rows.append(row)
            width *= 2
        return cls(np.stack(rows), np.frexp(np.arange(len(values) + 1))[1].astype(np.int64) - 1)

    def grid(self, starts: IntArray, stops: IntArray) -> FloatArray:
        """Return the maxima of all runs."""
        level = self.level[np.maximum(stops[None, :] - starts[:, None], 1)]
        last = np.maximum(stops[None, :] - (1 << level), 0)
        first = np.minimum(starts, self.table.shape[1] - 1)[:, None]
        return np.asarray(np.maximum(self.table[level, first], self.table[level, last]))


@dataclass(frozen=True)
class DistinctBytes:
    """Bytes of the tensors that a run uses, each counted once even if several units use it.

    Each use adds the tensor's bytes, and each pair of consecutive uses (a, b) of one tensor subtracts
    them if both are in the run.
    """

    uses: RangeSum
    first: IntArray
    second: IntArray
    bytes: FloatArray

    @classmethod
    def of(cls, tensors: Iterable[TensorProfile], units: int) -> DistinctBytes:
        """Prepare the queries for the tensors of a model with this number of units."""
        uses = np.zeros(units)
        pairs: dict[tuple[int, int], int] = {}
        for tensor in tensors:
            for unit in tensor.units:
                uses[unit] += tensor.bytes
            for pair in zip(tensor.units, tensor.units[1:], strict=False):
                pairs[pair] = pairs.get(pair, 0) + tensor.bytes
        ends = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
        sizes = np.array(list(pairs.values()), dtype=np.float64)
        return cls(RangeSum.of(uses.tolist()), ends[:, 0], ends[:, 1], sizes)

    def grid(self, starts: IntArray, stops: IntArray) -> FloatArray:
        """Return the distinct bytes of all runs."""
        total = self.uses.grid(starts, stops)
        inside = (self.first >= starts[0]) & (self.second < stops[-1])
        if not inside.any():
            return total
        # A pair is in a run if the start is at most a and the stop is above b: mark the last such row
        # and the first such column, then accumulate towards the other rows and columns.
        repeated = np.zeros_like(total)
        row = np.searchsorted(starts, self.first[inside], side="right") - 1
        column = np.searchsorted(stops, self.second[inside], side="right")
        np.add.at(repeated, (row, column), self.bytes[inside])
        repeated = np.cumsum(repeated[::-1], axis=0)[::-1]
        return total - np.cumsum(repeated, axis=1)
