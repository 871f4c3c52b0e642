"""Rings: sets of tensors with the nodes that average them.

The clusters cut the model at different positions. All their cuts together divide it into pieces, and
each piece lies within one stage of each cluster. The averaged tensors of a piece form a ring with
exactly one owner in each cluster. A tensor belongs to the piece of the first unit that uses it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ravnest.plan.profile import TensorProfile
from ravnest.types import Address


@dataclass(frozen=True)
class RingMember:
    """The owner of a ring's tensors in one cluster."""

    cluster: int
    node_id: int
    address: Address


@dataclass(frozen=True)
class Ring:
    """Tensors that are averaged together, and the nodes that average them."""

    id: int
    names: tuple[str, ...]
    """Names of the tensors, in model order."""
    members: tuple[RingMember, ...]
    """One member of each cluster, by ascending cluster."""

    def member(self, node_id: int) -> RingMember | None:
        """Return the member with this node id; None if the node is not a member."""
        return next((member for member in self.members if member.node_id == node_id), None)

    def successor(self, node_id: int) -> RingMember | None:
        """Return the next member after this node, cyclic; None if it is alone or not a member."""
        member = self.member(node_id)
        if member is None or len(self.members) == 1:
            return None
        return self.members[(self.members.index(member) + 1) % len(self.members)]


@dataclass(frozen=True)
class OwnedUnits:
    """Units ``[start, stop)`` and the ring member that holds them."""

    start: int
    stop: int
    member: RingMember


def make_rings(
    state: Sequence[TensorProfile], clusters: Sequence[Sequence[OwnedUnits]]
) -> tuple[Ring, ...]:
    """Return the rings by ascending unit; each cluster's runs must cover the model without overlap."""
    starts = sorted({run.start for cluster in clusters for run in cluster})
    names: dict[int, list[str]] = {}
    for tensor in sorted((t for t in state if t.averaged and t.units), key=lambda t: t.units[0]):
        piece = starts[bisect_right(starts, tensor.units[0]) - 1]
        names.setdefault(piece, []).append(tensor.name)
    return tuple(
        Ring(number, tuple(names[start]), tuple(_owner(cluster, start) for cluster in clusters))
        for number, start in enumerate(sorted(names))
    )


def _owner(cluster: Sequence[OwnedUnits], unit: int) -> RingMember:
    (member,) = (run.member for run in cluster if run.start <= unit < run.stop)
    return member
