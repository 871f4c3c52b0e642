"""A node in rounds: commands in, actions out."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

from ravnest.averaging.allreduce import AllReduceResult
from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.participant import (
    CancelReduce,
    CommandArrived,
    CopyWeights,
    Participant,
    ParticipantAction,
    ReduceEnded,
    SendReply,
    SettleCompression,
    Stalled,
    StartReduce,
    StoreAverage,
    WeightsCopied,
)
from ravnest.averaging.ports import Vectors
from ravnest.deadlines import LINK_OUTAGE, RING_STALL, ROUND_OUTAGES
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundId, Start

ROUND, BASE = RoundId(4), RoundId(3)
WEIGHTS = {1: 0.5, 2: 0.5}
COPY: Vectors = {0: torch.ones(3)}
RESULT = AllReduceResult(ROUND, {0: torch.zeros(3)}, {0: "digest"}, 12)


@pytest.fixture
def node() -> Participant:
    """Return node 7 of cluster 2."""
    return Participant(2, 7)


def prepare(node: Participant, *, assign: bool = False) -> list[ParticipantAction]:
    return node.handle(CommandArrived(Prepare(ROUND, assign)), 0.0)


def copied(node: Participant, problem: str = "", of: RoundId = ROUND) -> list[ParticipantAction]:
    return node.handle(WeightsCopied(of, COPY, problem, "int8", BASE), 1.0)


def start(node: Participant, of: RoundId = ROUND) -> list[ParticipantAction]:
    return node.handle(CommandArrived(Start(of, WEIGHTS)), 2.0)


def ended(node: Participant, result: AllReduceResult = RESULT) -> list[ParticipantAction]:
    return node.handle(ReduceEnded(result), 3.0)


def decide(node: Participant, *, commit: bool, of: RoundId = ROUND) -> list[ParticipantAction]:
    return node.handle(CommandArrived(Decision(of, commit, "as agreed")), 4.0)


@pytest.mark.parametrize("assign", [False, True])
def test_a_round_from_prepare_to_commit(node: Participant, assign: bool) -> None:
    assert prepare(node, assign=assign)[-1] == CopyWeights(ROUND, idle=assign)
    assert copied(node) == [SendReply(Prepared(ROUND, 2, 7, 0, "", "int8", BASE))]
    assert start(node) == [StartReduce(Start(ROUND, WEIGHTS), COPY, moves=not assign)]
    stored, reply = ended(node)
    assert isinstance(stored, StoreAverage)
    average = stored.average
    assert (average.round, average.values, average.assign) == (ROUND, RESULT.averages, assign)
    assert average.moves is not assign
    assert reply == SendReply(Reduced(ROUND, 2, 7, {0: "digest"}, 12))
    assert decide(node, commit=True) == [
        CancelReduce(ROUND, "as agreed"),
        SettleCompression(ROUND, applied=True),
    ]


def test_a_faulty_copy_receives_the_average_as_it_is(node: Participant) -> None:
    prepare(node)
    (reply,) = copied(node, "NaN or Inf in w")
    assert isinstance(reply, SendReply)
    assert reply.head.problem == "NaN or Inf in w"
    (order,) = start(node)
    assert isinstance(order, StartReduce)
    assert not order.moves
    (stored, _) = ended(node)
    assert isinstance(stored, StoreAverage)
    assert stored.average.faulty


def test_a_failed_all_reduce_is_reported_and_never_applied(node: Participant) -> None:
    prepare(node)
    copied(node)
    start(node)
    failure = AllReduceResult(ROUND, {}, {}, 5, "node_3 is gone", 3)
    assert node.handle(ReduceEnded(failure, missing=1), 3.0) == [
        SendReply(Reduced(ROUND, 2, 7, {}, 5, "node_3 is gone", 1))
    ]
    assert decide(node, commit=True)[-1] == SettleCompression(ROUND, applied=False)


def test_an_aborted_round_is_not_applied(node: Participant) -> None:
    prepare(node)
    copied(node)
    start(node)
    ended(node)
    assert decide(node, commit=False)[-1] == SettleCompression(ROUND, applied=False)


def test_a_new_attempt_cancels_the_previous_one(node: Participant) -> None:
    prepare(node)
    copied(node)
    retry = RoundId(4, 1)
    cancel, copy = node.handle(CommandArrived(Prepare(retry, assign=True)), 2.0)
    assert isinstance(cancel, CancelReduce)
    assert cancel.round == ROUND
    assert copy == CopyWeights(retry, idle=True)
    assert start(node) == [], "the copy of the previous attempt is dropped"
    assert start(node, retry) == []


def test_events_of_other_rounds_are_ignored(node: Participant) -> None:
    assert copied(node) == []
    assert start(node) == []
    assert ended(node) == []
    prepare(node)
    assert copied(node, of=RoundId(3)) == []
    assert start(node) == [], "there is no copy yet"
    copied(node)
    assert copied(node) == [], "repeated"
    assert ended(node) == [], "not started"
    start(node)
    assert start(node) == [], "repeated"
    ended(node)
    assert ended(node) == [], "repeated"


def test_an_all_reduce_without_chunks_is_cancelled(node: Participant) -> None:
    assert node.stalls_at(0.0) == math.inf
    assert node.handle(Stalled(), 0.0) == []
    prepare(node)
    copied(node)
    assert node.stalls_at(0.0) == math.inf
    start(node)
    assert node.stalls_at(0.0) == 2.0 + RING_STALL
    assert node.stalls_at(9.0) == 9.0 + RING_STALL
    cancel, reply = node.handle(Stalled(), 50.0)
    assert isinstance(cancel, CancelReduce)
    assert cancel.round == ROUND
    assert reply == SendReply(Reduced(ROUND, 2, 7, {}, 0, cancel.reason))
    assert node.stalls_at(9.0) == math.inf, "not again"
    assert ended(node) == [], "the reply was sent, although the all-reduce had not ended"


def test_longer_outages_of_links_give_an_all_reduce_more_time() -> None:
    node = Participant(2, 7, Deadlines.outlasting(LINK_OUTAGE + 100.0))
    prepare(node)
    copied(node)
    start(node)
    assert node.stalls_at(0.0) == 2.0 + RING_STALL + ROUND_OUTAGES * 100.0


def test_commands_in_any_order_use_only_copies_and_averages_of_their_own_round() -> None:
    """A Root that was restarted, or that follows another coordinator, may send anything at any time."""
    for seed in range(2000):
        drawn, node = Random(seed), Participant(2, 7)
        ids = [RoundId(number, attempt) for number in range(3) for attempt in range(2)]
        copies: set[RoundId] = set()
        averages: set[RoundId] = set()
        for step in range(30):
            of = drawn.choice(ids)
            result = AllReduceResult(of, {}, {}, 0, drawn.choice(["", "node_3 is gone"]))
            event = drawn.choice(
                [
                    CommandArrived(Prepare(of, drawn.random() < 0.5)),
                    WeightsCopied(of, {of.number: torch.ones(1)}, "", "raw", None),
                    CommandArrived(Start(of, WEIGHTS)),
                    ReduceEnded(result),
                    Stalled(),
                    CommandArrived(Decision(of, drawn.random() < 0.5)),
                ]
            )
            for action in node.handle(event, float(step)):
                match action:
                    case CopyWeights(round_id):
                        copies.add(round_id)
                    case StartReduce(head, copy):
                        assert head.round in copies
                        assert list(copy) == [head.round.number]
                    case StoreAverage(average):
                        averages.add(average.round)
                    case SettleCompression(round_id, applied):
                        assert not applied or round_id in averages
