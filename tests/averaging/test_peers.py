"""Connections between the Roots of clusters."""

from __future__ import annotations

import threading

import pytest
from fake_link import FakeLink, hello
from node_files import node_file

from ravnest.averaging.peers import Peers
from ravnest.store.node_spec import NeighbourSpec
from ravnest.transport.base import Link
from ravnest.transport.memory import MemoryNetwork
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
