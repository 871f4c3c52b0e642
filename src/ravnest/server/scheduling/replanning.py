"""Decision about a job with a vacant place and no spare: wait, plan it anew, or give it up. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MOST_REPLANS = 3
"""Number of new plans without a new checkpoint, after which a job fails."""
LEAST_GAIN = 1.1
"""Predicted rate of a new plan, in terms of that of the clusters that still train, for which these are
interrupted before the wait for the lost provider is over."""


@dataclass(frozen=True)
class ReplanLimits:
    """Waits in seconds."""

    replan_after: float
    """Time for a lost provider to return, or for a spare to come."""
    requeue_after: float
    """Time for which the other nodes of the cluster keep their places: while no plan exists, or while
    other clusters train, which a new plan would interrupt."""


@dataclass(frozen=True)
class VacantJob:
    """A job with vacant places."""

    lost: str
    """Names of the vacant places."""
    why: str
    """Reasons of the losses, with the providers that had the places."""
    waited: float
    """Seconds since the first place became vacant."""
    checkpoint: int | None
    """Updates of the newest complete checkpoint at the server; None: there is none."""
    is_rescued: bool
    """The remaining nodes have uploaded their checkpoints, or had enough time for that."""
    others_train: bool = False
    """Other clusters of the job still train."""
    is_delivered: bool = False
    """The server has the trained model of another cluster."""
    is_gathered: bool = False
    """The clusters that still train have uploaded their checkpoints, or had enough time for that."""
    replans: int = 0
    """Number of new plans since the newest checkpoint."""
    on_insufficient: Literal["wait", "fail"] | float = "wait"

    @property
    def patience(self) -> float:
        """Seconds for which the requester lets the job wait."""
        match self.on_insufficient:
            case "wait":
                return math.inf
            case "fail":
                return 0.0
            case seconds:
                return seconds


@dataclass(frozen=True)
class PlanAnswer:
    """Answer of the planner for all providers that the job could have."""

    is_feasible: bool
    reason: str
    """The plan in short, or why there is none."""
    gain: float = 1.0
    """Predicted rate in terms of that of the clusters that still train."""


@dataclass(frozen=True)
class KeepWaiting:
    """The job waits, with its other nodes in their places."""

    reason: str
    until: float | None
    """Seconds since the loss at which to decide again; None: at the next change."""


@dataclass(frozen=True)
class GatherCheckpoints:
    """A new plan is due; the clusters that still train upload their checkpoints first."""

    reason: str


@dataclass(frozen=True)
class PlanAnew:
    """The job returns to the queue and starts from its checkpoint, with the providers that there are."""

    reason: str


@dataclass(frozen=True)
class GiveUpClusters:
    """The clusters with vacant places fail; the other ones go on, or have trained the model."""

    reason: str


@dataclass(frozen=True)
class GiveUp:
    """The job fails."""

    reason: str


ReplanDecision = KeepWaiting | GatherCheckpoints | PlanAnew | GiveUpClusters | GiveUp


def needs_answer(job: VacantJob, limits: ReplanLimits) -> bool:
    """Return whether the planner must be asked before ``decide_replan``."""
    is_over = job.is_delivered and not job.others_train
    return (
        job.waited >= limits.replan_after
        and not is_over
        and job.is_rescued
        and job.replans < MOST_REPLANS
    )


def decide_replan(job: VacantJob, answer: PlanAnswer | None, limits: ReplanLimits) -> ReplanDecision:
    """Return what to do with a job whose vacant places no spare can take now.

    ``answer`` may be None if ``needs_answer`` says so.
    """
    if job.waited < limits.replan_after:
        return KeepWaiting(f"waits for the provider of {job.lost} or a spare", limits.replan_after)
    if job.is_delivered and not job.others_train:
        return GiveUpClusters(f"{job.why}; another cluster has trained the model to the end")
    if not job.is_rescued:
        return KeepWaiting(f"its checkpoints are uploaded: {job.lost} has no provider", None)
    if job.replans >= MOST_REPLANS:
        why = f"planned anew {job.replans} times without a new checkpoint"
        return _without_plan(job, why) if job.others_train else GiveUp(f"{job.why}; {why}")
    assert answer is not None
    if not job.others_train:
        return _decide_alone(job, answer, limits)
    return _dissolve(job, answer, limits) if answer.is_feasible else _without_plan(job, answer.reason)


def _dissolve(job: VacantJob, answer: PlanAnswer, limits: ReplanLimits) -> ReplanDecision:
    """Decide while other clusters of the job train, which a new plan interrupts.

    They do so at once for a plan that is faster. Otherwise the lost provider has time to return; then
    the cluster dissolves, and its share of the data moves to the clusters of a new plan.
    """
    until = min(limits.requeue_after, job.patience)
    is_faster = answer.gain >= LEAST_GAIN
    if not is_faster and job.waited < until:
        return KeepWaiting(f"waits for a provider for {job.lost}; the other clusters go on", until)
    if not job.is_gathered:
        return GatherCheckpoints(f"the other clusters upload their checkpoints: {job.lost} is given up")
    why = (
        f"{100 * (answer.gain - 1):.0f}% faster than the clusters that still train"
        if is_faster
        else f"nobody took its place for {job.waited:.0f} s, and its cluster's share of the data moves "
        f"to the other nodes: {answer.reason}"
    )
    return PlanAnew(f"planned anew without {job.lost}: {why}; {_state(job)}")


def _without_plan(job: VacantJob, why: str) -> ReplanDecision:
    """Decide while other clusters of the job train, and no plan can replace the present one."""
    if job.waited >= job.patience:
        return GiveUpClusters(f"{job.why}; no plan without it exists: {why}")
    until = None if math.isinf(job.patience) else job.patience
    return KeepWaiting(f"waits for a provider for {job.lost}; the other clusters go on", until)


def _decide_alone(job: VacantJob, answer: PlanAnswer, limits: ReplanLimits) -> ReplanDecision:
    if answer.is_feasible:
        return PlanAnew(f"planned anew without {job.lost}: {answer.reason}; {_state(job)}")
    if job.on_insufficient == "fail":
        return GiveUp(f"{job.why}; no plan without it exists: {answer.reason}")
    if job.waited < limits.requeue_after:
        reason = f"waits for a provider for {job.lost}: {answer.reason}; {_state(job)}"
        return KeepWaiting(reason, limits.requeue_after)
    return PlanAnew(f"waits for providers: {answer.reason}; {_state(job)}")


def safe_checkpoint(checkpoint: int | None) -> str:
    """Describe what a job that waits starts from."""
    if checkpoint is None:
        return "there is no checkpoint yet, so it starts from the beginning"
    return f"the checkpoint of update {checkpoint} is safe here"


def _state(job: VacantJob) -> str:
    return safe_checkpoint(job.checkpoint)
