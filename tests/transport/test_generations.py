"""Which process is a node."""

from __future__ import annotations

import pytest

from ravnest.transport.generations import Generations
from ravnest.wire.messages import PROTOCOL, Hello


def hello(node: int = 1, generation: int = 0, incarnation: str = "a") -> Hello:
    return Hello(PROTOCOL, "plan", node, 0, 0, generation=generation, incarnation=incarnation)


@pytest.fixture
def generations() -> Generations:
    return Generations()


def test_all_links_of_a_process_are_admitted(generations: Generations) -> None:
    assert generations.newest(1) is None
    assert [generations.admit(hello()) for _ in range(3)] == [None] * 3
    assert generations.newest(1) == hello()


def test_a_restarted_process_takes_the_place_of_the_one_before(generations: Generations) -> None:
    generations.admit(hello())
    assert generations.admit(hello(incarnation="b")) is None
    assert not generations.is_current(hello())
    assert generations.is_current(hello(incarnation="b"))
    reason = generations.admit(hello())
    assert reason == "node_1 was restarted: another process has taken its place"
    assert generations.newest(1) == hello(incarnation="b")


def test_a_machine_that_was_replaced_is_refused(generations: Generations) -> None:
    generations.admit(hello(generation=2, incarnation="new"))
    reason = generations.admit(hello(generation=1, incarnation="old"))
    assert reason is not None
    assert reason.startswith("node_1 was replaced by another machine: it has generation 2")
    assert not generations.is_current(hello(generation=1))
    assert generations.admit(hello(generation=3, incarnation="old")) is None, "another machine again"


def test_nodes_do_not_affect_each_other(generations: Generations) -> None:
    generations.admit(hello(node=1, generation=2))
    assert generations.admit(hello(node=2)) is None


def test_nothing_that_is_refused_is_remembered(generations: Generations) -> None:
    generations.admit(hello(generation=1))
    generations.admit(hello(generation=0, incarnation="old"))
    assert generations.newest(1) == hello(generation=1)


def test_an_excluded_machine_is_refused_and_those_after_it_are_not(generations: Generations) -> None:
    generations.admit(hello(generation=1))
    generations.exclude(1, 1)
    generations.exclude(1, 0)
    for refused in (hello(generation=1), hello(generation=1, incarnation="b"), hello(generation=0)):
        assert "revoked" in (generations.admit(refused) or "")
        assert not generations.is_current(refused)
    assert generations.admit(hello(node=2, generation=1)) is None
    assert generations.admit(hello(generation=2)) is None
