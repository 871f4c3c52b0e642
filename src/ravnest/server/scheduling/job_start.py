"""State that a job starts from: uploaded checkpoints, and the position in the data. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ravnest.schemas.jobs import NamedComponent
from ravnest.schemas.providers import EpochRemainder, RowRange
from ravnest.server.complete_checkpoints import CompleteCheckpoint, newest_by_cluster

Rows = tuple[RowRange, ...]
"""Rows of the training data that a cluster has."""


@dataclass(frozen=True)
class OldCluster:
    """A cluster of the plan before, and the checkpoint with its position in the data."""

    checkpoint: CompleteCheckpoint
    rows: range
    """Its share: numbers of the samples in the whole dataset."""
    is_current: bool = True
    """It has taken part in the newest round of averaging, so that its weights are part of the state."""
    remainder: EpochRemainder | None = None
    """Epoch of its plan that was not a whole one."""


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
    before: tuple[OldCluster, ...] = ()
    """Clusters whose rest of an epoch is divided between the new ones, and whose states are averaged;
    empty: the position is that of the checkpoints, or the beginning of an epoch."""

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
    before: Sequence[OldCluster] = (),
) -> list[JobStart]:
    """Return the states that a job can start from, the best first; others are used if it is damaged.

    ``complete``: newest first. ``old`` and ``new``: the rows of each cluster before and now.
    ``same_loader``: batches are formed like before. ``optimizer``: has other parameters than before.
    ``before``: all clusters of the plan before; empty if they are not known.
    """
    clusters = len(new)
    starts: list[JobStart] = []
    newest = newest_by_cluster(complete)
    had_remainder = any(each.remainder is not None for each in before)
    if same_loader and old == new and not had_remainder:
        if set(newest) == set(new):
            starts.append(JobStart(tuple(newest[cluster] for cluster in sorted(new))))
        if clusters == 1:
            starts += [JobStart((each,)) for each in complete if each.attempt == complete[0].attempt]
    if same_loader and before and (old != new or had_remainder):
        starts.append(_with_remainder(before, clusters))
    why = "the clusters have other shares of the data" if same_loader else "its data or batches changed"
    note = f"an epoch in progress begins anew, because {why}"
    ordered = sorted(complete, key=lambda each: (each.attempt, each.id), reverse=True)
    starts += [JobStart((each,) * clusters, restart_epoch=True, note=note) for each in ordered]
    distinct = [start for number, start in enumerate(starts) if start not in starts[:number]]
    return [replace(start, optimizer=optimizer) for start in distinct]


def _with_remainder(before: Sequence[OldCluster], clusters: int) -> JobStart:
    """Return the start with the rest of the epoch, from the mean of all clusters."""
    newest = max(before, key=lambda each: (each.checkpoint.id.phase, each.checkpoint.id.update))
    current = sorted(each.checkpoint.cluster for each in before if each.is_current)
    left_out = sorted(each.checkpoint.cluster for each in before if not each.is_current)
    note = "the rest of the epoch in progress is divided between the new clusters"
    if len(current) > 1:
        note += f"; the weights are the mean of clusters {_listed(current)}"
    if left_out:
        note += (
            f"; what cluster {_listed(left_out)} has learned since its last average is left out, and "
            "these samples are trained again"
        )
    return JobStart((newest.checkpoint,) * clusters, True, note, before=tuple(before))


def _listed(clusters: Sequence[int]) -> str:
    return ", ".join(map(str, clusters))
