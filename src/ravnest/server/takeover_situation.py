"""Situation of a job with vacant places, as the database has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ravnest.schemas.checkpoints import CheckpointOrder
from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import Assignment, ProviderOffer
from ravnest.server.assignments import FETCHING
from ravnest.server.complete_checkpoints import complete_checkpoints
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import AssignmentRecord, JobRecord
from ravnest.server.job_status import holders, lineage, place_name
from ravnest.server.scheduling.successor import peers
from ravnest.server.scheduling.takeover import SpareProvider, VacantPlace
from ravnest.server.scheduling.takeover_state import TakeoverState
from ravnest.server.unit_of_work import UnitOfWork
from ravnest.store.node_spec import NodeSpec
from ravnest.telemetry import PhaseRecord

BEFORE_TRAINING = (*FETCHING, "fetched")
"""Phases of an assignment whose worker has not started."""
_CONNECTING = ("connect", "rejoin")
"""Phases of a worker before it has the state of its stage."""
_PHASES_READ = 8
"""Newest phases of a worker that say if it has trained."""


@dataclass(frozen=True)
class RunningJob:
    """A running job, its assignments and the assignments that stand for its nodes."""

    record: JobRecord
    assignments: Sequence[AssignmentRecord]
    bodies: Mapping[int, Assignment]
    """Assignments that stand for the nodes, by node."""
    offers: Mapping[str, ProviderOffer]
    """Offers of the providers that work on it."""

    @property
    def specs(self) -> dict[int, NodeSpec]:
        """Return the specs of the nodes, by node."""
        return {node: body.node_spec for node, body in self.bodies.items()}


@dataclass(frozen=True)
class FilledPlace:
    """A place that a spare takes."""

    before: AssignmentRecord
    """Assignment that had it."""
    spare: SpareProvider
    words: str
    """Why it is vacant, or will be."""

    @property
    def node(self) -> int:
        """Return the number of the node."""
        return self.before.node


def running_job(uow: UnitOfWork, job: str) -> RunningJob | None:
    """Return a job that has been shipped and has not ended."""
    record = uow.db.jobs.get(job)
    if record is None or record.state not in (JobState.SHIPPING, JobState.TRAINING):
        return None
    assignments = uow.db.assignments.of_job(job)
    bodies = {each.node: uow.db.assignments.body(each.id) for each in holders(assignments)}
    live = {each.provider for each in assignments if not each.has_ended}
    offers = {each.id: each.offer for each in uow.db.providers.present() if each.id in live}
    return RunningJob(record, assignments, bodies, offers)


def takeover_state(
    uow: UnitOfWork, found: RunningJob, filled: Sequence[FilledPlace], leaving: Collection[str]
) -> TakeoverState:
    """Return where the cluster of these places can continue; ``leaving``: providers that are gone soon.

    The disk of a provider that leaves goes with it.
    """
    first = filled[0].before
    members = [each for each in holders(found.assignments) if each.cluster == first.cluster]
    spec = found.bodies[first.node].node_spec
    returning = [each.before for each in filled if each.spare.id == each.before.provider]
    returned = {each.node for each in returning if _keeps_state(uow.db, found.assignments, each)}
    places = {each.node for each in filled}
    there = [each for each in members if not each.has_ended and each.node not in places]
    held = {each.node for each in there if _stays(uow.db, found.assignments, each, leaving)}
    uploaded = uow.db.checkpoints.of_job(first.job)
    own = [each for each in uploaded if (each.plan, each.cluster) == (spec.plan, first.cluster)]
    saved = next(iter(complete_checkpoints(own)), None)
    seeds = [found.bodies[each.node].seed for each in there]
    return TakeoverState(
        stages=spec.stages,
        keeping=frozenset(found.bodies[node].node_spec.stage for node in held | returned),
        is_held=bool(held),
        is_unseeded=any(saved and (seed is None or seed.id != saved.id) for seed in seeds),
        common=uow.db.telemetry.common_checkpoint(found.assignments, first.cluster),
        saved=saved,
        age=0.0 if saved is None else max(uow.db.now - saved.time, 0.0),
        shipped=found.bodies[first.node].seed,
    )


def last_upload(
    db: Transaction,
    assignments: Sequence[AssignmentRecord],
    own: AssignmentRecord,
    leaving: Collection[str],
) -> CheckpointOrder | None:
    """Return what a provider uploads before it leaves; None if the nodes that stay have all stages.

    ``assignments``: those of its job.
    """
    spec = db.assignments.body(own.id).node_spec
    gone = {*leaving, own.provider}
    staying = [
        each
        for each in holders(assignments)
        if each.cluster == own.cluster and not each.has_ended and _stays(db, assignments, each, gone)
    ]
    keeping = frozenset(db.assignments.body(each.id).node_spec.stage for each in staying)
    if TakeoverState(stages=spec.stages, keeping=keeping).is_complete:
        return None
    near = (stage for stage in (spec.stage - 1, spec.stage + 1) if 0 <= stage < spec.stages)
    return CheckpointOrder(rescue=True, stages=tuple(near))


def _stays(
    db: Transaction,
    assignments: Sequence[AssignmentRecord],
    own: AssignmentRecord,
    leaving: Collection[str],
) -> bool:
    """Return whether the provider of an assignment stays, with the state of its stage."""
    return own.provider not in leaving and _keeps_state(db, assignments, own)


def _keeps_state(
    db: Transaction, assignments: Sequence[AssignmentRecord], own: AssignmentRecord
) -> bool:
    """Return whether the provider of an assignment has the state of its stage on its disk."""
    chain = [each for each in lineage(assignments, own.node) if each.provider == own.provider]
    return any(_has_begun(db, each) for each in chain)


def _has_begun(db: Transaction, own: AssignmentRecord) -> bool:
    """Return whether a node has trained; one that takes a place gets its state from others first."""
    if (own.phase_before or own.phase) in BEFORE_TRAINING:
        return False
    phases = db.telemetry.newest(own.id, PhaseRecord, _PHASES_READ)
    return own.generation == 0 or any(each.phase not in _CONNECTING for each in phases)


def vacant_place(uow: UnitOfWork, found: RunningJob, own: AssignmentRecord) -> VacantPlace:
    """Return the place of an assignment for the decision who takes it."""
    body = found.bodies[own.node]
    held = holders(found.assignments)
    named = peers(body.node_spec)
    near = {each.node for each in (body.node_spec.previous, body.node_spec.next) if each}
    others = [each for each in held if each.node != own.node and not each.has_ended]
    checkpoint = uow.db.telemetry.common_checkpoint(found.assignments, own.cluster)
    addresses = (found.bodies[each.node].node_spec for each in others)
    return VacantPlace(
        node=own.node,
        name=place_name(own),
        needs=body.needs,
        tls=body.tls,
        holder=own.provider,
        cause=own.cause,
        reason=own.reason,
        refills=refills_since(own, checkpoint),
        neighbours=frozenset(each.provider for each in others if each.node in near),
        has_peers=bool(named),
        taken=frozenset(each.address for each in addresses),
        refused=frozenset(
            each.provider for each in lineage(found.assignments, own.node) if each.cause == "unconfirmed"
        ),
    )


def refills_since(own: AssignmentRecord, checkpoint: int) -> int:
    """Return how often the place was filled since the newest checkpoint."""
    return own.refills if own.checkpoint >= checkpoint else 0


def provider_name(found: RunningJob, provider: str, uow: UnitOfWork) -> str:
    """Return the name of a provider that may be gone."""
    offer = found.offers.get(provider)
    return uow.db.providers.names([provider])[provider] if offer is None else offer.name
