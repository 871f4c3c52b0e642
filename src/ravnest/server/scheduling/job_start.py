"""State that a job starts from: uploaded checkpoints, and the position in the data. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ravnest.schemas.jobs import NamedComponent
from ravnest.schemas.providers import RowRange
from ravnest.server.complete_checkpoints import CompleteCheckpoint, newest_by_cluster

Rows = tuple[RowRange, ...]
"""Rows of the training data that a cluster has."""


@dataclass(frozen=True)
class JobStart:
    """Checkpoints that the clusters of a plan start from."""

    checkpoints: tuple[CompleteCheckpoint, ...]
    """By cluster of the plan."""
    restart_epoch: bool = False
    """The epoch begins anew, because its position means nothing for the new shares of the data."""
    note: str = ""
    """Remark for the requester."""
    optimizer: NamedComponent | None = None
    """Optimizer whose parameters replace those of the checkpoint; None: they are the same."""

    def __str__(self) -> str:
        newest = max(each.id for each in self.checkpoints)
        return f"training continues from {newest}" + (f"; {self.note}" if self.note else "")


def job_starts(
    complete: Sequence[CompleteCheckpoint],
    old: Mapping[int, Rows],
    new: Mapping[int, Rows],
    *,
    same_loader: bool = True,
    optimizer: NamedComponent | None = None,
) -> list[JobStart]:
    """Return the states that a job can start from, the best first; others are used if it is damaged.

    ``complete``: newest first. ``old`` and ``new``: the rows of each cluster before and now.
    ``same_loader``: batches are formed like before. ``optimizer``: has other parameters than before.
    """
    clusters = len(new)
    starts: list[JobStart] = []
    newest = newest_by_cluster(complete)
    if same_loader and old == new:
        if set(newest) == set(new):
            starts.append(JobStart(tuple(newest[cluster] for cluster in sorted(new))))
        if clusters == 1:
            starts += [JobStart((each,)) for each in complete if each.attempt == complete[0].attempt]
    why = "the clusters have other shares of the data" if same_loader else "its data or batches changed"
    note = f"an epoch in progress begins anew, because {why}"
    ordered = sorted(complete, key=lambda each: (each.attempt, each.id), reverse=True)
    starts += [JobStart((each,) * clusters, restart_epoch=True, note=note) for each in ordered]
    distinct = [start for number, start in enumerate(starts) if start not in starts[:number]]
    return [replace(start, optimizer=optimizer) for start in distinct]
