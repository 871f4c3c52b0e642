"""Finding the Roots of other clusters."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from node_files import node_file

from ravnest.averaging.peers import Peers
from ravnest.store.node_spec import NeighbourSpec
from ravnest.transport.base import Link

ROOTS = (
    NeighbourSpec(0, "127.0.0.1:1"),
    NeighbourSpec(3, "127.0.0.1:2"),
    NeighbourSpec(5, "127.0.0.1:3"),
)


def peers() -> Peers:
    """Of the first cluster, which waits for the others to dial."""
    nothing: Any = None
    return Peers(node_file(0, roots=ROOTS), nothing, nothing, nothing)


def link_to(node: int) -> Link:
    return cast("Link", SimpleNamespace(peer=SimpleNamespace(node=node), clamped=0))


def meet(found: Peers, said: list[str], timeout: float = 30.0) -> set[int]:
    return found.meet(timeout, said.append, lambda _: None)


def test_who_is_there_already_is_not_waited_for() -> None:
    found, said = peers(), list[str]()
    found.keep(link_to(3))
    found.keep(link_to(5))
    assert meet(found, said) == set()
    assert said == []


def test_it_waits_for_the_last_one_and_says_for_whom() -> None:
    found, said = peers(), list[str]()
    found.keep(link_to(3))
    # As early as can be: between the look at who is there and the wait.
    comes = threading.Thread(target=lambda: found.keep(link_to(5)))

    def say(line: str) -> None:
        said.append(line)
        comes.start()
        comes.join()

    assert found.meet(30.0, say, lambda _: None) == set()
    assert said == ["node_0 (Root) waits for cluster 2 to connect: node_5 at 127.0.0.1:3"]


def test_after_the_deadline_it_says_who_is_missing() -> None:
    assert meet(peers(), [], timeout=0.01) == {1, 2}


@pytest.mark.parametrize("how", ["give_up", "close"])
def test_the_wait_ends_when_there_is_no_use_in_it(how: str) -> None:
    found = peers()
    found.give_up() if how == "give_up" else found.close(None)
    assert meet(found, []) == {1, 2}


def test_of_two_links_to_a_node_the_newer_is_used() -> None:
    found = peers()
    first, second = link_to(3), link_to(3)
    found.keep(first)
    found.keep(second)
    assert found.root(1) is second
    assert not found.forget(first), "it was not the one in use"
    assert found.forget(second)
    assert found.root(1) is None
