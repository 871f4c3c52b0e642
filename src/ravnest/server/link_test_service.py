"""Tests of the links between the providers of a planned job, before it starts.

A job with a plan whose neighbours have not measured their links gets a round of tests: its providers
are reserved, pairs of them test their links at the same time, and the job returns to the queue, where
the plan is made again with the figures. Tests are kept in memory: after a restart of the server the job
is planned again anyway.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ravnest.errors import ServerRefusedError
from ravnest.schemas.jobs import JobState
from ravnest.schemas.link_tests import LinkTestOrder, LinkTestResult
from ravnest.schemas.providers import ProviderOffer, ProviderState, SignedCertificate
from ravnest.server.auth.tokens import AuthService
from ravnest.server.db.records import MemberRecord, ProviderPresence, ProviderRecord
from ravnest.server.reachability.relays import RelayService
from ravnest.server.reachability.routes import nearest_relays
from ravnest.server.reachability.status import reachability
from ravnest.server.scheduling.link_tests import (
    ProviderLinks,
    ProviderPair,
    link_record,
    listener_of,
    next_pairs,
    pairs_to_test,
    progress,
    usable,
)
from ravnest.server.scheduling.planning import PlannedJob
from ravnest.server.settings import ServerSettings
from ravnest.server.unit_of_work import UnitOfWorkFactory
from ravnest.transport.link_secret import new_secret
from ravnest.transport.tls import is_loopback
from ravnest.types import Address


@dataclass(frozen=True)
class _Test:
    """Test of one link, while it runs."""

    id: str
    job: str
    listener: ProviderRecord
    dialer: ProviderRecord
    orders: Mapping[str, LinkTestOrder]
    """Order of each of the two providers."""
    deadline: float
    """By the steady clock."""

    @property
    def names(self) -> list[str]:
        return sorted((self.dialer.offer.name, self.listener.offer.name))


@dataclass
class _Round:
    """Tests of one job."""

    waiting: list[ProviderPair]
    total: int
    active: dict[str, _Test] = field(default_factory=dict)
    ending: set[str] = field(default_factory=set)
    """Tests whose results are being stored."""

    @property
    def busy(self) -> set[str]:
        return {provider for test in self.active.values() for provider in test.orders}

    @property
    def done(self) -> int:
        return self.total - len(self.waiting) - len(self.active)


class LinkTestService:
    """Link tests and their figures; thread-safe."""

    def __init__(
        self,
        units: UnitOfWorkFactory,
        auth: AuthService,
        settings: ServerSettings,
        relays: RelayService,
    ) -> None:
        self._units = units
        self._auth = auth
        self._settings = settings
        self._relays = relays
        self._lock = threading.Lock()
        """Not held while the database is used."""
        self._rounds: dict[str, _Round] = {}
        """Rounds that run, by job."""
        self._count: Counter[str] = Counter()
        """Rounds in a row of each job that has not started yet."""

    # Called by matching

    def links_between(self, offers: Mapping[str, ProviderOffer]) -> ProviderLinks:
        """Return what is known about the links between providers."""
        now = self._units.clock.wall()
        with self._units.db.read() as db:
            records = db.links.between(offers)
        relays = nearest_relays(self._relays.live().values(), offers.values())
        return ProviderLinks(
            usable(
                records,
                offers,
                measured=now - self._settings.link_figures_kept,
                failed=now - self._settings.link_failure_kept,
            ),
            relay_rate=relays[0].capacity if relays else None,
            has_relay=bool(relays),
        )

    def needed(self, job: str, planned: PlannedJob) -> list[ProviderPair]:
        """Return the pairs to test before the job starts; none after the last round of a job."""
        with self._lock:
            if self._count[job] >= self._settings.link_test_rounds:
                return []
        offers = dict(zip(planned.providers, planned.offers, strict=False))
        return pairs_to_test(
            planned.plan,
            planned.providers,
            offers,
            self.links_between(offers).records,
            with_loopback=self._settings.test_loopback_links,
        )

    def begin(self, job: str, pairs: Sequence[ProviderPair]) -> None:
        """Test the links of a planned job, whose providers are reserved for it."""
        with self._lock:
            self._count[job] += 1
            self._rounds[job] = _Round(list(pairs), len(pairs))
        self._advance(job)

    def forget_rounds(self, job: str) -> None:
        """Count the rounds of a job anew: it waits for something else than its links."""
        with self._lock:
            self._count.pop(job, None)

    # Called by providers

    def order_for(self, provider: ProviderPresence) -> LinkTestOrder | None:
        """Return the test that a provider should carry out."""
        if provider.state is not ProviderState.RESERVED or provider.job is None:
            return None
        with self._lock:
            tests = self._rounds[provider.job].active.values() if provider.job in self._rounds else ()
            found = (test.orders[provider.id] for test in tests if provider.id in test.orders)
            return next(found, None)

    def sign(self, member: MemberRecord, test: str, request: str) -> SignedCertificate:
        """Sign the certificate of a provider for a test."""
        found = self._own(member, test)
        return self._auth.sign(found.id, found.orders[member.id].node, request)

    def report(self, member: MemberRecord, test: str, result: LinkTestResult) -> None:
        """Store the result of a test; refuse (404) if the test is over."""
        found = self._own(member, test)
        if found.orders[member.id].listens and not result.failure:
            raise ServerRefusedError("the provider that dials reports the figures", 422)
        self._end(found, result)

    def _own(self, member: MemberRecord, test: str) -> _Test:
        with self._lock:
            active = (each.active.get(test) for each in self._rounds.values())
            found = next((each for each in active if each is not None), None)
        if found is None:
            raise ServerRefusedError(f"there is no link test {test}, or it is over", 404)
        if member.id not in found.orders:
            raise self._auth.refused(member.id, f"{member.name} has no part in the link test {test}")
        return found

    # Rounds

    def run_due(self) -> float | None:
        """Give up overdue tests, forget old figures; return the next deadline (steady clock)."""
        now = self._units.clock.steady()
        self._forget()
        with self._lock:
            active = [test for each in self._rounds.values() for test in each.active.values()]
        for test in active:
            if test.deadline <= now:
                words = f"their test did not end within {self._settings.link_test:g} seconds"
                self._end(test, LinkTestResult(failure=words))
        with self._lock:
            tests = [test for each in self._rounds.values() for test in each.active.values()]
        return min((test.deadline for test in tests), default=None)

    def _forget(self) -> None:
        """Forget figures that are too old, and rounds of jobs that ended or lost a provider."""
        with self._units.begin() as uow:
            now = uow.db.now
            uow.needs_matching |= uow.db.links.forget_older(
                measured=now - self._settings.link_figures_kept,
                failed=now - self._settings.link_failure_kept,
            )
            planned = {job.id for job in uow.db.jobs.in_state(JobState.PLANNED)}
            waiting = {job.id for job in uow.db.jobs.in_state(JobState.SUBMITTED)}
        with self._lock:
            over = [self._rounds.pop(job) for job in set(self._rounds) - planned]
            self._count = Counter({j: n for j, n in self._count.items() if j in planned | waiting})
        for each in over:
            for test in each.active:
                self._auth.forget_job(test)

    def _end(self, test: _Test, result: LinkTestResult) -> None:
        """Store the result of a test and go on with its round."""
        with self._lock:
            found = self._rounds.get(test.job)
            if found is None or test.id not in found.active or test.id in found.ending:
                return
            found.ending.add(test.id)
        self._auth.forget_job(test.id)
        with self._units.begin() as uow:
            record = link_record(test.listener, test.dialer, result, uow.db.now)
            uow.db.links.put(record)
            if record.failure:
                what = f"{' and '.join(test.names)} cannot reach each other: {record.failure}"
                uow.db.events.add("warning", test.dialer.id, what, job=test.job)
        with self._lock:
            found.active.pop(test.id, None)  # only now: the last one of a round ends it
        self._advance(test.job)

    def _advance(self, job: str) -> None:
        """Start the tests of a round that can run now, or return the job to the queue."""
        with self._units.db.read() as db:
            providers = {each.id: each for each in db.providers.of_job(job)}
        with self._lock:
            found = self._rounds.get(job)
            if found is None:
                return
            # A pair without one of its providers is not tested: the job is about to be planned again.
            found.waiting = [p for p in found.waiting if {p.earlier, p.later} <= set(providers)]
            for pair in next_pairs(found.waiting, found.busy):
                found.waiting.remove(pair)
                test = self._test(job, pair, providers)
                found.active[test.id] = test
            tests, is_over = list(found.active.values()), not found.active
            words = progress([test.names for test in tests], found.done, found.total)
            if is_over:
                del self._rounds[job]
        with self._units.begin() as uow:
            record = uow.db.jobs.get(job)
            if record is None or record.state is not JobState.PLANNED:
                return
            if is_over:
                uow.requeue(record, "the links between its providers are measured")
                return
            uow.db.jobs.explain(record, words)
            uow.topics |= {("provider", provider) for test in tests for provider in test.orders}
            uow.topics |= {("job", job), ("clock", "")}

    def _test(self, job: str, pair: ProviderPair, providers: Mapping[str, ProviderRecord]) -> _Test:
        """Return a new test of a pair."""
        test = f"link-{secrets.token_hex(6)}"
        both = [providers[pair.earlier], providers[pair.later]]
        relays = self._relays.live()
        direct = {p.id for p in both if reachability(p.offer, p.checks, relays).kind == "direct"}
        listener = providers[listener_of(pair, direct)]
        dialer = both[0] if listener is both[1] else both[1]
        nodes = {provider.id: node for provider, node in zip(both, pair.nodes, strict=True)}
        addresses = listener.offer.all_addresses
        tls = not is_loopback(Address.parse(addresses[0]))
        orders, secret = {}, new_secret()
        for own, peer in ((listener, dialer), (dialer, listener)):
            node, other = nodes[own.id], nodes[peer.id]
            orders[own.id] = LinkTestOrder(
                id=test,
                listens=own is listener,
                node=node,
                peer=other,
                peer_name=peer.offer.name,
                addresses=addresses,
                tls=tls,
                relay=self._relays.access(job, node, (other,), [p.offer for p in both]) if tls else None,
                secret=secret,
            )
        deadline = self._units.clock.steady() + self._settings.link_test
        return _Test(test, job, listener, dialer, orders, deadline)
