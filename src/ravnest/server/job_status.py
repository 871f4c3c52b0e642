"""State of a running job, derived from the phases of its assignments. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ravnest.schemas.jobs import JobState
from ravnest.server.assignments import FETCHING
from ravnest.server.db.records import AssignmentRecord
from ravnest.types import Role

_AT_WORK = ("training", "uploading", "finished")


@dataclass(frozen=True)
class JobStatus:
    """State of a job and the reason for it."""

    state: JobState
    reason: str
    root: AssignmentRecord | None = None
    """Assignment whose result is the job's; only if the job is done."""


def job_status(assignments: Sequence[AssignmentRecord], names: Mapping[str, str]) -> JobStatus:
    """Return the status of a job; ``names`` holds the providers' names by id.

    A job ends when all its assignments have ended. It is done if one cluster has delivered a result.
    """
    failures = _described("failed", assignments, names)
    if all(each.has_ended for each in assignments):
        root = next(
            (root for root in roots(assignments) if root.phase == "finished" and root.has_result), None
        )
        if root is not None:
            note = f"; failed: {failures}" if failures else ""
            return JobStatus(JobState.DONE, f"cluster {root.cluster} has trained the model{note}", root)
        return JobStatus(JobState.FAILED, failures or "no Root has sent a trained model")
    failed = failed_clusters(assignments)
    healthy = [each for each in assignments if each.cluster not in failed]
    if not healthy:
        reason = f"every cluster has failed, their other nodes are stopping: {failures}"
        return JobStatus(JobState.SHIPPING, reason)
    if all(each.phase in _AT_WORK for each in healthy):
        waiting = _described("uploading", [each for each in healthy if each.reason], names)
        words = "all nodes are training" + (
            f"; trained, but not delivered: {waiting}" if waiting else ""
        )
        return JobStatus(JobState.TRAINING, _with_failures(words, failures))
    ready = sum(each.phase not in FETCHING for each in healthy)
    words = f"{ready} of {len(healthy)} nodes have fetched their assignment"
    return JobStatus(JobState.SHIPPING, _with_failures(words, failures))


def failed_clusters(assignments: Sequence[AssignmentRecord]) -> set[int]:
    """Return the clusters with a failed node: a pipeline with a gap cannot train.

    A cluster whose Root has the trained stages of all nodes does not need the other nodes any more.
    """
    trained = {root.cluster for root in roots(assignments) if is_trained(root)}
    return {each.cluster for each in assignments if each.phase == "failed"} - trained


def is_trained(assignment: AssignmentRecord) -> bool:
    """Return whether a node has trained to the end, though its result may not be here yet."""
    return assignment.phase == "uploading" or (assignment.phase == "finished" and assignment.has_result)


def may_train(assignments: Sequence[AssignmentRecord]) -> set[str]:
    """Return the assignments whose workers start: all nodes that can train have fetched their files."""
    failed = failed_clusters(assignments)
    healthy = [each for each in assignments if each.cluster not in failed]
    return set() if any(each.phase in FETCHING for each in healthy) else {each.id for each in healthy}


def leading_root(assignments: Sequence[AssignmentRecord]) -> AssignmentRecord | None:
    """Return the Root whose losses are shown, of the first cluster without a failure."""
    failed = failed_clusters(assignments)
    found = roots(assignments)
    return next((root for root in found if root.cluster not in failed), next(iter(found), None))


def roots(assignments: Sequence[AssignmentRecord]) -> list[AssignmentRecord]:
    """Return the Roots' assignments, ordered by cluster."""
    return sorted((each for each in assignments if each.role == Role.ROOT), key=lambda r: r.cluster)


def _with_failures(words: str, failures: str) -> str:
    return f"{words}; failed: {failures}" if failures else words


def _described(phase: str, assignments: Iterable[AssignmentRecord], names: Mapping[str, str]) -> str:
    """Return the nodes in ``phase`` and their reasons as a sentence."""
    return "; ".join(
        f"node_{each.node} of cluster {each.cluster} ({names.get(each.provider, each.provider)}): "
        f"{each.reason or 'it failed without a reason'}"
        for each in assignments
        if each.phase == phase
    )
