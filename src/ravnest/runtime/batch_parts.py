"""Micro-batches of a user's batch: how many, and how large."""

from __future__ import annotations

from dataclasses import dataclass


def part_sizes(batch_size: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of the parts of a batch: as equal as possible, larger ones first."""
    size, larger = divmod(batch_size, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


@dataclass(frozen=True)
class BatchSplit:
    """Rule by which the Root splits batches into micro-batches."""

    rows: int | None = None
    """Samples in a micro-batch; ``None``: batches are not split, or into ``count`` parts."""
    count: int | None = None
    """Micro-batches in a batch, if the user has set a number."""
    smallest: int = 1
    """Samples that every micro-batch must have."""
    reason: str = ""
    """Why batches are split like this, as a sentence for the user."""
    late: bool = False
    """Gradients may be one update late, contrary to the plan, because batches cannot be split."""

    def parts(self, batch_size: int) -> int:
        """Return the number of micro-batches of a batch."""
        wanted = self.count or 1
        if self.rows is not None:
            wanted = -(-batch_size // self.rows)
        return max(1, min(wanted, batch_size // max(self.smallest, 1)))
