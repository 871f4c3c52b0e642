"""Which spare takes which vacant place, and the assignment that it gets. No server."""

from dataclasses import replace
from typing import Any

import pytest
from node_files import node_file
from server_cases import artifact, offer, spec

from ravnest.schemas.providers import Assignment, DataShare, StageNeeds
from ravnest.server.scheduling.successor import peers, successor
from ravnest.server.scheduling.takeover import (
    MOST_REFILLS,
    NoSpare,
    SpareProvider,
    VacantPlace,
    exhausted,
    fill,
    misfit,
    predicted_rate,
    returning,
)
from ravnest.store.node_spec import NeighbourSpec, NodeSpec, RelaySpec, RingSpec

GB = 10**9


def place(node: int = 1, *, ram: int = GB, **changes: Any) -> VacantPlace:
    fields: dict[str, Any] = {
        "node": node,
        "name": f"node_{node} (Stem of cluster 0)",
        "needs": StageNeeds(ram=ram, work=10, traffic=10),
        "tls": False,
        "holder": "gone",
        "cause": "passing",
        "reason": "the provider was lost",
        **changes,
    }
    return VacantPlace(**fields)


def spare(name: str, *, ram: float = 2 * GB, **changes: Any) -> SpareProvider:
    fields: dict[str, Any] = {
        "id": name,
        "name": name,
        "ram": ram,
        "compute": 10.0,
        "bandwidth": 10.0,
        "addresses": frozenset({f"127.0.0.1:{name}"}),
        "is_loopback": True,
        **changes,
    }
    return SpareProvider(**fields)


def chosen(places: list[VacantPlace], spares: list[SpareProvider]) -> dict[int, str]:
    found = fill(places, spares)
    assert not isinstance(found, NoSpare), found.reason
    return {node: each.id for node, each in found.items()}


def test_the_spare_with_the_highest_predicted_rate_takes_the_place() -> None:
    needs = StageNeeds(ram=GB, work=10, traffic=10)
    fast, wide, both = (
        spare("fast", compute=100.0),
        spare("wide", bandwidth=100.0),
        spare("both", compute=20.0, bandwidth=20.0),
    )
    assert predicted_rate(needs, fast) == predicted_rate(needs, wide) == 1.0
    assert predicted_rate(needs, both) == 2.0
    assert chosen([place()], [fast, wide, both]) == {1: "both"}
    local = place(needs=StageNeeds(ram=GB, work=10))
    assert chosen([local], [wide, both, fast]) == {1: "fast"}
    unknown = place(needs=StageNeeds())
    assert predicted_rate(unknown.needs, fast) == 0.0
    assert chosen([unknown], [wide, both, fast]) == {1: "fast"}, "then by compute"


def test_the_provider_that_had_the_place_is_first_unless_its_machine_was_the_cause() -> None:
    weak, strong = spare("weak", compute=1.0), spare("strong", compute=100.0)
    assert chosen([place(holder="weak")], [strong, weak]) == {1: "weak"}
    assert chosen([place(holder="strong", cause="machine")], [strong, weak]) == {1: "weak"}
    assert chosen([place(holder="strong", cause="machine")], [strong]) == {1: "strong"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ram": GB / 2}, "x has 500 MB"),
        ({"is_loopback": False}, "without TLS"),
        ({"is_reachable": False}, "others cannot reach x"),
        ({"cut_off": frozenset({"root"})}, "cannot connect to a neighbour"),
        ({"addresses": frozenset({"127.0.0.1:1", "127.0.0.1:7"})}, "the address of another node"),
    ],
)
def test_a_provider_that_cannot_take_the_place_says_why(changes: dict[str, Any], words: str) -> None:
    vacant = place(neighbours=frozenset({"root"}), taken=frozenset({"127.0.0.1:7"}))
    assert misfit(vacant, spare("x")) == ""
    assert words in misfit(vacant, spare("x", **changes))
    found = fill([vacant], [spare("x", **changes)])
    assert isinstance(found, NoSpare)
    assert "at least 1.0 GB can take the place of node_1 (Stem of cluster 0)" in found.reason
    assert words in found.reason


def test_a_node_alone_needs_nobody_to_reach_it() -> None:
    assert misfit(place(has_peers=False), spare("x", is_reachable=False)) == ""
    assert misfit(place(tls=True), spare("x", is_loopback=False)) == ""


def test_the_places_of_a_cluster_are_filled_together_or_not_at_all() -> None:
    small, large = place(1, ram=GB), place(2, ram=3 * GB)
    little, much = spare("little", compute=1.0), spare("much", ram=4 * GB, compute=100.0)
    assert chosen([small, large], [little, much]) == {1: "little", 2: "much"}
    assert isinstance(fill([small, large], [much]), NoSpare)
    assert isinstance(fill([small, large], [little, spare("other")]), NoSpare)
    assert isinstance(fill([small], []), NoSpare)


def test_idle_providers_return_to_their_places_whoever_takes_the_others() -> None:
    first, second = place(1, holder="a", cause=""), place(2, holder="b")
    assert returning([first, second], [spare("a")]) == {1: spare("a")}
    assert returning([first, second], [spare("a"), spare("b"), spare("c")]).keys() == {1, 2}
    assert returning([place(1, holder="a", cause="machine")], [spare("a")]) == {}
    assert returning([place(1, holder="a", ram=3 * GB)], [spare("a")]) == {}, "its offer has changed"


def test_two_providers_of_one_address_take_one_place() -> None:
    same = frozenset({"127.0.0.1:1"})
    two = [spare("a", addresses=same), spare("b", addresses=same)]
    assert isinstance(fill([place(1), place(2)], two), NoSpare)


def test_a_place_is_not_filled_forever_without_a_checkpoint() -> None:
    assert exhausted(place(refills=MOST_REFILLS - 1)) == ""
    words = exhausted(place(refills=MOST_REFILLS))
    assert words == "the provider was lost; the place was filled 3 times without a new checkpoint"


# The assignment


def assignment(*, tls: bool, **changes: Any) -> Assignment:
    ring = RingSpec(0, ("w",), (NeighbourSpec(1, "10.0.0.1:1"), NeighbourSpec(4, "10.0.0.4:1")))
    roots = (NeighbourSpec(0, "10.0.0.0:1"), NeighbourSpec(3, "10.0.0.3:1"))
    node = node_file(1, stages=3, address="10.0.0.1:1", rings=(ring,), roots=roots, **changes)
    return Assignment(
        id="j-1",
        job="j",
        node=1,
        node_spec=node,
        stage=artifact("units"),
        weights=artifact("weights"),
        train=DataShare(samples=8, total=8),
        training=spec().training,
        tls=tls,
        needs=StageNeeds(ram=5),
    )


def test_the_successor_has_the_same_work_at_its_own_address() -> None:
    before = assignment(tls=True)
    specs = {
        0: node_file(0, stages=3, address="10.0.0.0:9", others=("[fd00::1]:9",)),
        1: before.node_spec,
        4: node_file(4, stage=1, stages=3, address="10.0.0.4:9"),
    }
    new_offer = offer("carol", address="10.0.0.7:1", addresses=("10.0.0.7:1", "[fd00::7]:1"))
    relay = RelaySpec("j", "ticket", (("relay:1",),))
    made = successor(before, 2, new_offer, specs, relay, resume=True, continues="j-1")
    assert (made.id, made.resume, made.continues) == ("j-1-g2", True, "j-1")
    node = made.node_spec
    assert (node.plan, node.node, node.stage, node.generation) == ("plan", 1, 1, 2)
    assert (node.address, node.others, node.relay) == ("10.0.0.7:1", ("[fd00::7]:1",), relay)
    assert node.previous == NeighbourSpec(0, "10.0.0.0:9", ("[fd00::1]:9",))
    assert node.next == before.node_spec.next, "not known now, so that it stays"
    assert node.roots == (
        NeighbourSpec(0, "10.0.0.0:9", ("[fd00::1]:9",)),
        NeighbourSpec(3, "10.0.0.3:1"),
    )
    own = NeighbourSpec(1, "10.0.0.7:1", ("[fd00::7]:1",))
    assert node.rings[0].members == (own, NeighbourSpec(4, "10.0.0.4:9"))
    same = {"stage", "weights", "train", "validation", "training", "tls", "needs", "job", "node"}
    assert made.model_dump(include=same) == before.model_dump(include=same)
    assert peers(node) == (0, 2, 3, 4)


def test_of_two_neighbours_one_dials_the_other() -> None:
    """A second connection between them looks like a neighbour that was started again."""
    before = assignment(tls=False)
    root = node_file(0, stages=3, address="127.0.0.1:1")
    leaf = node_file(2, stages=3, address="127.0.0.1:3")

    def made(own: str, *specs: NodeSpec) -> tuple[bool, bool]:
        """Return whether the node at an address dials the previous and the next one."""
        known = {each.node: each for each in specs}
        new = successor(before, 1, offer("carol", address=own), known, None, resume=True, continues=None)
        return new.node_spec.dials_previous, new.node_spec.dials_next

    here = "127.0.0.1:2"
    knowing = replace(root, next=NeighbourSpec(1, here))
    assert made(here, root, leaf) == (True, True), "the Root only knows the lost machine"
    assert made(here, knowing, leaf) == (False, True), "the Root has taken a place too, or it is back"
    assert made(here, replace(knowing, dials_next=False), leaf) == (True, True)
    waiting = replace(leaf, generation=1, dials_previous=True, previous=NeighbourSpec(1, here))
    assert made(here, knowing, waiting) == (False, False), "the Leaf dials this address"
    elsewhere = replace(waiting, previous=NeighbourSpec(1, "127.0.0.1:9"))
    assert made(here, knowing, elsewhere) == (False, True)


def test_without_tls_a_node_has_one_address() -> None:
    new_offer = offer("carol", address="127.0.0.1:7", addresses=("127.0.0.1:7", "10.0.0.7:7"))
    made = successor(assignment(tls=False), 1, new_offer, {}, None, resume=False, continues=None)
    assert made.node_spec.others == ()
