"""Takeover of the places of lost nodes: spares take them, or their jobs wait or give them up.

A place is vacant while the newest assignment of its node is lost. All of that is in the database, so
that a restarted server continues where the last one stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import ProviderState
from ravnest.server.assignments import needed_by
from ravnest.server.db.records import AssignmentRecord
from ravnest.server.deadline_table import DeadlineTable
from ravnest.server.job_service import JobService
from ravnest.server.job_status import (
    can_continue,
    failed_clusters,
    holders,
    lineage,
    place_name,
    to_repeat,
    vacant,
)
from ravnest.server.link_test_service import LinkTestService
from ravnest.server.reachability.relays import RelayService
from ravnest.server.reachability.routes import peers_of
from ravnest.server.reachability.status import reachability
from ravnest.server.scheduling.successor import place_of, successor
from ravnest.server.scheduling.takeover import (
    NoSpare,
    SpareProvider,
    exhausted,
    fill,
    returning,
)
from ravnest.server.scheduling.takeover_state import TakeoverState
from ravnest.server.takeover_situation import (
    BEFORE_TRAINING,
    FilledPlace,
    RunningJob,
    last_upload,
    provider_name,
    refills_since,
    running_job,
    takeover_state,
    vacant_place,
)
from ravnest.server.unit_of_work import UnitOfWork, UnitOfWorkFactory
from ravnest.store.node_spec import NodeSpec
from ravnest.transport.tls import is_loopback
from ravnest.types import Address

_log = logging.getLogger(__name__)


class TakeoverService:
    """Fills vacant places; the methods are thread-safe and return soon."""

    def __init__(
        self,
        units: UnitOfWorkFactory,
        jobs: JobService,
        relays: RelayService,
        link_tests: LinkTestService,
        leaving: Set[str],
    ) -> None:
        """``leaving``: providers that want to leave, as their heartbeats say."""
        self._leaving = leaving
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
        """Have a spare fetch the files of a provider that wants to leave, which works meanwhile.

        If nobody who stays has the state of its stage, it is uploaded first: ``last_upload``. A spare
        takes the place when the provider has left.
        """
        with self._units.begin() as uow:
            own = uow.db.assignments.current(provider)
            if own is None or own.phase != "training":
                return
            found = running_job(uow, own.job)
            if found is None or lineage(found.assignments, own.node)[0].id != own.id:
                return  # somebody else fetches already
            is_ending = bool(to_repeat(found.assignments, own))
            if is_ending or not can_continue(found.assignments, own) or vacant(found.assignments):
                return
            if last_upload(uow.db, found.assignments, own, self._leaving) is not None:
                return
            chosen = fill([vacant_place(uow, found, own)], self._spares(uow, found))
            if not isinstance(chosen, NoSpare):
                words = f"{found.offers[provider].name} leaves ({reason})"
                self._take_over(uow, found, [FilledPlace(own, chosen[own.node], words)])

    def run_due(self) -> float | None:
        """Give up places that were vacant for too long; return the next deadline (steady clock)."""
        for name in self._waits.take_due(self._units.clock.steady()):
            with self._units.begin() as uow:
                own = uow.db.assignments.get(name)
                assignments = [] if own is None else uow.db.assignments.of_job(own.job)
                if own is not None and own.id in {each.id for each in vacant(assignments)}:
                    self.give_up(uow, own, f"{own.reason}; no other provider came in time")
                    uow.update_job_status(own.job)
        return self._waits.next

    def _fill_job(self, uow: UnitOfWork, job: str) -> None:
        found = running_job(uow, job)
        if found is None:
            return
        empty = vacant(found.assignments)
        for cluster in sorted({each.cluster for each in empty}):
            self._fill_cluster(uow, found, [each for each in empty if each.cluster == cluster])
        if empty:
            uow.update_job_status(job)

    def _fill_cluster(
        self, uow: UnitOfWork, found: RunningJob, empty: Sequence[AssignmentRecord]
    ) -> None:
        """Fill the vacant places of a cluster, or wait, or give the cluster up."""
        places = {each.node: vacant_place(uow, found, each) for each in empty}
        for each in empty:
            if words := exhausted(places[each.node]):
                self.give_up(uow, each, words)
                return
        spares = self._spares(uow, found)
        chosen = returning(places.values(), spares)
        left = [each for each in empty if each.node not in chosen]
        used = {each.id for each in chosen.values()}
        others = fill(
            [places[each.node] for each in left], [each for each in spares if each.id not in used]
        )
        if not isinstance(others, NoSpare):
            chosen |= others
        filled = [
            FilledPlace(
                each,
                chosen[each.node],
                f"{provider_name(found, each.provider, uow)} had it: {each.reason}",
            )
            for each in empty
            if each.node in chosen
        ]
        if filled:
            self._take_over(uow, found, filled)
        if isinstance(others, NoSpare):
            if failed := next((each for each in left if each.cause == "unconfirmed"), None):
                self.give_up(uow, failed, failed.reason)  # nobody can show that its provider is wrong
                return
            self._wait(uow, found, left, others.reason)

    def _wait(
        self, uow: UnitOfWork, found: RunningJob, empty: Sequence[AssignmentRecord], reason: str
    ) -> None:
        """Wait for further providers as long as the job allows; ``ReplanningService`` may end that.

        While other clusters train, only that one decides: the share of the data may move to them.
        """
        limit = uow.db.jobs.spec(found.record.id).on_insufficient
        gaps = {each.cluster for each in vacant(found.assignments)}
        whole = {each.cluster for each in holders(found.assignments)} - gaps
        others_train = bool(whole - failed_clusters(found.assignments))
        _log.debug("%s waits for providers: %s", found.record.id, reason)
        for each in empty:
            if others_train or not isinstance(limit, float):
                self._waits.remove(each.id)
            else:
                self._waits.add(each.id, self._units.clock.steady() + limit)
                uow.topics.add(("clock", ""))

    def give_up(self, uow: UnitOfWork, lost: AssignmentRecord, reason: str) -> None:
        """Fail the cluster of a place that is not filled again."""
        uow.end_assignment(lost, "failed", reason)
        uow.db.events.add("recovery", lost.job, f"{place_name(lost)} is given up: {reason}")
        self._jobs.schedule_stops(uow, lost.job)

    def _take_over(self, uow: UnitOfWork, found: RunningJob, filled: Sequence[FilledPlace]) -> None:
        """Give places of one cluster to spares."""
        state = takeover_state(uow, found, filled, self._leaving)
        if state.begins_again:
            self._begin_again(uow, found, filled[0].before.cluster, state)
            return
        specs, offers = found.specs, dict(found.offers)
        for each in filled:
            provider = uow.db.providers.get(each.spare.id)
            assert provider is not None
            offers[provider.id] = provider.offer
            place = place_of(found.bodies[each.node], provider.offer)
            specs[each.node] = replace(
                specs[each.node],
                address=place.address,
                others=place.others,
                dials_next=True,
                dials_previous=False,
            )
        for each in sorted(filled, key=lambda each: specs[each.node].stage):
            now = replace(found, offers=offers)
            specs[each.node] = self._give_place(uow, now, each, specs, state)

    def _give_place(
        self,
        uow: UnitOfWork,
        found: RunningJob,
        filled: FilledPlace,
        specs: Mapping[int, NodeSpec],
        state: TakeoverState,
    ) -> NodeSpec:
        """Give the place of an assignment to a spare and return its node's spec.

        ``specs``: the nodes as they will be, those of earlier stages complete.
        """
        before, spare = filled.before, filled.spare
        provider = uow.db.providers.get(spare.id)
        assert provider is not None
        chain = lineage(found.assignments, before.node)
        own = next((each.id for each in chain if each.provider == spare.id), None)
        cluster = [each for each in found.assignments if each.cluster == before.cluster]
        started = any((each.phase_before or each.phase) not in BEFORE_TRAINING for each in cluster)
        body = found.bodies[before.node]
        peers_now = peers_of(specs.values()).get(before.node, ())
        offers = list(found.offers.values())
        relay = body.node_spec.relay and self._relays.access(before.job, before.node, peers_now, offers)
        new = successor(
            body,
            chain[0].generation + 1,
            provider.offer,
            specs,
            relay,
            resume=started,
            continues=own,
            seed=state.seed(body.node_spec.stage),
        )
        refills = refills_since(before, state.common) + 1
        uow.db.assignments.add(new, spare.id, refills=refills, checkpoint=state.common)
        uow.db.artifact_grants.grant(new.id, needed_by(new))
        if before.has_ended:
            uow.db.artifact_grants.revoke(before.id)
        name = place_name(before)
        reason = f"takes the place of {name} in {found.record.name}"
        uow.db.providers.move(provider, ProviderState.RESERVED, reason, job=before.job)
        what = f"{spare.name} takes the place of {name}; {state}; {filled.words}"
        uow.db.events.add("recovery", before.job, what)
        uow.topics |= {("provider", spare.id), ("job", before.job), ("clock", "")}
        return new.node_spec

    def _begin_again(
        self, uow: UnitOfWork, found: RunningJob, cluster: int, state: TakeoverState
    ) -> None:
        """Have the nodes that wait give up their places, to take them again with the same state."""
        for each in holders(found.assignments):
            if each.cluster == cluster and not each.has_ended:
                provider = uow.db.providers.get(each.provider)
                assert provider is not None
                uow.db.assignments.lose(each, "the state of a lost node is only at the server", None)
                if each.provider not in self._leaving:
                    uow.release(provider, f"it begins again in {found.record.name}: {state}")

    def _spares(self, uow: UnitOfWork, found: RunningJob) -> list[SpareProvider]:
        barred = uow.db.assignments.barred(found.record.id)
        present = [each for each in uow.db.providers.present() if each.id not in barred]
        idle = [each for each in present if each.state is ProviderState.OFFERED]
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
