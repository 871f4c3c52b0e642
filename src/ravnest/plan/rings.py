"""Rings: which nodes average which tensors.

The clusters cut the model at different places. All their cuts together divide it into pieces, and
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
    """Tensors that are averaged together, and by whom."""

    id: int
    names: tuple[str, ...]
    """In model order."""
    members: tuple[RingMember, ...]
    """By ascending cluster."""

    def member(self, node_id: int) -> RingMember | None:
        """The member that this node is, if it is one."""
        return next((member for member in self.members if member.node_id == node_id), None)

    def successor(self, node_id: int) -> RingMember | None:
        """The member after this node, cyclic; None where it is alone or not a member."""
        member = self.member(node_id)
        if member is None or len(self.members) == 1:
            return None
        return self.members[(self.members.index(member) + 1) % len(self.members)]


@dataclass(frozen=True)
class OwnedUnits:
    """The units ``[start, stop)`` are held by this member."""

    start: int
    stop: int
    member: RingMember


def make_rings(
    state: Sequence[TensorProfile], clusters: Sequence[Sequence[OwnedUnits]]
) -> tuple[Ring, ...]:
    """Rings by ascending unit. Each cluster's runs of units cover the model without overlap."""
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
