"""A cluster at its Root: requests, leadership and the commands of its own coordinator."""

from __future__ import annotations

import math

from ravnest.averaging.coordinator import Mode
from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.events import ClusterJoined, ClusterLost, RoundEnded, SendToCluster, Tick
from ravnest.averaging.member import (
    MAX_EARLY_EVENTS,
    EpochEnded,
    Member,
    MemberAction,
    MessageArrived,
    NodeReplied,
    TrainingPaused,
    UpdateMade,
)
from ravnest.averaging.relay import RelayToNodes, RoundOver
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundId, RoundRequest, Start

FIRST = RoundId(0)
PREPARE = Prepare(FIRST, assign=False)


def member(
    cluster: int, *others: int, mode: Mode = "background", reduce_factor: int | None = 1
) -> Member:
    """Return the member of a cluster with one node that others have joined."""
    made = Member(cluster, (10 * cluster,), mode=mode, reduce_factor=reduce_factor)
    for other in others:
        made.handle(ClusterJoined(other), 0.0)
    return made


def request(cluster: int, updates: int = 1, samples: int = 8, *, final: bool = False) -> RoundRequest:
    return RoundRequest(cluster, updates, samples, 0.0, final)


def prepared(cluster: int, samples: int = 0, of: RoundId = FIRST) -> Prepared:
    return Prepared(of, cluster, 10 * cluster, samples)


def reduced(cluster: int, of: RoundId = FIRST) -> Reduced:
    return Reduced(of, cluster, 10 * cluster, {0: "same"}, 1)


class TestRequests:
    def test_the_lowest_cluster_receives_the_request(self) -> None:
        root = member(2, 1, 0)
        assert root.coordinator == 0
        assert root.handle(UpdateMade(8, 1.0), 1.0) == [SendToCluster(0, request(2))]

    def test_a_blocking_cluster_requests_a_round_when_it_pauses(self) -> None:
        root = member(1, 0, mode="blocking")
        assert root.handle(UpdateMade(8, 1.0), 1.0) == []
        assert root.handle(TrainingPaused(final=False), 1.0) == [SendToCluster(0, request(1))]

    def test_an_epoch_requests_a_round_without_a_reduce_factor(self) -> None:
        root = member(1, 0, reduce_factor=None)
        assert root.handle(UpdateMade(8, 1.0), 1.0) == []
        (sent,) = root.handle(EpochEnded(9.0), 9.0)
        assert isinstance(sent, SendToCluster)
        assert isinstance(sent.head, RoundRequest)

    def test_a_single_cluster_has_no_rounds(self) -> None:
        root = member(0)
        assert root.handle(UpdateMade(8, 1.0), 1.0) == []
        actions = root.handle(TrainingPaused(final=True), 2.0)
        assert {type(action) for action in actions} == {RoundEnded, RoundOver}, "it does not wait"


class TestRounds:
    def test_a_root_that_coordinates_takes_part_in_its_own_round(self) -> None:
        root = member(0, 1)
        assert root.handle(UpdateMade(8, 1.0), 1.0) == [
            SendToCluster(1, PREPARE),
            RelayToNodes(PREPARE),
        ]
        assert root.handle(NodeReplied(prepared(0)), 1.0) == []
        start = Start(FIRST, {0: 0.25, 1: 0.75})
        assert root.handle(MessageArrived(1, prepared(1, 24)), 1.0) == [
            SendToCluster(1, start),
            RelayToNodes(start),
        ]
        assert root.handle(NodeReplied(reduced(0)), 1.5) == []
        sent, ended, relayed, over = root.handle(MessageArrived(1, reduced(1)), 2.0)
        assert isinstance(sent, SendToCluster)
        decision = sent.head
        assert isinstance(decision, Decision)
        assert decision.commit
        assert isinstance(ended, RoundEnded)
        assert (relayed, over) == (RelayToNodes(decision), RoundOver(decision, resume=False))
        assert root.trigger.samples == 0

    def test_the_deadline_of_the_own_coordinator_is_passed_on(self) -> None:
        root = member(0, 1)
        assert root.wake == math.inf
        root.handle(UpdateMade(8, 1.0), 1.0)
        assert root.wake == 1.0 + Deadlines().answer_most
        root.handle(NodeReplied(prepared(0)), 1.0)
        actions = root.handle(Tick(), root.wake)
        assert _outcomes(actions) == ["only cluster 0 takes part"]

    def test_the_reply_of_a_follower_goes_to_the_coordinator(self) -> None:
        root = member(1, 0)
        root.handle(UpdateMade(8, 1.0), 1.0)
        assert root.handle(MessageArrived(0, PREPARE), 1.0) == [RelayToNodes(PREPARE)]
        assert root.handle(NodeReplied(prepared(1)), 1.0) == [SendToCluster(0, prepared(1, 8))]


class TestLeadership:
    def test_the_next_cluster_takes_over_after_the_newest_round(self) -> None:
        root = member(1, 0, 2)
        root.handle(UpdateMade(8, 1.0), 1.0)
        root.handle(MessageArrived(0, Prepare(RoundId(6), assign=False)), 1.0)
        actions = root.handle(ClusterLost(0, "no heartbeat"), 2.0)
        assert root.coordinator == 1
        void, *opened = actions
        assert isinstance(void, RelayToNodes)
        assert void.head == Decision(RoundId(6), commit=False, reason="cluster 0 is gone")
        new = Prepare(RoundId(7), assign=False)
        assert opened == [SendToCluster(2, new), RelayToNodes(new)], "its own request is pending"

    def test_messages_that_arrive_before_the_takeover_count(self) -> None:
        root = member(1, 0, 2)
        assert root.handle(MessageArrived(2, request(2)), 1.0) == []
        assert SendToCluster(2, PREPARE) in root.handle(ClusterLost(0, "no heartbeat"), 2.0)

    def test_early_messages_are_limited(self) -> None:
        root = member(1, 0, 2)
        root.handle(MessageArrived(2, request(2)), 1.0)
        for _ in range(MAX_EARLY_EVENTS):
            root.handle(MessageArrived(2, prepared(2)), 1.0)
        assert root.handle(ClusterLost(0, "no heartbeat"), 2.0) == []

    def test_a_lower_cluster_that_joins_receives_the_pending_request(self) -> None:
        root = member(1, mode="blocking")
        root.handle(ClusterJoined(2), 0.0)
        root.handle(UpdateMade(8, 1.0), 1.0)
        root.handle(TrainingPaused(final=False), 1.0)
        assert root.handle(ClusterJoined(0), 2.0) == [SendToCluster(0, request(1))]
        assert (root.coordinator, root.wake) == (0, math.inf)

    def test_a_coordinator_that_reconnects_receives_the_pending_request(self) -> None:
        root = member(1, 0)
        root.handle(TrainingPaused(final=True), 1.0)
        final = request(1, 0, 0, final=True)
        assert root.handle(ClusterJoined(0), 2.0) == [SendToCluster(0, final)]

    def test_a_loss_that_is_already_known_changes_nothing(self) -> None:
        assert member(0, 1).handle(ClusterLost(2, "no heartbeat"), 1.0) == []


def _outcomes(actions: list[MemberAction]) -> list[str]:
    return [action.outcome.reason for action in actions if isinstance(action, RoundEnded)]


class TestReconnections:
    def test_a_member_that_connects_again_is_left_out_of_the_open_round_at_once(self) -> None:
        root = member(0, 1, 2)
        root.handle(UpdateMade(8, 1.0), 1.0)
        root.handle(NodeReplied(prepared(0)), 1.0)
        root.handle(MessageArrived(2, prepared(2, 8)), 1.0)
        sent = root.handle(ClusterJoined(1), 2.0)
        starts = [action.head for action in sent if isinstance(action, SendToCluster)]
        assert [sorted(head.weights) for head in starts if isinstance(head, Start)] == [[0, 2]]

    def test_another_member_that_connects_again_does_not_void_the_round_here(self) -> None:
        root = member(2, 0, 1)
        root.handle(MessageArrived(0, PREPARE), 1.0)
        assert root.handle(ClusterJoined(1), 2.0) == []
        assert root.handle(NodeReplied(prepared(2)), 2.0) == [SendToCluster(0, prepared(2))]

    def test_the_coordinator_that_connects_again_voids_the_round_and_gets_the_request(self) -> None:
        root = member(1, 0)
        root.handle(UpdateMade(8, 1.0), 1.0)
        root.handle(MessageArrived(0, PREPARE), 1.0)
        void, request = root.handle(ClusterJoined(0), 2.0)
        assert isinstance(void, RelayToNodes)
        assert isinstance(void.head, Decision)
        assert not void.head.commit
        assert isinstance(request, SendToCluster)
        assert isinstance(request.head, RoundRequest)
