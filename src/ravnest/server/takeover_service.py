"""Takeover of the places of lost nodes: spares take them, or their jobs wait or give them up.

A place is vacant while the newest assignment of its node is lost. All of that is in the database, so
that a restarted server continues where the last one stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import Assignment, ProviderOffer, ProviderState
from ravnest.server.assignments import FETCHING, needed_by
from ravnest.server.db.records import AssignmentRecord, JobRecord
from ravnest.server.deadline_table import DeadlineTable
from ravnest.server.job_service import JobService
from ravnest.server.job_status import (
    can_continue,
    failed_clusters,
    holders,
    lineage,
    place_name,
    vacant,
)
from ravnest.server.link_test_service import LinkTestService
from ravnest.server.reachability.relays import RelayService
from ravnest.server.reachability.routes import peers_of
from ravnest.server.reachability.status import reachability
from ravnest.server.scheduling.successor import peers, successor
from ravnest.server.scheduling.takeover import NoSpare, SpareProvider, VacantPlace, exhausted, fill
from ravnest.server.unit_of_work import UnitOfWork, UnitOfWorkFactory
from ravnest.store.node_spec import NodeSpec
from ravnest.transport.tls import is_loopback
from ravnest.types import Address

_BEFORE_TRAINING = (*FETCHING, "fetched")


@dataclass(frozen=True)
class _RunningJob:
    """A running job, its assignments and the assignments that stand for its nodes."""

    record: JobRecord
    assignments: Sequence[AssignmentRecord]
    bodies: Mapping[int, Assignment]
    """Assignments that stand for the nodes, by node."""
    offers: Mapping[str, ProviderOffer]
    """Offers of the providers that work on it."""

    @property
    def specs(self) -> dict[int, NodeSpec]:
        return {node: body.node_spec for node, body in self.bodies.items()}


class TakeoverService:
    """Fills vacant places; the methods are thread-safe and return soon."""

    def __init__(
        self,
        units: UnitOfWorkFactory,
        jobs: JobService,
        relays: RelayService,
        link_tests: LinkTestService,
    ) -> None:
        self._units = units
        self._jobs = jobs
        self._relays = relays
        self._link_tests = link_tests
        self._waits: DeadlineTable[str] = DeadlineTable()
        """Lost assignments whose jobs do not wait without a limit for another provider."""

    def fill(self) -> None:
        """Fill the vacant places of all jobs as far as idle providers can take them."""
        with self._units.db.read() as db:
            lost = db.assignments.lost()
            jobs = [job.id for job in db.jobs.in_state(JobState.SHIPPING, JobState.TRAINING)]
        self._waits.keep_only({each.id for each in lost})
        concerned = {each.job for each in lost}
        for job in (job for job in jobs if job in concerned):
            with self._units.begin() as uow:
                self._fill_job(uow, job)

    def hand_over(self, provider: str, reason: str) -> None:
        """Have a spare fetch the files of a provider that wants to leave, which works meanwhile."""
        with self._units.begin() as uow:
            own = uow.db.assignments.current(provider)
            if own is None or own.phase != "training":
                return
            found = self._running(uow, own.job)
            if found is None or lineage(found.assignments, own.node)[0].id != own.id:
                return  # somebody else fetches already
            if not can_continue(found.assignments, own) or vacant(found.assignments):
                return
            chosen = fill([self._place(uow, found, own)], self._spares(uow, found))
            if not isinstance(chosen, NoSpare):
                words = f"{found.offers[provider].name} leaves ({reason})"
                self._take_over(uow, found, own, chosen[own.node], words)

    def run_due(self) -> float | None:
        """Give up places that were vacant for too long; return the next deadline (steady clock)."""
        for name in self._waits.take_due(self._units.clock.steady()):
            with self._units.begin() as uow:
                own = uow.db.assignments.get(name)
                assignments = [] if own is None else uow.db.assignments.of_job(own.job)
                if own is not None and own.id in {each.id for each in vacant(assignments)}:
                    self._give_up(uow, own, f"{own.reason}; no other provider came in time")
                    uow.update_job_status(own.job)
        return self._waits.next

    def _fill_job(self, uow: UnitOfWork, job: str) -> None:
        found = self._running(uow, job)
        if found is None:
            return
        empty = vacant(found.assignments)
        for cluster in sorted({each.cluster for each in empty}):
            self._fill_cluster(uow, found, [each for each in empty if each.cluster == cluster])
        if empty:
            uow.update_job_status(job)

    def _fill_cluster(
        self, uow: UnitOfWork, found: _RunningJob, empty: Sequence[AssignmentRecord]
    ) -> None:
        """Fill the vacant places of a cluster, or wait, or give the cluster up."""
        places = {each.node: self._place(uow, found, each) for each in empty}
        for each in empty:
            if words := exhausted(places[each.node]):
                self._give_up(uow, each, words)
                return
        chosen = fill(places.values(), self._spares(uow, found))
        if not isinstance(chosen, NoSpare):
            for each in empty:
                words = f"{_name(found, each.provider, uow)} had it: {each.reason}"
                self._take_over(uow, found, each, chosen[each.node], words)
            return
        limit = uow.db.jobs.spec(found.record.id).on_insufficient
        whole = {each.cluster for each in holders(found.assignments)} - {each.cluster for each in empty}
        if limit == "fail" and whole - failed_clusters(found.assignments):
            self._give_up(uow, empty[0], f"{empty[0].reason}; {chosen.reason}")
        elif isinstance(limit, float):  # otherwise ``ReplanningService`` decides about the job
            for each in empty:
                self._waits.add(each.id, self._units.clock.steady() + limit)
            uow.topics.add(("clock", ""))

    def _give_up(self, uow: UnitOfWork, lost: AssignmentRecord, reason: str) -> None:
        """Fail the cluster of a place that is not filled again."""
        uow.end_assignment(lost, "failed", reason)
        uow.db.events.add("recovery", lost.job, f"{place_name(lost)} is given up: {reason}")
        self._jobs.schedule_stops(uow, lost.job)

    def _take_over(
        self,
        uow: UnitOfWork,
        found: _RunningJob,
        before: AssignmentRecord,
        spare: SpareProvider,
        words: str,
    ) -> None:
        """Give the place of an assignment to a spare."""
        provider = uow.db.providers.get(spare.id)
        assert provider is not None
        chain = lineage(found.assignments, before.node)
        own = next((each.id for each in chain if each.provider == spare.id), None)
        cluster = [each for each in found.assignments if each.cluster == before.cluster]
        started = any((each.phase_before or each.phase) not in _BEFORE_TRAINING for each in cluster)
        checkpoint = uow.db.telemetry.common_checkpoint(found.assignments, before.cluster)
        offers = [*found.offers.values(), provider.offer]
        body = found.bodies[before.node]
        peers_now = peers_of(found.specs.values()).get(before.node, ())
        relay = body.node_spec.relay and self._relays.access(before.job, before.node, peers_now, offers)
        new = successor(
            body,
            chain[0].generation + 1,
            provider.offer,
            found.specs,
            relay,
            resume=started,
            continues=own,
        )
        refills = self._refills(before, checkpoint) + 1
        uow.db.assignments.add(new, spare.id, refills=refills, checkpoint=checkpoint)
        uow.db.artifact_grants.grant(new.id, needed_by(new))
        if before.has_ended:
            uow.db.artifact_grants.revoke(before.id)
        name = place_name(before)
        reason = f"takes the place of {name} in {found.record.name}"
        uow.db.providers.move(provider, ProviderState.RESERVED, reason, job=before.job)
        where = f"update {checkpoint}" if checkpoint else "the start"
        what = f"{spare.name} takes the place of {name}; training continues from {where}; {words}"
        uow.db.events.add("recovery", before.job, what)
        uow.topics |= {("provider", spare.id), ("job", before.job), ("clock", "")}

    # Values for the decision

    def _running(self, uow: UnitOfWork, job: str) -> _RunningJob | None:
        record = uow.db.jobs.get(job)
        if record is None or record.state not in (JobState.SHIPPING, JobState.TRAINING):
            return None
        assignments = uow.db.assignments.of_job(job)
        bodies = {each.node: uow.db.assignments.body(each.id) for each in holders(assignments)}
        live = {each.provider for each in assignments if not each.has_ended}
        offers = {each.id: each.offer for each in uow.db.providers.present() if each.id in live}
        return _RunningJob(record, assignments, bodies, offers)

    def _place(self, uow: UnitOfWork, found: _RunningJob, own: AssignmentRecord) -> VacantPlace:
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
            refills=self._refills(own, checkpoint),
            neighbours=frozenset(each.provider for each in others if each.node in near),
            has_peers=bool(named),
            taken=frozenset(each.address for each in addresses),
        )

    @staticmethod
    def _refills(own: AssignmentRecord, checkpoint: int) -> int:
        """Return how often the place was filled since the newest checkpoint."""
        return own.refills if own.checkpoint >= checkpoint else 0

    def _spares(self, uow: UnitOfWork, found: _RunningJob) -> list[SpareProvider]:
        idle = [each for each in uow.db.providers.present() if each.state is ProviderState.OFFERED]
        relays = self._relays.live()
        offers = dict(found.offers) | {each.id: each.offer for each in idle}
        failing = [each for each in self._link_tests.links_between(offers).records if each.failure]
        pairs = {(each.one, each.other) for each in failing}
        return [
            SpareProvider(
                id=each.id,
                name=each.offer.name,
                ram=each.offer.ram * 1e9,
                compute=each.offer.compute,
                bandwidth=each.offer.bandwidth,
                addresses=frozenset(each.offer.all_addresses),
                is_loopback=is_loopback(Address.parse(each.offer.address)),
                is_reachable=reachability(each.offer, each.checks, relays).kind != "unreachable",
                cut_off=frozenset(
                    other for other in offers if {(each.id, other), (other, each.id)} & pairs
                ),
            )
            for each in idle
        ]


def _name(found: _RunningJob, provider: str, uow: UnitOfWork) -> str:
    offer = found.offers.get(provider)
    return uow.db.providers.names([provider])[provider] if offer is None else offer.name
