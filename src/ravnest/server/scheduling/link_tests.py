"""Decisions about the tests of links that precede a job: pairs to test, figures for the plan. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ravnest.plan.links import LinkFigures, MeasuredLink, pair_of
from ravnest.plan.plan import Plan
from ravnest.schemas.link_tests import LinkTestResult
from ravnest.schemas.providers import ProviderOffer
from ravnest.server.db.records import LinkRecord, ProviderRecord
from ravnest.transport.tls import is_loopback
from ravnest.types import Address


@dataclass(frozen=True)
class ProviderLinks:
    """Usable figures of the links between providers, and what relays add to them."""

    records: tuple[LinkRecord, ...] = ()
    relay_rate: float | None = None
    """Mbit/s of the relay that a job would use; None: no limit is known."""
    has_relay: bool = True

    def figures(self, providers: Sequence[tuple[str, ProviderOffer]]) -> LinkFigures:
        """Return the figures for the planner, in which node ``i`` is the ``i``-th provider."""
        number = {name: node for node, (name, _) in enumerate(providers)}
        names = {provider: offer.name for provider, offer in providers}
        pairs, failing = {}, {}
        for record in self.records:
            if record.one not in number or record.other not in number:
                continue
            pair = pair_of(number[record.one], number[record.other])
            if record.failure:
                failing[pair] = self._failure(record, names)
            else:
                pairs[pair] = MeasuredLink(
                    rate=min(record.forward, record.back),
                    delay=record.round_trip / 2,
                    relayed=record.route == "relayed",
                )
        return LinkFigures(pairs, failing, self.relay_rate)

    def _failure(self, record: LinkRecord, names: Mapping[str, str]) -> str:
        who = " and ".join(sorted((names[record.one], names[record.other])))
        relay = "" if self.has_relay else ", no relay"
        return f"{who} cannot reach each other: {record.failure}{relay}"


NO_LINKS = ProviderLinks()


@dataclass(frozen=True)
class ProviderPair:
    """Two providers of a job whose link is to be measured."""

    earlier: str
    """Provider of the stage before."""
    later: str
    nodes: tuple[int, int]
    """Their numbers in the plan."""


def addresses_of(one: ProviderOffer, other: ProviderOffer) -> str:
    """Return the addresses of two providers as text: figures of other addresses are not used."""
    return " ".join((*one.all_addresses, "-", *other.all_addresses))


def usable(
    records: Iterable[LinkRecord], offers: Mapping[str, ProviderOffer], *, measured: float, failed: float
) -> tuple[LinkRecord, ...]:
    """Return the records whose providers have the same addresses as then, and that are not too old.

    ``measured`` is the earliest time of figures, ``failed`` that of failures.
    """
    return tuple(
        record
        for record in records
        if record.one in offers
        and record.other in offers
        and record.addresses == addresses_of(offers[record.one], offers[record.other])
        and record.time >= (failed if record.failure else measured)
    )


def pairs_to_test(
    plan: Plan,
    providers: Sequence[str],
    offers: Mapping[str, ProviderOffer],
    known: Collection[LinkRecord],
    *,
    with_loopback: bool,
) -> list[ProviderPair]:
    """Return the neighbours of a plan whose link has no figures.

    ``providers`` are those of the plan, by node. A link between two loopback addresses stays on one
    machine and is tested only ``with_loopback``.
    """
    measured = {(record.one, record.other) for record in known}
    found = []
    for pipeline in plan.pipelines:
        for nodes in pairwise(pipeline):
            earlier, later = (providers[node] for node in nodes)
            local = _is_local(offers[earlier]) and _is_local(offers[later])
            if (min(earlier, later), max(earlier, later)) not in measured and (
                with_loopback or not local
            ):
                found.append(ProviderPair(earlier, later, nodes))
    return found


def _is_local(offer: ProviderOffer) -> bool:
    return all(is_loopback(Address.parse(address)) for address in offer.all_addresses)


def next_pairs(waiting: Sequence[ProviderPair], busy: Collection[str]) -> list[ProviderPair]:
    """Return the pairs that can be tested now: a provider takes part in one test at a time."""
    taken = set(busy)
    found = []
    for pair in waiting:
        if not taken & {pair.earlier, pair.later}:
            found.append(pair)
            taken |= {pair.earlier, pair.later}
    return found


def listener_of(pair: ProviderPair, direct: Collection[str]) -> str:
    """Return the provider that listens: the only one that can be dialled, or that of the later stage.

    A link on which either side can be dialled becomes direct, whichever side dials first.
    """
    alone = pair.earlier in direct and pair.later not in direct
    return pair.earlier if alone else pair.later


def link_record(
    listener: ProviderRecord, dialer: ProviderRecord, result: LinkTestResult, now: float
) -> LinkRecord:
    """Return the result of a test as the figures of the pair."""
    one, other = sorted((listener, dialer), key=lambda provider: provider.id)
    addresses = addresses_of(one.offer, other.offer)
    failure = result.failure
    if not failure and (result.to_listener is None or result.to_dialer is None):
        failure = "the test reported no figures"
    if failure:
        return LinkRecord(one.id, other.id, addresses, now, failure)
    assert result.to_listener is not None
    assert result.to_dialer is not None
    rates = (result.to_dialer, result.to_listener)
    forward, back = rates if one is listener else rates[::-1]
    return LinkRecord(
        one.id, other.id, addresses, now, "", result.route, forward, back, result.round_trip
    )


def progress(testing: Sequence[Sequence[str]], done: int, total: int) -> str:
    """Say which links are measured, by the names of their providers."""
    shown = ", ".join(" and ".join(names) for names in testing[:2])
    more = f" and {len(testing) - 2} more" if len(testing) > 2 else ""
    count = f" ({done} of {total} are measured)" if total > 1 else ""
    return f"measuring the link between {shown}{more}{count}"
