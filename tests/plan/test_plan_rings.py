"""Rings have one owner per cluster and cover every averaged tensor once."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from plan_cases import steady

from ravnest.plan.profile import TensorProfile
from ravnest.plan.rings import OwnedUnits, Ring, RingMember, make_rings
from ravnest.types import Address


def tensor(name: str, *units: int, averaged: bool = True) -> TensorProfile:
    return TensorProfile(name, 4, trainable=True, averaged=averaged, units=units)


def cluster(number: int, *bounds: int) -> list[OwnedUnits]:
    """A cluster with these bounds; its nodes are 10 * number, 10 * number + 1, ..."""
    return [
        OwnedUnits(start, stop, member(number, 10 * number + k))
        for k, (start, stop) in enumerate(pairwise(bounds))
    ]


def member(number: int, node_id: int) -> RingMember:
    return RingMember(number, node_id, Address("h", 8000 + node_id))


def test_the_common_refinement_of_two_cuts() -> None:
    state = [tensor(f"p{unit}", unit) for unit in range(6)]
    rings = make_rings(state, [cluster(0, 0, 2, 6), cluster(1, 0, 4, 6)])
    assert rings == (
        Ring(0, ("p0", "p1"), (member(0, 0), member(1, 10))),
        Ring(1, ("p2", "p3"), (member(0, 1), member(1, 10))),
        Ring(2, ("p4", "p5"), (member(0, 1), member(1, 11))),
    )


def test_a_tied_tensor_belongs_to_its_first_unit() -> None:
    state = [tensor("head", 3), tensor("embedding", 0, 3), tensor("body", 1)]
    rings = make_rings(state, [cluster(0, 0, 2, 4)])
    assert [ring.names for ring in rings] == [("embedding", "body"), ("head",)]


def test_a_piece_without_averaged_tensors_makes_no_ring() -> None:
    state = [tensor("a", 0), tensor("counter", 1, averaged=False), tensor("b", 2)]
    rings = make_rings(state, [cluster(0, 0, 1, 2, 3)])
    assert [(ring.id, ring.names, ring.members[0].node_id) for ring in rings] == [
        (0, ("a",), 0),
        (1, ("b",), 2),
    ]


def test_the_next_member_is_cyclic() -> None:
    (ring,) = make_rings([tensor("a", 0)], [cluster(0, 0, 1), cluster(1, 0, 1), cluster(2, 0, 1)])
    assert [ring.successor(node) for node in (0, 10, 20)] == [member(1, 10), member(2, 20), member(0, 0)]
    assert ring.successor(99) is None


def test_a_ring_of_one_has_no_next_member() -> None:
    (ring,) = make_rings([tensor("a", 0)], [cluster(0, 0, 1)])
    assert ring.successor(0) is None


@given(st.data(), st.integers(1, 4), st.integers(1, 9))
@steady
def test_every_tensor_has_one_owner_in_each_cluster(data: st.DataObject, count: int, units: int) -> None:
    inner = st.lists(st.integers(1, units - 1), unique=True).map(sorted) if units > 1 else st.just([])
    clusters = [cluster(c, 0, *data.draw(inner), units) for c in range(count)]
    users = st.lists(st.integers(0, units - 1), min_size=1, unique=True).map(sorted)
    state = [tensor(f"t{i}", *data.draw(users), averaged=data.draw(st.booleans())) for i in range(6)]
    rings = make_rings(state, clusters)
    assert [ring.id for ring in rings] == list(range(len(rings)))
    averaged = {t.name: t for t in state if t.averaged}
    assert sorted(name for ring in rings for name in ring.names) == sorted(averaged)
    for ring in rings:
        assert [m.cluster for m in ring.members] == list(range(count))
        for name in ring.names:
            owners = [
                r.member for c in clusters for r in c if r.start <= averaged[name].units[0] < r.stop
            ]
            assert tuple(owners) == ring.members
    firsts = [averaged[name].units[0] for ring in rings for name in ring.names]
    assert firsts == sorted(firsts)
