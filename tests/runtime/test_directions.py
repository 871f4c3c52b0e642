"""Messages are obeyed only if they come from the neighbour that may send them."""

import typing
from typing import Any

import pytest
from node_files import node_file

from ravnest.runtime.control.rendezvous import Rendezvous
from ravnest.runtime.stage import directions
from ravnest.runtime.stage.directions import may_send
from ravnest.store.node_spec import NeighbourSpec, RingSpec
from ravnest.transport.generations import Generations
from ravnest.types import Address
from ravnest.wire.messages import (
    PROTOCOL,
    Abort,
    AnyHead,
    CallEnd,
    Goodbye,
    Hello,
    HelloChallenge,
    HelloProof,
    HelloRefused,
    LossSplit,
    RateProbe,
    ReplicaStored,
    RingChunk,
    RoundRequest,
    RunEnd,
    SaveStage,
    StageSaved,
    StateBlock,
    ValidationResult,
)

STEM = node_file(1, stages=4)
BOTH_WAYS = {Abort, Goodbye, ReplicaStored, StateBlock, ValidationResult}
NOT_IN_PIPELINES = {Hello, HelloChallenge, HelloProof, HelloRefused, RateProbe, RingChunk, RoundRequest}


def test_every_message_has_a_direction() -> None:
    one_way = {*directions._FROM_PREVIOUS, *directions._FROM_NEXT}
    assert one_way | BOTH_WAYS | NOT_IN_PIPELINES == set(typing.get_args(AnyHead))


@pytest.mark.parametrize("head", [RunEnd("run"), CallEnd("run", "train", 1), SaveStage("run")])
def test_only_the_side_of_the_root_announces(head: Any) -> None:
    """A Leaf that sent ``RunEnd`` to its Root ended the run of the whole cluster."""
    assert may_send(STEM, 0, head)
    assert not may_send(STEM, 2, head)
    assert not may_send(STEM, 3, head)


def test_a_trained_stage_comes_from_behind_and_is_of_a_node_behind() -> None:
    for node, sender, allowed in [
        (2, 2, True),
        (3, 2, True),
        (1, 2, False),
        (0, 2, False),
        (3, 0, False),
    ]:
        assert may_send(STEM, sender, StageSaved("run", node, "{}")) is allowed


def test_nobody_but_neighbours_is_obeyed() -> None:
    assert not may_send(STEM, 3, Goodbye(3))
    assert may_send(STEM, 2, Goodbye(2))
    leaf = node_file(1, stages=2)
    assert not may_send(leaf, 0, LossSplit(allowed=True, reason=""))


def rendezvous() -> Rendezvous:
    """Return the rendezvous of node_0, whose ring has a Stem of cluster 1."""
    roots = (NeighbourSpec(0, "127.0.0.1:1"), NeighbourSpec(4, "127.0.0.1:2"))
    ring = RingSpec(0, ("w",), (NeighbourSpec(0, "127.0.0.1:1"), NeighbourSpec(5, "127.0.0.1:3")))
    spec = node_file(0, roots=roots, rings=(ring,))
    settings = {"averaging": "async", "average_optim": "False", "ema": "None"}
    hello = Hello(PROTOCOL, "plan", 0, 0, 0, settings=settings)
    return Rendezvous(spec, hello, Address("127.0.0.1", 1), 1.0, lambda _: None, Generations())


@pytest.mark.parametrize(
    ("node", "cluster", "stage", "reason"),
    [
        (5, 1, 1, ""),
        (4, 1, 0, ""),
        (5, 1, 0, "is not stage 0"),
        (4, 1, 1, "is not stage 1"),
        (5, 0, 0, "is not the previous node"),
        (9, 1, 0, "shares no ring"),
    ],
)
def test_a_node_of_a_ring_cannot_pose_as_a_root(
    node: int, cluster: int, stage: int, reason: str
) -> None:
    """A Stem of another cluster that called itself stage 0 was obeyed as the Root of its cluster."""
    met = rendezvous()
    reply = met._admit(Hello(PROTOCOL, "plan", node, cluster, stage, settings=met.hello.settings))
    if reason:
        assert isinstance(reply, HelloRefused)
        assert reason in reply.reason
    else:
        assert reply == met.hello
