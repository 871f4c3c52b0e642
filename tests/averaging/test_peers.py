"""Connections between the Roots of clusters."""

from __future__ import annotations

import threading

import pytest
from fake_link import FakeLink, hello
from msgspec import structs
from node_files import node_file

from ravnest.averaging.peers import PeerError, Peers
from ravnest.errors import UnreachableError
from ravnest.store.node_spec import NeighbourSpec
from ravnest.transport.base import Link
from ravnest.transport.memory import MemoryNetwork, MemoryTransport
from ravnest.types import Address
from ravnest.wire.messages import Message

ROOTS = (
    NeighbourSpec(0, "127.0.0.1:1"),
    NeighbourSpec(3, "127.0.0.1:2"),
    NeighbourSpec(5, "127.0.0.1:3"),
)


class NoMessages:
    """A handler for links on which nothing arrives."""

    def on_message(self, link: Link, message: Message) -> None:
        raise AssertionError(f"{message} from {link.peer}")

    def on_lost(self, link: Link, reason: str) -> None:
        raise AssertionError(f"{link.peer} lost: {reason}")


@pytest.fixture
def peers(network: MemoryNetwork) -> Peers:
    """Peers of the first cluster, which waits for the others to dial."""
    return Peers(node_file(0, roots=ROOTS), hello(0), network.transport(), NoMessages())


def connect(peers: Peers, said: list[str], timeout: float = 30.0) -> set[int]:
    return peers.connect(timeout, said.append, lambda _: None)


def test_it_does_not_wait_for_connected_clusters(peers: Peers) -> None:
    said: list[str] = []
    peers.keep(FakeLink(3))
    peers.keep(FakeLink(5))
    assert connect(peers, said) == set()
    assert said == []


def test_it_waits_for_the_last_cluster_and_names_it(peers: Peers) -> None:
    said: list[str] = []
    peers.keep(FakeLink(3))
    # As early as possible: between the check and the wait.
    connects = threading.Thread(target=lambda: peers.keep(FakeLink(5)))

    def say(line: str) -> None:
        said.append(line)
        connects.start()
        connects.join()

    assert peers.connect(30.0, say, lambda _: None) == set()
    assert said == ["node_0 (Root) waits for cluster 2 to connect: node_5 at 127.0.0.1:3"]


def test_after_the_deadline_it_returns_the_missing_clusters(peers: Peers) -> None:
    assert connect(peers, [], timeout=0.01) == {1, 2}


@pytest.mark.parametrize("how", ["give_up", "close"])
def test_giving_up_ends_the_wait(peers: Peers, how: str) -> None:
    peers.give_up() if how == "give_up" else peers.close(None)
    assert connect(peers, []) == {1, 2}


def test_the_newest_link_to_a_node_is_used(peers: Peers) -> None:
    first, second = FakeLink(3), FakeLink(3)
    peers.keep(first)
    peers.keep(second)
    assert peers.root(1) is second
    assert not peers.forget(first), "it was not in use"
    assert peers.forget(second)
    assert peers.root(1) is None


def replaced(link: FakeLink, generation: int, address: str = "127.0.0.1:77") -> FakeLink:
    """Return the link as one to the machine that has taken the peer's place."""
    link.peer = structs.replace(link.peer, generation=generation, addresses=(address,))
    return link


def test_a_link_to_another_machine_replaces_the_old_one(network: MemoryNetwork) -> None:
    lost: list[Link] = []
    peers = Peers(
        node_file(0, roots=ROOTS), hello(0), network.transport(), NoMessages(), on_replaced=lost.append
    )
    old, new = FakeLink(3), replaced(FakeLink(3), 1)
    assert peers.keep(old)
    assert peers.keep(new)
    assert lost == [old]
    assert peers.root(1) is new
    assert not peers.is_current(old)
    assert not peers.keep(old), "it does not come back"
    assert peers.root(1) is new


def test_two_links_to_one_process_stay_open(network: MemoryNetwork) -> None:
    lost: list[Link] = []
    peers = Peers(
        node_file(0, roots=ROOTS), hello(0), network.transport(), NoMessages(), on_replaced=lost.append
    )
    first, second = FakeLink(3), FakeLink(3)
    peers.keep(first)
    peers.keep(second)
    assert lost == []
    assert peers.is_current(first)


def test_a_peer_that_connects_first_need_not_be_dialled(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that has replaced another one is at an address that the plan does not know."""
    new = replaced(FakeLink(3), 1)
    dialled = threading.Event()

    def dial(*_: object, **__: object) -> Link:
        peers.keep(new)
        assert dialled.wait(30)
        raise UnreachableError("nobody is there any more")

    monkeypatch.setattr(MemoryTransport, "dial", dial)
    assert peers.reach(ROOTS[1], 1, 30.0) is new
    dialled.set()


def test_a_peer_that_does_not_answer_is_named(peers: Peers) -> None:
    with pytest.raises(PeerError, match="node_3 of cluster 1") as raised:
        peers.reach(ROOTS[1], 1, 0.01)
    assert raised.value.cluster == 1


def test_a_replaced_machine_is_dialled_at_the_addresses_that_it_named(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[str] = []

    def dial(_: object, address: Address, *__: object, **___: object) -> Link:
        dialled.append(str(address))
        raise UnreachableError("nobody")

    monkeypatch.setattr(MemoryTransport, "dial", dial)
    for link in (FakeLink(3), replaced(FakeLink(3), 1), replaced(FakeLink(3), 2, "nonsense")):
        peers.keep(link)
        peers.forget(link)
        with pytest.raises(PeerError):
            peers.reach(ROOTS[1], 1, 1.0)
    assert dialled == ["127.0.0.1:2", "127.0.0.1:77", "127.0.0.1:2"]


def answered() -> FakeLink:
    """Return a link to the Root of the second cluster, with its place in the plan."""
    link = FakeLink(3)
    link.peer = structs.replace(link.peer, cluster=1)
    return link


def test_a_link_that_is_lost_before_it_is_kept_is_dialled_again(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends accepts a last connection; its loss is handled in another thread."""
    lost, link = answered(), answered()
    links, used = [lost, link], threading.Event()
    monkeypatch.setattr(MemoryTransport, "dial", lambda *_, **__: links.pop(0))
    keep = peers.keep

    def keeping(each: Link) -> bool:
        kept = keep(each)
        if kept:
            used.set()
        return kept

    def on_link(each: Link) -> None:
        if each is lost:
            assert not peers.forget(each), "it is not in use yet"

    monkeypatch.setattr(peers, "keep", keeping)
    peers.dial_root(1, 30.0, on_link)
    assert used.wait(30)
    assert peers.root(1) is link


def test_a_member_of_a_ring_that_is_lost_at_once_is_named(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = answered()

    def dial(*_: object, **__: object) -> Link:
        peers.forget(lost)
        return lost

    monkeypatch.setattr(MemoryTransport, "dial", dial)
    with pytest.raises(PeerError, match="ended while it connected"):
        peers.reach(ROOTS[1], 1, 30.0)
    assert peers.root(1) is None
