"""State of a running job, derived from the phases of its assignments. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ravnest.plan.memory import size
from ravnest.schemas.jobs import JobState
from ravnest.server.assignments import FETCHING
from ravnest.server.db.records import LOST, AssignmentRecord
from ravnest.types import Role

_ORIGIN = re.compile(r"node_(\d{1,9}): ", re.ASCII)
"""Beginning of a reason that names the node where the failure began."""
_AT_WORK = ("training", "uploading", "finished")


@dataclass(frozen=True)
class JobStatus:
    """State of a job and the reason for it."""

    state: JobState
    reason: str
    root: AssignmentRecord | None = None
    """Assignment whose result is the job's; only if the job is done."""


@dataclass(frozen=True)
class PlaceNeeds:
    """Demands of a vacant place."""

    ram: int
    """Bytes; 0: not known."""
    checkpoint: int
    """Updates of the checkpoint from which its cluster continues."""


def job_status(
    assignments: Sequence[AssignmentRecord],
    names: Mapping[str, str],
    needs: Mapping[int, PlaceNeeds] | None = None,
    *,
    evaluates: bool = False,
) -> JobStatus:
    """Return the status of a job; ``names`` holds the providers' names by id.

    A job ends when all its assignments have ended and no place is vacant. It is done if one cluster has
    delivered a result. ``needs`` says, by node, what vacant places wait for. ``evaluates``: nothing is
    trained.
    """
    held = holders(assignments)
    failures = _described(("failed", LOST), held, names)
    empty = vacant(assignments)
    if all(each.has_ended for each in held) and not empty:
        root = next((root for root in roots(assignments) if has_delivered(root)), None)
        if root is not None:
            note = f"; failed: {failures}" if failures else ""
            done = "evaluated" if evaluates else "trained"
            return JobStatus(JobState.DONE, f"cluster {root.cluster} has {done} the model{note}", root)
        missing = "no Root has sent figures" if evaluates else "no Root has sent a trained model"
        return JobStatus(JobState.FAILED, failures or missing)
    failed = failed_clusters(assignments)
    failures = _described(("failed",), held, names)
    healthy = [each for each in held if each.cluster not in failed]
    if not healthy:
        reason = f"every cluster has failed, their other nodes are stopping: {failures}"
        return JobStatus(JobState.SHIPPING, reason)
    gaps = {each.cluster for each in empty}
    whole = [each for each in healthy if each.cluster not in gaps and each.phase != LOST]
    is_training = bool(whole) and all(each.phase in _AT_WORK for each in whole)
    if empty:
        words = "; ".join(_vacancy(each, names, (needs or {}).get(each.node)) for each in empty)
        if whole:
            words += "; the other clusters go on"
    elif is_training:
        waiting = _described(("uploading",), [each for each in healthy if each.reason], names)
        words = f"all nodes are {'evaluating' if evaluates else 'training'}" + (
            f"; trained, but not delivered: {waiting}" if waiting else ""
        )
    else:
        words = _shipping(whole, names)
    state = JobState.TRAINING if is_training else JobState.SHIPPING
    return JobStatus(state, f"{words}; failed: {failures}" if failures else words)


def holders(assignments: Sequence[AssignmentRecord]) -> list[AssignmentRecord]:
    """Return the assignment that stands for each node, ordered by node: the newest one.

    While a node is handed over, the earlier assignment stands for it until the later one has fetched.
    """

    def rank(each: AssignmentRecord) -> tuple[bool, bool, int]:
        return not each.has_ended, each.phase not in FETCHING, each.generation

    found: dict[int, AssignmentRecord] = {}
    for each in assignments:
        known = found.get(each.node)
        if known is None or rank(each) > rank(known):
            found[each.node] = each
    return [found[node] for node in sorted(found)]


def lineage(assignments: Sequence[AssignmentRecord], node: int) -> list[AssignmentRecord]:
    """Return all assignments of a node, newest first."""
    own = (each for each in assignments if each.node == node)
    return sorted(own, key=lambda each: -each.generation)


def vacant(assignments: Sequence[AssignmentRecord]) -> list[AssignmentRecord]:
    """Return the lost assignments whose places another provider can take, ordered by node."""
    over = failed_clusters(assignments) | _trained_clusters(assignments)
    return [each for each in holders(assignments) if each.phase == LOST and each.cluster not in over]


def can_continue(assignments: Sequence[AssignmentRecord], lost: AssignmentRecord) -> bool:
    """Return whether a cluster can train on once another provider has the place of a lost node.

    A node that has failed because of the job would fail again.
    """
    return not any(each.phase in ("failed", "stopped") for each in _others(assignments, lost))


def is_confirmed(assignments: Sequence[AssignmentRecord], failed: AssignmentRecord) -> bool:
    """Return whether another provider has said that the job fails at this node."""
    chain = lineage(assignments, failed.node)
    return any(each.cause == "unconfirmed" and each.provider != failed.provider for each in chain)


def is_hearsay(failed: AssignmentRecord, reason: str) -> bool:
    """Return whether the reason of a failure is one that another node has told this one."""
    found = _ORIGIN.match(reason)
    return found is not None and int(found[1]) != failed.node


def to_repeat(assignments: Sequence[AssignmentRecord], lost: AssignmentRecord) -> list[AssignmentRecord]:
    """Return the finished nodes whose end must be repeated, because a node of their cluster is lost.

    Their providers keep their checkpoints until the Root has sent the result. Nothing is repeated if the
    Root has the trained stages of all nodes already.
    """
    others = _others(assignments, lost)
    if any(each.role == Role.ROOT and is_trained(each) for each in others):
        return []
    return [each for each in others if each.phase == "finished"]


def repeats_end(assignments: Sequence[AssignmentRecord], finished: AssignmentRecord) -> bool:
    """Return whether a node that finishes must repeat its end: another one was lost before its own."""
    others = _others(assignments, finished)
    if finished.role == Role.ROOT or any(each.role == Role.ROOT and is_trained(each) for each in others):
        return False
    return any(
        each.phase == LOST or (each.generation and each.phase in (*FETCHING, "fetched"))
        for each in others
    )


def _others(assignments: Sequence[AssignmentRecord], own: AssignmentRecord) -> list[AssignmentRecord]:
    """Return the assignments that stand for the other nodes of a cluster."""
    held = holders(assignments)
    return [each for each in held if each.cluster == own.cluster and each.node != own.node]


def failed_clusters(assignments: Sequence[AssignmentRecord]) -> set[int]:
    """Return the clusters with a failed node: a pipeline with a gap cannot train.

    A cluster whose Root has the trained stages of all nodes does not need the other nodes any more.
    """
    failed = {each.cluster for each in holders(assignments) if each.phase == "failed"}
    return failed - _trained_clusters(assignments)


def clusters_at_work(assignments: Sequence[AssignmentRecord]) -> set[int]:
    """Return the clusters all of whose nodes train, or have trained."""
    held = holders(assignments)
    return {each.cluster for each in held} - {e.cluster for e in held if e.phase not in _AT_WORK}


def degraded(assignments: Sequence[AssignmentRecord], names: Mapping[str, str]) -> str:
    """Return which clusters of a job that is done have no part in its model, and why; or nothing."""
    held = holders(assignments)
    clusters = {each.cluster for each in held}
    untrained = clusters - _trained_clusters(assignments)
    if not untrained:
        return ""
    own = [each for each in held if each.cluster in untrained]
    why = _described(("failed", LOST), own, names) or _described(("stopped",), own, names)
    return (
        f"{len(untrained)} of {len(clusters)} clusters did not finish; the model has their training "
        f"only up to their last averaging round: {why}"
    )


def is_trained(assignment: AssignmentRecord) -> bool:
    """Return whether a node has trained to the end, though its result may not be here yet."""
    return assignment.phase == "uploading" or has_delivered(assignment)


def has_delivered(assignment: AssignmentRecord) -> bool:
    """Return whether a Root has trained to the end, and the server has the result."""
    return assignment.phase == "finished" and assignment.has_result


def may_train(assignments: Sequence[AssignmentRecord]) -> set[str]:
    """Return the assignments whose workers start.

    At first, all nodes that can train must have fetched their files. A provider that takes a place in a
    cluster that has started waits for nobody.
    """
    failed = failed_clusters(assignments)
    held = holders(assignments)
    healthy = [each for each in held if each.cluster not in failed]
    started = {each.cluster for each in healthy if each.phase == "training"}
    waits = any(each.phase in (*FETCHING, LOST) for each in healthy if each.cluster not in started)
    return {
        each.id
        for each in healthy
        if (each.cluster in started and each.phase not in (*FETCHING, LOST))
        or (each.cluster not in started and not waits)
    }


def leading_root(assignments: Sequence[AssignmentRecord]) -> AssignmentRecord | None:
    """Return the Root whose losses are shown, of the first cluster without a failure."""
    failed = failed_clusters(assignments)
    found = roots(assignments)
    return next((root for root in found if root.cluster not in failed), next(iter(found), None))


def roots(assignments: Sequence[AssignmentRecord]) -> list[AssignmentRecord]:
    """Return the Roots' assignments, ordered by cluster."""
    held = holders(assignments)
    return sorted((each for each in held if each.role == Role.ROOT), key=lambda r: r.cluster)


def place_name(assignment: AssignmentRecord) -> str:
    """Return the name of a node's place in its job."""
    return f"node_{assignment.node} ({assignment.role} of cluster {assignment.cluster})"


def _trained_clusters(assignments: Sequence[AssignmentRecord]) -> set[int]:
    return {root.cluster for root in roots(assignments) if is_trained(root)}


def _vacancy(assignment: AssignmentRecord, names: Mapping[str, str], needs: PlaceNeeds | None) -> str:
    """Return what a vacant place waits for, and why it is vacant."""
    amount = f" with at least {size(needs.ram)}" if needs and needs.ram else ""
    where = f"update {needs.checkpoint}" if needs and needs.checkpoint else "the start"
    who = names.get(assignment.provider, assignment.provider)
    return (
        f"waits for a provider{amount} for {place_name(assignment)}; training continues from {where} "
        f"when it is there; {who} had the place: {assignment.reason}"
    )


def _shipping(healthy: Sequence[AssignmentRecord], names: Mapping[str, str]) -> str:
    """Return who has fetched, or who takes the place of a lost node."""
    late = [each for each in healthy if each.phase not in _AT_WORK]
    if all(each.generation for each in late):
        return "; ".join(
            f"{names.get(each.provider, each.provider)} takes the place of {place_name(each)}"
            for each in late
        )
    ready = sum(each.phase not in FETCHING for each in healthy)
    return f"{ready} of {len(healthy)} nodes have fetched their assignment"


def _described(
    phases: Sequence[str], assignments: Iterable[AssignmentRecord], names: Mapping[str, str]
) -> str:
    """Return the nodes in ``phases`` and their reasons as a sentence.

    All nodes of a cluster fail for the reason of one of them: a reason that several have is told once.
    """
    by_reason: dict[str, list[AssignmentRecord]] = {}
    for each in assignments:
        if each.phase in phases:
            by_reason.setdefault(each.reason or "it failed without a reason", []).append(each)
    return "; ".join(
        f"{', '.join(_provided_place(each, names) for each in nodes)}: {reason}"
        for reason, nodes in by_reason.items()
    )


def _provided_place(assignment: AssignmentRecord, names: Mapping[str, str]) -> str:
    """Return the name of a node's place, with that of its provider."""
    provider = names.get(assignment.provider, assignment.provider)
    return f"node_{assignment.node} of cluster {assignment.cluster} ({provider})"
