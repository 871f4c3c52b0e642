"""Routes in node specs: further addresses, and tickets for relays. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ravnest.schemas.providers import ProviderOffer
from ravnest.schemas.reachability import RelayView
from ravnest.store.node_spec import NeighbourSpec, NodeSpec, RelaySpec

_MOST_RELAYS = 4
"""Relays that a node gets; it uses the first that works."""

TicketSigner = Callable[[int, tuple[int, ...]], str]
"""Function that returns the ticket of a node for its peers."""


def with_addresses(spec: NodeSpec, offers: Mapping[int, ProviderOffer]) -> NodeSpec:
    """Return the spec with all addresses of the node and its neighbours; ``offers`` are by node."""

    def others(node: int, address: str) -> tuple[str, ...]:
        return tuple(each for each in offers[node].all_addresses if each != address)

    def complete(neighbour: NeighbourSpec) -> NeighbourSpec:
        return replace(neighbour, others=others(neighbour.node, neighbour.address))

    return replace(
        spec,
        previous=None if spec.previous is None else complete(spec.previous),
        next=None if spec.next is None else complete(spec.next),
        roots=tuple(map(complete, spec.roots)),
        rings=tuple(replace(ring, members=tuple(map(complete, ring.members))) for ring in spec.rings),
        others=others(spec.node, spec.address),
    )


def with_relays(
    specs: Sequence[NodeSpec], job: str, relays: Sequence[RelayView], sign: TicketSigner
) -> list[NodeSpec]:
    """Return the specs of a job with tickets for relays, if there are relays and peers."""
    if not relays:
        return list(specs)
    addresses = tuple(relay.addresses for relay in relays)
    peers = peers_of(specs)
    return [
        replace(spec, relay=RelaySpec(job, sign(spec.node, peers[spec.node]), addresses))
        if peers[spec.node]
        else spec
        for spec in specs
    ]


def peers_of(specs: Iterable[NodeSpec]) -> dict[int, tuple[int, ...]]:
    """Return the nodes that each node talks to, by node: if one node names another, both may dial."""
    found: dict[int, set[int]] = defaultdict(set)
    for spec in specs:
        members = (member for ring in spec.rings for member in ring.members)
        named = {each.node for each in (spec.previous, spec.next, *spec.roots, *members) if each}
        found[spec.node] |= named
        for other in named:
            found[other].add(spec.node)
    return {node: tuple(sorted(others - {node})) for node, others in found.items()}


def nearest_relays(
    relays: Iterable[RelayView], offers: Iterable[ProviderOffer]
) -> tuple[RelayView, ...]:
    """Return the relays for a job: those that most of its providers reach, then the nearest."""
    trips = [{trip.relay: trip.seconds for trip in offer.relay_trips} for offer in offers]

    def distance(relay: RelayView) -> tuple[int, float, str]:
        found = [each[relay.id] for each in trips if relay.id in each]
        return len(trips) - len(found), sum(found), relay.id

    return tuple(sorted(relays, key=distance)[:_MOST_RELAYS])
