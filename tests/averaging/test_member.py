"""The word of a cluster: from its nodes to the coordinator and back."""

from __future__ import annotations

from ravnest.averaging.member import Member, RelayToNodes, ReplyToCoordinator, RoundOver
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundId, Start

ROUND = RoundId(4)
PROPOSE = Prepare(ROUND, assign=False)
GO = Start(ROUND, {1: 0.5, 2: 0.5})


def gathering() -> Member:
    """Of cluster 2 with nodes 5, 6 and 7, that follows cluster 1."""
    return Member(2, (5, 6, 7), coordinator=1)


def held(node: int, samples: int = 0, problem: str = "") -> Prepared:
    return Prepared(ROUND, 2, node, samples, problem)


def reduced(
    node: int, digests: dict[int, str] | None = None, problem: str = "", missing: int | None = None
) -> Reduced:
    return Reduced(ROUND, 2, node, digests or {node: f"digest {node}"}, 10, problem, missing)


def averaging(*, assign: bool = False) -> Member:
    """One whose nodes have been told to average."""
    made = gathering()
    made.hear(1, Prepare(ROUND, assign))
    for node in (5, 6, 7):
        made.collect(held(node))
    made.hear(1, GO)
    return made


class TestAnswers:
    def test_the_last_node_makes_the_answer_with_the_samples_of_the_root(self) -> None:
        made = gathering()
        assert made.hear(1, PROPOSE) == [RelayToNodes(PROPOSE)]
        assert made.collect(held(6)) == []
        assert made.collect(held(5, 320)) == []
        assert made.waits_for == (7,)
        assert made.collect(held(7)) == [ReplyToCoordinator(Prepared(ROUND, 2, 5, 320))]
        assert made.waits_for == ()

    def test_problems_name_their_nodes(self) -> None:
        made = gathering()
        made.hear(1, PROPOSE)
        made.collect(held(5, 320, "NaN in a"))
        made.collect(held(6))
        (answer,) = made.collect(held(7, 0, "Inf in b"))
        assert answer == ReplyToCoordinator(
            Prepared(ROUND, 2, 5, 320, "node_5: NaN in a; node_7: Inf in b")
        )

    def test_averages_become_one(self) -> None:
        made = averaging()
        made.collect(reduced(5))
        made.collect(reduced(6, {1: "a", 2: "b"}))
        (answer,) = made.collect(reduced(7))
        digests = {5: "digest 5", 1: "a", 2: "b", 7: "digest 7"}
        assert answer == ReplyToCoordinator(Reduced(ROUND, 2, 5, digests, 30))

    def test_a_failure_is_said_at_once_and_once(self) -> None:
        made = averaging()
        made.collect(reduced(5))
        (answer,) = made.collect(reduced(7, {}, "no word from node_2", missing=1))
        assert isinstance(answer, ReplyToCoordinator)
        assert isinstance(answer.head, Reduced)
        assert (answer.head.problem, answer.head.missing) == ("node_7: no word from node_2", 1)
        assert made.collect(reduced(6)) == []

    def test_two_nodes_in_one_ring_are_a_problem(self) -> None:
        made = averaging()
        made.collect(reduced(5, {0: "a"}))
        made.collect(reduced(6, {0: "a"}))
        (answer,) = made.collect(reduced(7, {1: "a"}))
        assert isinstance(answer, ReplyToCoordinator)
        assert answer.head.problem == "two nodes of cluster 2 are in ring 0"

    def test_the_verdict_goes_to_all_nodes(self) -> None:
        made = averaging(assign=True)
        for node in (5, 6, 7):
            made.collect(reduced(node))
        settle = Decision(ROUND, commit=True)
        assert made.hear(1, settle) == [RelayToNodes(settle), RoundOver(settle, assign=True)]
        assert made.hear(1, settle) == []


class TestOrder:
    def test_what_is_repeated_early_or_strange_is_ignored(self) -> None:
        made = gathering()
        assert made.hear(1, GO) == []
        assert made.collect(held(5)) == []
        made.hear(1, PROPOSE)
        assert made.hear(1, PROPOSE) == []
        assert made.hear(1, GO) == []
        assert made.collect(held(9)) == []
        assert made.collect(reduced(5)) == []
        made.collect(held(5, 1))
        assert made.collect(held(5, 2)) == []
        made.collect(held(6))
        assert made.collect(held(7)) == [ReplyToCoordinator(Prepared(ROUND, 2, 5, 1))]
        assert made.hear(1, Start(ROUND, {0: 1.0})) == []
        assert made.hear(1, GO) == [RelayToNodes(GO)]
        assert made.hear(1, GO) == []

    def test_an_average_that_this_cluster_does_not_have_is_not_applied(self) -> None:
        made = averaging()
        (relay, over) = made.hear(1, Decision(ROUND, commit=True))
        assert isinstance(relay, RelayToNodes)
        assert isinstance(relay.head, Decision)
        assert not relay.head.commit
        assert isinstance(over, RoundOver)
        assert not over.settle.commit

    def test_a_newer_proposal_voids_the_open_round_without_ending_the_wait(self) -> None:
        made = averaging(assign=True)
        again = Prepare(RoundId(4, 1), assign=True)
        assert made.hear(1, again) == [
            RelayToNodes(Decision(ROUND, commit=False, reason="it is tried again")),
            RelayToNodes(again),
        ]
        assert made.hear(1, Decision(ROUND, commit=True)) == []
        assert made.collect(held(5)) == []
        other = Prepare(RoundId(6), assign=True)
        assert made.hear(1, other)[0] == RelayToNodes(
            Decision(RoundId(4, 1), False, "round 6 has begun")
        )

    def test_an_older_proposal_of_the_same_coordinator_is_ignored(self) -> None:
        made = averaging()
        assert made.hear(1, Prepare(RoundId(3), assign=False)) == []

    def test_a_verdict_on_a_round_that_never_was_ends_the_wait(self) -> None:
        made = gathering()
        settle = Decision(RoundId(9), commit=False, reason="only cluster 2 is there", assign=True)
        assert made.hear(1, settle) == [RoundOver(settle, assign=True)]
        assert made.next_round == 10

    def test_unless_the_others_trained_on(self) -> None:
        made = gathering()
        settle = Decision(RoundId(9), commit=False, reason="not answered within 30.0 s")
        assert made.hear(1, settle) == [RoundOver(settle, assign=False)]

    def test_only_the_coordinator_that_is_followed_is_heard(self) -> None:
        made = gathering()
        assert made.hear(0, PROPOSE) == []
        made.hear(1, PROPOSE)
        assert made.hear(0, Decision(ROUND, commit=False)) == []


class TestTakeover:
    def test_with_another_coordinator_the_open_round_is_void(self) -> None:
        made = averaging(assign=True)
        reason = "cluster 1 was lost"
        assert made.follow(2, reason) == [RelayToNodes(Decision(ROUND, commit=False, reason=reason))]
        assert made.hear(1, Decision(ROUND, commit=True)) == []
        assert made.next_round == 5
        new = Prepare(RoundId(5), assign=True)
        assert made.hear(2, new) == [RelayToNodes(new)]

    def test_one_that_does_not_know_the_newest_round_is_told(self) -> None:
        made = averaging()
        made.follow(2, "cluster 1 was lost")
        for number in (3, 4):
            (answer,) = made.hear(2, Prepare(RoundId(number), assign=False))
            assert isinstance(answer, ReplyToCoordinator)
            assert answer.head.round == RoundId(4, 1)
            assert answer.head.problem == "round 4 was opened by another coordinator"
        assert made.hear(2, Prepare(RoundId(5), assign=False)) == [
            RelayToNodes(Prepare(RoundId(5), assign=False))
        ]

    def test_so_is_one_that_was_started_again(self) -> None:
        made = averaging()
        made.follow(1, "a new link")
        (answer,) = made.hear(1, Prepare(RoundId(0), assign=False))
        assert isinstance(answer, ReplyToCoordinator)
        assert answer.head.round == RoundId(4, 1)
