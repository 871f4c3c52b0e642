"""Assignment of the provider that takes the place of another one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ravnest.schemas.checkpoints import SeedCheckpoint
from ravnest.schemas.providers import Assignment, ProviderOffer
from ravnest.server.assignments import assignment_id
from ravnest.store.node_spec import NeighbourSpec, NodeSpec, RelaySpec


def successor(
    assignment: Assignment,
    generation: int,
    offer: ProviderOffer,
    specs: Mapping[int, NodeSpec],
    relay: RelaySpec | None,
    *,
    resume: bool,
    continues: str | None,
    seed: SeedCheckpoint | None = None,
) -> Assignment:
    """Return the assignment of a node for another provider: the same work at other addresses.

    ``specs`` are those of the job's nodes now, by node: their workers listen there, and dial the nodes
    that they know. The digest of the
    plan stays, so that the other nodes accept this one. ``seed``: checkpoint of this plan to start from
    if the nodes have no newer one; None: that of the earlier assignment, if it has one.
    """
    own = place_of(assignment, offer)

    def current(neighbour: NeighbourSpec) -> NeighbourSpec:
        if neighbour.node == own.node:
            return own
        spec = specs.get(neighbour.node)
        return neighbour if spec is None else NeighbourSpec(spec.node, spec.address, spec.others)

    spec = assignment.node_spec
    before = None if spec.previous is None else specs.get(spec.previous.node)
    after = None if spec.next is None else specs.get(spec.next.node)
    moved = replace(
        spec,
        dials_next=not (after and after.dials_previous and _knows(after.previous, own)),
        dials_previous=not (before and before.dials_next and _knows(before.next, own)),
        address=own.address,
        others=own.others,
        previous=None if spec.previous is None else current(spec.previous),
        next=None if spec.next is None else current(spec.next),
        roots=tuple(map(current, spec.roots)),
        rings=tuple(replace(ring, members=tuple(map(current, ring.members))) for ring in spec.rings),
        relay=relay,
        generation=generation,
    )
    return assignment.model_copy(
        update={
            "id": f"{assignment_id(assignment.job, assignment.attempt, assignment.node)}-g{generation}",
            "node_spec": moved,
            "resume": resume,
            "continues": continues,
            "seed": assignment.seed if seed is None else seed,
        }
    )


def place_of(assignment: Assignment, offer: ProviderOffer) -> NeighbourSpec:
    """Return where others find a node once a provider has taken its place."""
    others = tuple(each for each in offer.all_addresses if each != offer.address)
    return NeighbourSpec(assignment.node, offer.address, others if assignment.tls else ())


def _knows(neighbour: NeighbourSpec | None, place: NeighbourSpec) -> bool:
    """Return whether a node finds a place with what it knows about its neighbour."""
    if neighbour is None:
        return False
    return bool({neighbour.address, *neighbour.others} & {place.address, *place.others})


def peers(spec: NodeSpec) -> tuple[int, ...]:
    """Return the other nodes that a spec names, in ascending order."""
    members = (member for ring in spec.rings for member in ring.members)
    named = {each.node for each in (spec.previous, spec.next, *spec.roots, *members) if each}
    return tuple(sorted(named - {spec.node}))
