"""Decision about a running job for which another plan may be faster: keep its plan, or replace it. Pure.

Idle providers may form a new cluster or shorten the stages of the others; after a provider has become
slower, other cuts may be better. A new plan interrupts the whole job, so that it must pay for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ravnest.plan.cluster_cost import about_clusters, samples_factor
from ravnest.plan.plan import Plan

LEAST_GAIN = 1.2
"""Predicted rate of a new plan, in terms of the present one's, for which a job is interrupted."""
PAYS = 3.0
"""Least time that a new plan saves, in terms of what the move costs."""
LAST_PART = 0.1
"""Share of the training at its end in which plans are not replaced any more."""
RESTART = 30.0
"""Least seconds for workers to stop, for tests of new links, and for workers to start, to connect and to
make their first update."""
PAYBACK = 1 / (1 - 1 / LEAST_GAIN)
"""Time for which a plan must have trained before it is replaced, in terms of what a move costs: in that
time, even a move with the least gain has paid for itself."""


@dataclass(frozen=True)
class PresentStage:
    """A stage of the present plan, as it is now."""

    work: float
    """GFLOP per batch; 0: not known."""
    traffic: float
    """Mbit per batch on the links to both neighbours."""
    compute: float
    """GFLOP/s of its provider, with its slowdown."""
    link_rate: float
    """Mbit/s of the link to the next stage, with its slowdown; not used at the last stage."""


@dataclass(frozen=True)
class MoveCost:
    """Predicted seconds of training that a move costs."""

    shipping: float
    """Until all nodes have their weights, their state and their data."""
    repeated: float
    """Updates after the checkpoint, which are made again."""
    restart: float = RESTART

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.shipping + self.repeated + self.restart

    def __str__(self) -> str:
        return (
            f"{_time(self.seconds)} ({_time(self.shipping)} for shipping, {_time(self.restart)} for the "
            f"restart, {_time(self.repeated)} for updates that are repeated)"
        )


@dataclass(frozen=True)
class RunningPlan:
    """A job that trains, with measured figures."""

    trained: float
    """Seconds for which the present plan has trained."""
    remaining: float
    """Seconds until the end of training, at the measured rate."""
    share_left: float
    """Share of all updates that are not made yet."""
    idle: str = ""
    """Names of the idle providers; empty: there are none."""
    slow: str = ""
    """The stragglers, as a sentence; empty: there are none."""


@dataclass(frozen=True)
class OtherPlan:
    """Best plan for the job's own and the idle providers, with what was measured."""

    clusters: int
    providers: int
    gain: float
    """Predicted rate, in terms of the predicted rate of the present plan as it is now; with several
    clusters less by the samples that they need more for the same loss."""
    present_clusters: int = 1


@dataclass(frozen=True)
class KeepPlan:
    """The present plan stays."""

    reason: str
    kind: Literal["begins", "ends", "short", "infeasible", "gain", "pays"]


@dataclass(frozen=True)
class ReplacePlan:
    """The job returns to the queue and starts from a checkpoint with the new plan."""

    reason: str


def decide_before_plan(job: RunningPlan, cost: MoveCost) -> KeepPlan | None:
    """Return why no plan can be worth its move, so that the planner is not asked; None: one may be."""
    if job.share_left < LAST_PART:
        words = (
            f"{100 * job.share_left:.0f}% of the training are left, {100 * LAST_PART:.0f}% are needed"
        )
        return KeepPlan(_kept(job, f"a move does not pay any more: {words}"), "ends")
    if job.remaining < PAYS * cost.seconds:
        words = f"{_time(job.remaining)} are left, a move costs about {cost}"
        return KeepPlan(_kept(job, f"a move does not pay: {words}"), "short")
    if job.trained < PAYBACK * cost.seconds:
        words = f"trained for {_time(job.trained)}, {_time(PAYBACK * cost.seconds)} are needed"
        return KeepPlan(_kept(job, f"the present plan has not paid for itself yet: {words}"), "begins")
    return None


def decide_improvement(
    job: RunningPlan, cost: MoveCost, other: OtherPlan | str
) -> KeepPlan | ReplacePlan:
    """Return what to do, given the best other plan, or why there is none."""
    early = decide_before_plan(job, cost)
    if early is not None:
        return early
    if isinstance(other, str):
        return KeepPlan(_kept(job, f"there is no other plan: {other}"), "infeasible")
    faster = f"{100 * (other.gain - 1):.0f}% faster"
    if other.gain < LEAST_GAIN:
        words = f"another plan would be {faster}" if other.gain > 1 else "no other plan is faster"
        return KeepPlan(_kept(job, f"{words}, {100 * (LEAST_GAIN - 1):.0f}% are needed"), "gain")
    saved = job.remaining * (1 - 1 / other.gain)
    figures = f"saves {_time(saved)} of {_time(job.remaining)}, and the move costs about {cost}"
    if saved < PAYS * cost.seconds:
        return KeepPlan(_kept(job, f"another plan would be {faster}, but only {figures}"), "pays")
    count = f"{other.clusters} cluster{'s' if other.clusters > 1 else ''}"
    return ReplacePlan(
        f"a plan with {other.providers} providers in {count} is predicted to be {faster}; it {figures}"
        + (f"; idle: {job.idle}" if job.idle else "")
        + (f"; {job.slow}" if job.slow else "")
        + (f". {about_clusters(other.clusters)}" if other.clusters > other.present_clusters else "")
    )


def _kept(job: RunningPlan, why: str) -> str:
    """Say that the plan stays, and what the idle providers are then."""
    spare = f"idle and spare: {job.idle}" if job.idle else ""
    return "; ".join(each for each in ("the plan stays", spare, job.slow, why) if each)


def present_rate(clusters: Sequence[Sequence[PresentStage]]) -> float | None:
    """Return the batches per second of a plan by its slowest stages and links; None: not known.

    ``clusters``: their stages in order.
    """
    rate = 0.0
    for stages in clusters:
        if not stages or any(stage.work <= 0 for stage in stages):
            return None
        times = [stage.work / stage.compute for stage in stages]
        before = 0.0
        for stage, _ in pairwise(stages):
            before = max(stage.traffic - before, 0.0)  # the rest is that of the link to the next stage
            times.append(before / stage.link_rate)
        rate += 1 / max(times)
    return rate or None


def planned_rate(plan: Plan) -> float | None:
    """Return the same for a plan, as ``present_rate`` computes it."""
    rate = 0.0
    for cluster in plan.clusters:
        times = [
            each for stage in cluster.stages for each in (stage.compute_seconds, stage.link_seconds)
        ]
        if not times or max(times) <= 0:
            return None
        rate += 1 / max(times)
    return rate or None


def predicted_gain(new: Plan, own: Plan, clusters: Sequence[Sequence[PresentStage]]) -> float:
    """Return the predicted rate of a plan, in terms of that of the present one as it is now.

    ``own``: the best plan for the job's own providers. Its prediction, which knows of micro-batches, is
    that of the present plan but for the cuts: these count by their slowest stages and links. Both rates
    are less by the samples that their clusters need more for the same loss.
    """
    present, best = present_rate(clusters), planned_rate(own)
    of_best = 1.0 if present is None or best is None else present / best
    more_samples = samples_factor(len(new.clusters)) / samples_factor(max(len(clusters), 1))
    return new.samples_per_second / (own.samples_per_second * of_best) / more_samples


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
