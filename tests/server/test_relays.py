"""Relays of a server: registration, tickets, and the jobs that may use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from node_files import node_file
from server_cases import Case, offer, opened

from ravnest.errors import RelayError, ServerError
from ravnest.relay.tickets import RelayTicket, read_ticket
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.reachability import RelayTrip, RelayView
from ravnest.server.reachability.routes import nearest_relays, peers_of, with_addresses, with_relays
from ravnest.store.node_spec import NeighbourSpec, NodeSpec, RingSpec
from ravnest.types import Address

BEAT: dict[str, Any] = {"name": "attic", "addresses": ["8.8.8.8:7101", "[2a01:4f8::7]:7101"]}


class Controlled:
    """The server's own relay, without a process."""

    def __init__(self) -> None:
        self.jobs: list[frozenset[str] | None] = []

    def set_running_jobs(self, jobs: frozenset[str] | None) -> None:
        self.jobs.append(jobs)


def test_a_relay_joins_is_listed_and_leaves(case: Case) -> None:
    relay, viewer = case.member(ApiRole.RELAY, "attic"), case.member(ApiRole.VIEWER)
    reply = relay.post("/api/relays", BEAT)
    assert reply["running_jobs"] == []
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(reply["public_key"]))
    (listed,) = viewer.get("/api/relays")
    assert listed == {
        "id": relay.id,
        **BEAT,
        "capacity": None,
        "circuits": 0,
        "forwarded": 0,
    }
    relay.post("/api/relays", {**BEAT, "capacity": 100, "circuits": 3, "forwarded": 10**12})
    assert viewer.get("/api/relays")[0]["forwarded"] == 10**12
    relay.call("DELETE", "/api/relays")
    assert viewer.get("/api/relays") == []
    texts = [event["reason"] for event in case.events() if event["subject"] == "relay"]
    assert texts == [
        "the relay attic joined: 8.8.8.8:7101, [2a01:4f8::7]:7101",
        "the relay attic left",
    ]


def test_a_silent_relay_is_left_out(case: Case) -> None:
    relay = case.member(ApiRole.RELAY)
    relay.post("/api/relays", BEAT)
    case.time.now += case.server.settings.lost_after + 1
    assert relay.get("/api/relays") == []
    relay.post("/api/relays", BEAT)
    assert len(relay.get("/api/relays")) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": []},
        {"addresses": ["8.8.8.8"]},
        {"addresses": ["8.8.8.8:1"] * 9},
        {"addresses": ["javascript:1 x:1"]},
        {"capacity": 0},
        {"circuits": -1},
        {"known": 5},
    ],
)
def test_unusable_relays_are_refused(case: Case, change: dict[str, Any]) -> None:
    case.member(ApiRole.RELAY).post("/api/relays", {**BEAT, **change}, 422)
    assert case.server.relay_service.live() == {}


def test_the_number_of_relays_is_limited(case: Case) -> None:
    service = case.server.relay_service
    service.put_own(Controlled(), [Address("8.8.8.8", 7101)])
    for number in range(63):
        case.member(ApiRole.RELAY, f"relay {number}").post("/api/relays", BEAT)
    case.member(ApiRole.RELAY, "one more").post("/api/relays", BEAT, 409)


def test_relays_learn_which_jobs_run(case: Case) -> None:
    own = Controlled()
    case.server.relay_service.put_own(own, [Address("8.8.8.8", 7101)])
    relay, requester = case.member(ApiRole.RELAY), case.requester()
    job = case.submit(requester)
    assert relay.post("/api/relays", BEAT)["running_jobs"] == []
    case.provider()
    case.match()
    assert relay.post("/api/relays", {**BEAT, "known": [], "wait": 60})["running_jobs"] == [job]
    case.server.relay_service.tell_own()
    requester.post(f"/api/jobs/{job}/cancel")
    assert relay.post("/api/relays", {**BEAT, "known": [job], "wait": 60})["running_jobs"] == []
    case.server.relay_service.tell_own()
    assert own.jobs == [frozenset({job}), frozenset()]


def test_the_key_is_private_and_kept(tmp_path: Path) -> None:
    with opened(tmp_path) as case:
        before = case.server.relay_service.public_key
        path = case.server.folder.relay_key
        assert path.stat().st_mode & 0o077 == 0
    with opened(tmp_path) as case:
        assert case.server.relay_service.public_key == before
    path.write_bytes(b"damaged")
    with pytest.raises(ServerError, match=r"relay\.key is damaged"), opened(tmp_path):
        pass


# --- node specs ----------------------------------------------------------------------------------


def two_clusters() -> list[NodeSpec]:
    """Return the specs of clusters (0, 1) and (2, 3), with a ring of the Leaves."""

    def near(node: int) -> NeighbourSpec:
        return NeighbourSpec(node, f"10.0.0.{node}:9000")

    ring = RingSpec(0, ("w",), (near(1), near(3)))
    return [
        node_file(
            node,
            stage=node % 2,
            cluster=node // 2,
            pipeline=(node - node % 2, node - node % 2 + 1),
            address=near(node).address,
            previous=near(node - 1) if node % 2 else None,
            next=None if node % 2 else near(node + 1),
            roots=(near(0), near(2)),
            rings=(ring,) if node % 2 else (),
        )
        for node in range(4)
    ]


def test_peers_name_each_other() -> None:
    assert peers_of(two_clusters()) == {0: (1, 2, 3), 1: (0, 2, 3), 2: (0, 1, 3), 3: (0, 1, 2)}
    assert peers_of([node_file(0, stages=1)]) == {0: ()}


def test_all_addresses_are_added() -> None:
    offers = {
        node: offer(
            address=f"10.0.0.{node}:9000", addresses=(f"10.0.0.{node}:9000", f"8.8.8.{node}:9000")
        )
        for node in range(4)
    }
    spec = with_addresses(two_clusters()[1], offers)
    assert spec.others == ("8.8.8.1:9000",)
    assert spec.previous is not None
    assert spec.previous.others == ("8.8.8.0:9000",)
    assert [root.others for root in spec.roots] == [("8.8.8.0:9000",), ("8.8.8.2:9000",)]
    assert [m.others for m in spec.rings[0].members] == [("8.8.8.1:9000",), ("8.8.8.3:9000",)]


def relay_view(name: str) -> RelayView:
    return RelayView(id=name, name=name, addresses=(f"{name}:7101",))


def test_the_relay_that_all_reach_and_that_is_nearest_comes_first() -> None:
    trips = ({"a": 0.1, "b": 0.01, "c": 0.02}, {"a": 0.1, "c": 0.1, "d": 0.001}, {"a": 0.1, "c": 0.01})
    offers = [
        offer(relay_trips=tuple(RelayTrip(relay=name, seconds=time) for name, time in each.items()))
        for each in trips
    ]
    found = nearest_relays(map(relay_view, "abcdef"), offers)
    assert [relay.id for relay in found] == ["c", "a", "d", "b"]


def test_nodes_get_tickets_for_their_peers(case: Case) -> None:
    service = case.server.relay_service
    assert service.add_tickets("job-1", two_clusters(), [offer()] * 4) == two_clusters()
    service.put_own(Controlled(), [Address("8.8.8.8", 7101), Address("2a01:4f8::7", 7101)])
    specs = service.add_tickets("job-1", two_clusters(), [offer()] * 4)
    for spec in specs:
        assert spec.relay is not None
        assert spec.relay.job == "job-1"
        assert spec.relay.relays == (("8.8.8.8:7101", "[2a01:4f8::7]:7101"),)
        ticket = read_ticket(spec.relay.ticket, service.public_key, case.time.now + 29 * 86400)
        peers = tuple(node for node in range(4) if node != spec.node)
        assert ticket == RelayTicket("job-1", spec.node, peers, ticket.expires)
        with pytest.raises(RelayError, match="expired"):
            read_ticket(spec.relay.ticket, service.public_key, case.time.now + 31 * 86400)


def test_a_node_without_peers_gets_no_ticket() -> None:
    alone = node_file(0, stages=1)
    assert with_relays([alone], "j", [relay_view("a")], lambda *_: "ticket") == [alone]
