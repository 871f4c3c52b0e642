"""Lying and damaged clusters: their weights and parameters are bounded, their averages not applied."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from round_cases import Case, decided, weights

from ravnest.averaging.allreduce import AllReduceResult
from ravnest.averaging.checks import (
    bounded_weights,
    check_weights,
    counted_samples,
    outliers,
    scale,
    scales,
    start_refusal,
    wrong_average,
)
from ravnest.averaging.events import ClusterJoined, SendToCluster
from ravnest.averaging.member import Member, MessageArrived, NodeReplied
from ravnest.averaging.participant import (
    CommandArrived,
    Participant,
    ReduceEnded,
    SendReply,
    StoreAverage,
    WeightsCopied,
)
from ravnest.averaging.relay import RelayToNodes
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundId, Start

ROUND = RoundId(3)
COPY = {0: torch.full((8,), 2.0)}
NAN, INF = math.nan, math.inf


def participant(usual: float = 2.0) -> Participant:
    """Return a node that averages in a round."""
    node = Participant(0, 7)
    node.handle(CommandArrived(Prepare(ROUND, assign=False)), 0.0)
    node.handle(WeightsCopied(ROUND, COPY, "", "raw", None, scales(COPY)), 0.0)
    node.handle(CommandArrived(Start(ROUND, {0: 0.5, 1: 0.5}, scales={0: usual})), 0.0)
    return node


@pytest.mark.parametrize(
    ("average", "reason"),
    [
        ([2.1] * 8, ""),
        ([19.0] * 8, ""),
        ([2.0] * 7 + [NAN], "has NaN or Inf"),
        ([2.0] * 7 + [INF], "has NaN or Inf"),
        ([2.0] * 7 + [-INF], "has NaN or Inf"),
        ([3e38] * 8, "has the scale"),
        ([21.0] * 8, "has the scale 21, the parameters 2"),
        ([0.0] * 7 + [1000.0], "has the scale"),
    ],
)
def test_a_wrong_average_is_not_stored(average: list[float], reason: str) -> None:
    """A member of a ring replaced the final sums by NaN, or by values that ended the training."""
    values = {0: torch.tensor(average)}
    result = AllReduceResult(ROUND, values, {0: "digest"}, 100)
    actions = participant().handle(ReduceEnded(result, None, scales(values)), 1.0)
    (reply,) = [action.head for action in actions if isinstance(action, SendReply)]
    assert isinstance(reply, Reduced)
    assert reason in reply.problem
    assert reply.wrong == bool(reason)
    assert any(isinstance(action, StoreAverage) for action in actions) == (not reason)


def test_small_parameters_may_differ_by_any_factor() -> None:
    assert wrong_average({0: 0.09}, {0: 0.0}, {0: 1e-6}) == ""
    assert wrong_average({0: 0.11}, {0: 0.0}, {0: 1e-6}) != ""
    assert wrong_average({0: 5.0}, {0: NAN}, {0: 1.0}) == "", "its own copy is damaged"


@pytest.mark.parametrize(
    ("found", "own", "reason"), [(150.0, 2.0, ""), (201.0, 2.0, "scale"), (1e20, 2.0, "scale")]
)
def test_a_coordinator_cannot_say_that_huge_parameters_are_usual(
    found: float, own: float, reason: str
) -> None:
    """The Start of the coordinator said 1e30, and any finite average was applied."""
    assert reason in wrong_average({0: found}, {0: own}, {0: 1e30})
    assert bool(reason) == bool(wrong_average({0: found}, {0: own}, {0: 1e30}))


def test_scales() -> None:
    assert scale(torch.tensor([3.0, 4.0])) == pytest.approx(math.sqrt(12.5))
    assert scale(torch.full((100_000,), 1e30)) > 1e29
    assert scale(torch.empty(0)) == 0
    assert not math.isfinite(scale(torch.tensor([1.0, NAN])))


def test_a_wrong_average_is_not_committed_and_nobody_is_left_out() -> None:
    case = Case(3)
    case.request(1)
    for attempt in range(2):
        for cluster in range(3):
            case.prepared(cluster, scales={0: 1.0})
        case.reduced(0)
        case.reduced(1, problem="the average of ring 0 has NaN or Inf", wrong=True)
        actions = case.reduced(2, problem="the average of ring 0 has NaN or Inf", wrong=True)
        assert attempt or case.outcomes == []
    assert decided(actions) == {0: False, 1: False, 2: False}
    assert not case.outcome.committed
    assert "NaN or Inf" in case.outcome.reason
    assert case.outcome.missing == {}


def test_who_refuses_an_average_is_not_left_out_while_others_wait_for_its_values() -> None:
    case = Case(3)
    case.request(1)
    for _attempt in range(2):
        for cluster in range(3):
            case.prepared(cluster)
        case.reduced(1, problem="refused", wrong=True)
        case.wait(5)
    assert not case.outcome.committed
    assert case.outcome.missing == {}


@pytest.mark.parametrize("lie", [100.0, 1e30, NAN, INF, -1.0])
def test_parameters_that_are_far_too_large_do_not_enter_the_average(lie: float) -> None:
    case = Case(3)
    case.request(1)
    case.prepared(0, scales={0: 1.0, 1: 0.5})
    case.prepared(1, scales={0: lie, 1: 0.5})
    actions = case.prepared(2, scales={0: 1.1, 1: 0.6})
    assert weights(actions) == {0: 0.5, 1: 0.0, 2: 0.5}
    case.all_reduce(0, 1, 2)
    assert case.outcome.committed
    assert "its parameters of ring 0" in case.outcome.problems[1]


def test_a_liar_does_not_make_others_outliers() -> None:
    replies = {c: Prepared(ROUND, c, c, 1, scales={0: s}) for c, s in enumerate([1.0, 1.2, 1e-9])}
    assert outliers(replies) == {}
    replies = {c: Prepared(ROUND, c, c, 1, scales={0: s}) for c, s in enumerate([1.0, 1.2, 1e9])}
    assert list(outliers(replies)) == [2]


@pytest.mark.parametrize(
    ("reported", "planned", "counted"),
    [
        ({0: 320, 1: 320}, (1000, 1000), {0: 320, 1: 320}),
        ({0: 320, 1: 10**12}, (1000, 1000), {0: 320, 1: 640}),
        ({0: 320, 1: 10**12, 2: 640}, (1000, 500, 2000), {0: 320, 1: 320, 2: 640}),
        ({0: 32, 1: 320, 2: 320}, (1000, 1000, 1000), {0: 32, 1: 320, 2: 320}),
        ({0: 0, 1: 320}, (1000, 1000), {0: 0, 1: 320}),
        ({0: -5, 1: 0}, (1000, 1000), {0: 0, 1: 0}),
        ({0: 320, 1: 10**12}, (), {0: 320, 1: 10**12}),
    ],
)
def test_samples_count_as_far_as_the_plan_explains_them(
    reported: dict[int, int], planned: tuple[int, ...], counted: dict[int, int]
) -> None:
    """A cluster that reported 10**12 samples had all of the average."""
    assert counted_samples(reported, planned) == counted


def test_the_plan_bounds_the_weight_of_a_cluster() -> None:
    case = Case(2, planned=(500, 500))
    case.request(1)
    case.prepared(0, samples=100)
    assert weights(case.prepared(1, samples=10**12)) == {0: 1 / 3, 1: 2 / 3}


def test_weights_are_bounded_by_the_plan_whatever_the_pace_of_the_others() -> None:
    planned = (1, 1, 1000)
    assert bounded_weights({0: 0.5, 1: 0.25, 2: 0.25}, (1, 1, 1)) == {0: 0.5, 1: 0.25, 2: 0.25}
    found = bounded_weights({0: 0.4975, 1: 0.4975, 2: 0.005}, planned)
    assert found == pytest.approx({0: 2 / 1002, 1: 2 / 1002, 2: 998 / 1002})
    assert sum(found.values()) == pytest.approx(1)
    assert refusal(found, planned=planned) == ""
    assert bounded_weights({0: 1.0, 1: 0.0}, (1, 1)) == {0: 1.0, 1: 0.0}
    assert bounded_weights({0: 0.9, 1: 0.1}, ()) == {0: 0.9, 1: 0.1}


OWN = Prepared(ROUND, 1, 1, 320, scales={0: 1.0})


def refusal(
    weights: dict[int, float],
    own: Prepared = OWN,
    *,
    scales: float = 1.0,
    assign: bool = False,
    planned: tuple[int, ...] = (),
    robust: bool = False,
    live: int = 3,
) -> str:
    """Return why the Root of cluster 1 refuses a Start with these weights."""
    head = Start(ROUND, weights, scales={0: scales})
    return start_refusal(head, own, assign=assign, planned=planned, robust=robust, live=live)


ALONE = {0: 1.0, 1: 0.0, 2: 0.0}


def test_a_coordinator_cannot_take_the_whole_average_for_itself() -> None:
    assert "cluster 1 has no weight" in refusal(ALONE)
    assert refusal(ALONE, assign=True) == "", "in a final round it may have the only average"
    for fields in ({"problem": "NaN"}, {"behind": True}, {"samples": 0}, {"scales": {0: 50.0}}):
        assert refusal(ALONE, msgspec.structs.replace(OWN, **fields)) == ""
    assert "sum" in refusal({0: 0.5, 1: 0.2})
    assert "twice" not in refusal({0: 0.6, 1: 0.2, 2: 0.2}, planned=(1, 1, 1))
    assert "2 times its planned share" in refusal({0: 0.7, 1: 0.2, 2: 0.1}, planned=(1, 1, 1))


def test_a_coordinator_cannot_turn_the_robust_mean_off() -> None:
    """A Start with one contributor, or two, had the plain mean."""
    for weights_of in (ALONE, {0: 0.5, 1: 0.5, 2: 0.0}, {0: 0.5, 1: 0.5}):
        assert "robust mean" in refusal(weights_of, robust=True)
        assert refusal(weights_of, robust=True, live=2) == "", "this Root has lost the third itself"
    assert refusal({0: 1 / 3, 1: 1 / 3, 2: 1 / 3}, robust=True) == ""
    assert refusal({0: 0.0, 1: 1 / 3, 2: 1 / 3, 3: 1 / 3}, robust=True, live=4) == ""


def test_a_root_that_refuses_a_start_says_so_and_its_nodes_do_not_average() -> None:
    root = Member(1, [5], mode="background", reduce_factor=None, robust=True)
    root.handle(ClusterJoined(0), 0.0)
    root.handle(ClusterJoined(2), 0.0)
    root.handle(MessageArrived(0, Prepare(ROUND, assign=False)), 0.0)
    root.handle(NodeReplied(Prepared(ROUND, 1, 5, 320)), 0.0)
    (action,) = root.handle(MessageArrived(0, Start(ROUND, ALONE)), 0.0)
    assert isinstance(action, SendToCluster)
    assert isinstance(action.head, Reduced)
    assert action.head.wrong
    assert "robust mean" in action.head.problem
    over = root.handle(MessageArrived(0, Decision(ROUND, commit=True, reason="done")), 0.0)
    decisions = [each.head for each in over if isinstance(each, RelayToNodes)]
    assert decisions == [Decision(ROUND, commit=False, reason="this cluster has no average to apply")]


@pytest.mark.parametrize("wrong", [{0: 2.0, 1: -1.0}, {0: 0.5, 1: 0.6}, {0: NAN, 1: 1.0}, {0: 0.0}])
def test_weights_that_form_no_average_are_refused(wrong: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="weights of the clusters"):
        check_weights(wrong)
    check_weights({0: 1 / 3, 1: 1 / 3, 2: 1 / 3, 3: 0.0})
