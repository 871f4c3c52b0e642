"""What becomes of a job, by what is known of its parts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ravnest.schemas.jobs import JobState
from ravnest.server.db.records import AssignmentRecord
from ravnest.types import Role

_AT_WORK = ("training", "uploading", "finished")


@dataclass(frozen=True)
class JobVerdict:
    """Where a job is, and why."""

    state: JobState
    reason: str
    root: AssignmentRecord | None = None
    """Of a job that is done: whose result it is."""


def judge(parts: Sequence[AssignmentRecord], names: Mapping[str, str]) -> JobVerdict:
    """A job ends when all its parts have. It is done if one cluster has brought a result.

    ``names`` are those of the providers by id.
    """
    failures = _failures(parts, names)
    if all(part.has_ended for part in parts):
        root = next(
            (part for part in _roots(parts) if part.phase == "finished" and part.has_result), None
        )
        if root is not None:
            note = f"; of the others: {failures}" if failures else ""
            return JobVerdict(JobState.DONE, f"cluster {root.cluster} has trained the model{note}", root)
        return JobVerdict(JobState.FAILED, failures or "no Root has sent a trained model")
    going = [part for part in parts if part.cluster not in failed_clusters(parts)]
    if not going:
        return JobVerdict(JobState.SHIPPING, f"every cluster has failed, the rest is ending: {failures}")
    if all(part.phase in _AT_WORK for part in going):
        return JobVerdict(JobState.TRAINING, _with_failures("all nodes are at work", failures))
    ready = sum(part.phase in _AT_WORK for part in going)
    words = f"{ready} of {len(going)} nodes have fetched their part"
    return JobVerdict(JobState.SHIPPING, _with_failures(words, failures))


def failed_clusters(parts: Iterable[AssignmentRecord]) -> set[int]:
    """Clusters of which a node has failed: a pipeline with a gap cannot train."""
    return {part.cluster for part in parts if part.phase == "failed"}


def leading_root(parts: Sequence[AssignmentRecord]) -> AssignmentRecord | None:
    """The Root whose losses stand for the job's: of the first cluster that has not failed."""
    roots = _roots(parts)
    failed = failed_clusters(parts)
    return next((root for root in roots if root.cluster not in failed), next(iter(roots), None))


def _roots(parts: Sequence[AssignmentRecord]) -> list[AssignmentRecord]:
    return sorted((part for part in parts if part.role == Role.ROOT), key=lambda part: part.cluster)


def _with_failures(words: str, failures: str) -> str:
    return f"{words}; failed: {failures}" if failures else words


def _failures(parts: Sequence[AssignmentRecord], names: Mapping[str, str]) -> str:
    failed = [part for part in parts if part.phase == "failed"]
    return "; ".join(
        f"node_{part.node} of cluster {part.cluster} ({names.get(part.provider, part.provider)}): "
        f"{part.reason or 'it failed and did not say why'}"
        for part in failed
    )
