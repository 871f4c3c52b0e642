"""A running job as it is now: its pace, its providers and the idle ones, what a move would cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import Assignment, ProviderOffer, ProviderState
from ravnest.server.complete_checkpoints import CompleteCheckpoint
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import AssignmentRecord, JobRecord, ProviderRecord
from ravnest.server.job_pace import ClusterPace, PaceReader
from ravnest.server.job_status import holders, roots, vacant
from ravnest.server.scheduling.improvement import RESTART, MoveCost, PresentStage, RunningPlan
from ravnest.server.scheduling.link_tests import ProviderLinks
from ravnest.server.scheduling.stragglers import LEAST_GROWTH, Slowdowns, with_slowdowns


@dataclass(frozen=True)
class PlanQuestion:
    """Question to the planner; the same one is not asked twice."""

    own: tuple[tuple[str, ProviderOffer], ...]
    idle: tuple[tuple[str, ProviderOffer], ...]
    slow: frozenset[tuple[object, int]]
    """Stragglers, and how slow they are in coarse steps: measured figures always change a little."""


@dataclass(frozen=True)
class PlanReview:
    """All that a decision about the plan of a running job needs."""

    job: JobRecord
    held: tuple[AssignmentRecord, ...]
    bodies: Mapping[str, Assignment]
    """Bodies of ``held``, by id."""
    own: tuple[ProviderRecord, ...]
    idle: tuple[ProviderRecord, ...]
    slow: Slowdowns
    paces: tuple[ClusterPace, ...]
    trained: float
    """Seconds since the present plan began to train."""
    shipped: float
    """Seconds that its shipping took."""
    started: float
    """Seconds that its workers took afterwards until they trained; 0: not known."""

    @property
    def question(self) -> PlanQuestion:
        """The question for the planner."""
        slow: list[tuple[object, float]] = list(self.slow.compute.items())
        slow += [(pair, each.factor) for pair, each in self.slow.links.items()]
        steps = frozenset((key, round(math.log(factor, LEAST_GROWTH))) for key, factor in slow)
        return PlanQuestion(_offers(self.own), _offers(self.idle), steps)

    @property
    def running(self) -> RunningPlan:
        """The figures for the decision."""
        names = {each.id: each.offer.name for each in self.own}
        return RunningPlan(
            trained=self.trained,
            remaining=max(each.seconds_left for each in self.paces),
            share_left=max(each.updates_left / each.updates for each in self.paces),
            idle=", ".join(sorted(each.offer.name for each in self.idle)),
            slow=self.slow.described(names),
        )

    @property
    def cost(self) -> MoveCost:
        """Predicted cost of a move: the largest present stage over the slowest connection."""
        slowest = min(each.offer.bandwidth for each in (*self.own, *self.idle)) * 1e6 / 8
        weights = max(each.weights.size for each in self.bodies.values())
        newest = (pace.checkpoints[0][0] for pace in self.paces)
        state = max(stage.tensors.size for each in newest for stage in each.stages)
        return MoveCost(
            shipping=max(self.shipped, (weights + state) / slowest),
            repeated=state / slowest,
            restart=max(self.started, RESTART),
        )

    def stages(self, links: ProviderLinks) -> list[list[PresentStage]]:
        """Return the stages of all clusters as they are now."""
        offers, links = with_slowdowns(_offers(self.own), links, self.slow)
        by_provider = dict(offers)
        rates = {
            frozenset((each.one, each.other)): min(each.forward, each.back)
            for each in links.records
            if not each.failure
        }
        clusters: dict[int, list[AssignmentRecord]] = {}
        for each in self.held:
            clusters.setdefault(each.cluster, []).append(each)
        found = []
        for cluster in sorted(clusters):
            ordered = sorted(clusters[cluster], key=lambda each: self.bodies[each.id].node_spec.stage)
            stages = []
            for one, other in zip_longest(ordered, ordered[1:]):
                offer, needs = by_provider[one.provider], self.bodies[one.id].needs
                behind = offer if other is None else by_provider[other.provider]
                pair = frozenset((one.provider, one.provider if other is None else other.provider))
                rate = rates.get(pair, min(offer.bandwidth, behind.bandwidth))
                stages.append(PresentStage(needs.work, needs.traffic, offer.compute, rate))
            found.append(stages)
        return found

    def start(self, since: float, *, at_epoch_end: bool) -> list[CompleteCheckpoint] | None:
        """Return the checkpoints from which a new plan can start; None: there are none yet.

        ``since``: they must not be older. ``at_epoch_end``: all clusters have taken theirs at the end of
        the same epoch, so that the data can be shared out anew without using a sample twice.
        """
        newer = [
            [(each, position) for each, position in pace.checkpoints if each.time >= since]
            for pace in self.paces
        ]
        if not at_epoch_end:
            return [each[0][0] for each in newer] if all(newer) else None
        ends = [
            {position.epoch: each for each, position in reversed(found) if not position.batches}
            for found in newer
        ]
        common = set.intersection(*(set(each) for each in ends))
        return [each[max(common)] for each in ends] if common else None


class PlanReviewer:
    """Reads reviews from the database."""

    def __init__(self, pace: PaceReader) -> None:
        self._pace = pace

    def review(self, db: Transaction, job: str, slow: Slowdowns, now: float) -> PlanReview | None:
        """Return the review of a job; None while it does not train as a whole, or is too young."""
        record = db.jobs.get(job)
        if record is None or record.state is not JobState.TRAINING:
            return None
        assignments = db.assignments.of_job(job)
        held = holders(assignments)
        live = [each for each in assignments if not each.has_ended]
        if vacant(assignments) or live != held or any(each.phase != "training" for each in held):
            return None
        paces = self._pace.read(db, record, assignments, now)
        if paces is None:
            return None
        began, shipped = (
            db.events.last_entry(job, state) for state in (JobState.TRAINING, JobState.SHIPPING)
        )
        schedules = [db.telemetry.first_schedule(each.id) for each in roots(held)]
        present = {each.id: each for each in db.providers.present()}
        own = [present[each.provider] for each in held if each.provider in present]
        if began is None or shipped is None or len(own) < len(held):
            return None
        return PlanReview(
            job=record,
            held=tuple(held),
            bodies={each.id: db.assignments.body(each.id) for each in held},
            own=tuple(own),
            idle=tuple(each for each in present.values() if each.state is ProviderState.OFFERED),
            slow=slow,
            paces=tuple(paces),
            trained=max(now - began, 0.0),
            shipped=max(began - shipped, 0.0),
            started=max((each - began for each in schedules if each is not None), default=0.0),
        )


def _offers(providers: Sequence[ProviderRecord]) -> tuple[tuple[str, ProviderOffer], ...]:
    return tuple((each.id, each.offer) for each in providers)
