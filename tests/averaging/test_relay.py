"""Commands from the coordinator to the nodes of a cluster, and their combined reply."""

from __future__ import annotations

from ravnest.averaging.relay import CommandRelay, RelayToNodes, ReplyToCoordinator, RoundOver
from ravnest.wire.messages import Decision, Prepare, Prepared, Reduced, RoundId, Start

ROUND = RoundId(4)
PREPARE = Prepare(ROUND, assign=False)
START = Start(ROUND, {1: 0.5, 2: 0.5})


def cluster_relay() -> CommandRelay:
    """Return the relay of cluster 2 with nodes 5, 6 and 7, which follows cluster 1."""
    return CommandRelay(2, (5, 6, 7), coordinator=1)


def prepared(node: int, samples: int = 0, problem: str = "") -> Prepared:
    return Prepared(ROUND, 2, node, samples, problem)


def reduced(
    node: int, digests: dict[int, str] | None = None, problem: str = "", missing: int | None = None
) -> Reduced:
    return Reduced(ROUND, 2, node, digests or {node: f"digest {node}"}, 10, problem, missing)


def reducing(*, assign: bool = False) -> CommandRelay:
    """Return a relay whose nodes have received Start."""
    relay = cluster_relay()
    relay.command(1, Prepare(ROUND, assign))
    for node in (5, 6, 7):
        relay.reply(prepared(node))
    relay.command(1, START)
    return relay


class TestReplies:
    def test_the_last_node_completes_the_reply_with_the_samples_of_the_root(self) -> None:
        relay = cluster_relay()
        assert relay.command(1, PREPARE) == [RelayToNodes(PREPARE)]
        assert relay.reply(prepared(6)) == []
        assert relay.reply(prepared(5, 320)) == []
        assert relay.awaited == (7,)
        assert relay.reply(prepared(7)) == [ReplyToCoordinator(Prepared(ROUND, 2, 5, 320))]
        assert relay.awaited == ()

    def test_problems_name_their_nodes(self) -> None:
        relay = cluster_relay()
        relay.command(1, PREPARE)
        relay.reply(prepared(5, 320, "NaN in a"))
        relay.reply(prepared(6))
        (answer,) = relay.reply(prepared(7, 0, "Inf in b"))
        assert answer == ReplyToCoordinator(
            Prepared(ROUND, 2, 5, 320, "node_5: NaN in a; node_7: Inf in b")
        )

    def test_replies_are_combined(self) -> None:
        relay = reducing()
        relay.reply(reduced(5))
        relay.reply(reduced(6, {1: "a", 2: "b"}))
        (answer,) = relay.reply(reduced(7))
        digests = {5: "digest 5", 1: "a", 2: "b", 7: "digest 7"}
        assert answer == ReplyToCoordinator(Reduced(ROUND, 2, 5, digests, 30))

    def test_a_failure_is_reported_at_once_and_once(self) -> None:
        relay = reducing()
        relay.reply(reduced(5))
        (answer,) = relay.reply(reduced(7, {}, "nothing from node_2", missing=1))
        assert isinstance(answer, ReplyToCoordinator)
        assert isinstance(answer.head, Reduced)
        assert (answer.head.problem, answer.head.missing) == ("node_7: nothing from node_2", 1)
        assert relay.reply(reduced(6)) == []

    def test_two_nodes_in_one_ring_are_a_problem(self) -> None:
        relay = reducing()
        relay.reply(reduced(5, {0: "a"}))
        relay.reply(reduced(6, {0: "a"}))
        (answer,) = relay.reply(reduced(7, {1: "a"}))
        assert isinstance(answer, ReplyToCoordinator)
        assert answer.head.problem == "two nodes of cluster 2 are in ring 0"

    def test_the_decision_goes_to_all_nodes(self) -> None:
        relay = reducing(assign=True)
        for node in (5, 6, 7):
            relay.reply(reduced(node))
        decision = Decision(ROUND, commit=True)
        assert relay.command(1, decision) == [RelayToNodes(decision), RoundOver(decision, resume=True)]
        assert relay.command(1, decision) == []


class TestOrder:
    def test_repeated_early_and_unknown_messages_are_ignored(self) -> None:
        relay = cluster_relay()
        assert relay.command(1, START) == []
        assert relay.reply(prepared(5)) == []
        relay.command(1, PREPARE)
        assert relay.command(1, PREPARE) == []
        assert relay.command(1, START) == []
        assert relay.reply(prepared(9)) == []
        assert relay.reply(reduced(5)) == []
        relay.reply(prepared(5, 1))
        assert relay.reply(prepared(5, 2)) == []
        relay.reply(prepared(6))
        assert relay.reply(prepared(7)) == [ReplyToCoordinator(Prepared(ROUND, 2, 5, 1))]
        assert relay.command(1, Start(ROUND, {0: 1.0})) == []
        assert relay.command(1, START) == [RelayToNodes(START)]
        assert relay.command(1, START) == []

    def test_a_commit_without_an_average_becomes_an_abort(self) -> None:
        relay = reducing()
        (command, over) = relay.command(1, Decision(ROUND, commit=True))
        assert isinstance(command, RelayToNodes)
        assert isinstance(command.head, Decision)
        assert not command.head.commit
        assert isinstance(over, RoundOver)
        assert not over.decision.commit

    def test_a_newer_prepare_voids_the_open_round_and_training_stays_paused(self) -> None:
        relay = reducing(assign=True)
        again = Prepare(RoundId(4, 1), assign=True)
        assert relay.command(1, again) == [
            RelayToNodes(Decision(ROUND, commit=False, reason="it is tried again")),
            RelayToNodes(again),
        ]
        assert relay.command(1, Decision(ROUND, commit=True)) == []
        assert relay.reply(prepared(5)) == []
        other = Prepare(RoundId(6), assign=True)
        assert relay.command(1, other)[0] == RelayToNodes(
            Decision(RoundId(4, 1), False, "round 6 has begun")
        )

    def test_an_older_prepare_of_the_same_coordinator_is_ignored(self) -> None:
        relay = reducing()
        assert relay.command(1, Prepare(RoundId(3), assign=False)) == []

    def test_a_decision_of_an_unknown_round_resumes_training(self) -> None:
        relay = cluster_relay()
        decision = Decision(RoundId(9), commit=False, reason="only cluster 2 takes part", assign=True)
        assert relay.command(1, decision) == [RoundOver(decision, resume=True)]
        assert relay.next_round == 10

    def test_a_decision_of_an_unknown_background_round_does_not(self) -> None:
        relay = cluster_relay()
        decision = Decision(RoundId(9), commit=False, reason="no reply within 30.0 s")
        assert relay.command(1, decision) == [RoundOver(decision, resume=False)]

    def test_only_commands_of_the_followed_coordinator_count(self) -> None:
        relay = cluster_relay()
        assert relay.command(0, PREPARE) == []
        relay.command(1, PREPARE)
        assert relay.command(0, Decision(ROUND, commit=False)) == []


class TestTakeover:
    def test_another_coordinator_voids_the_open_round(self) -> None:
        relay = reducing(assign=True)
        reason = "cluster 1 was lost"
        assert relay.follow(2, reason) == [RelayToNodes(Decision(ROUND, commit=False, reason=reason))]
        assert relay.command(1, Decision(ROUND, commit=True)) == []
        assert relay.next_round == 5
        new = Prepare(RoundId(5), assign=True)
        assert relay.command(2, new) == [RelayToNodes(new)]

    def test_a_coordinator_that_does_not_know_the_newest_round_learns_it(self) -> None:
        relay = reducing()
        relay.follow(2, "cluster 1 was lost")
        for number in (3, 4):
            (answer,) = relay.command(2, Prepare(RoundId(number), assign=False))
            assert isinstance(answer, ReplyToCoordinator)
            assert answer.head.round == RoundId(4, 1)
            assert answer.head.problem == "round 4 was opened by another coordinator"
        assert relay.command(2, Prepare(RoundId(5), assign=False)) == [
            RelayToNodes(Prepare(RoundId(5), assign=False))
        ]

    def test_a_coordinator_that_was_restarted_learns_it_too(self) -> None:
        relay = reducing()
        relay.follow(1, "a new link")
        (answer,) = relay.command(1, Prepare(RoundId(0), assign=False))
        assert isinstance(answer, ReplyToCoordinator)
        assert answer.head.round == RoundId(4, 1)


class TestRestarts:
    def test_a_round_of_a_cluster_that_takes_over_is_joined_when_the_loss_is_known_here(self) -> None:
        relay = CommandRelay(3, (5,), coordinator=1)
        assert relay.command(2, PREPARE) == [], "cluster 2 learned of the loss earlier"
        assert relay.follow(2, "cluster 1 is gone") == [RelayToNodes(PREPARE)]
        assert relay.awaited == (5,)

    def test_a_round_that_ended_meanwhile_is_not_joined(self) -> None:
        relay = CommandRelay(3, (5,), coordinator=1)
        relay.command(2, PREPARE)
        relay.command(2, Decision(ROUND, commit=False, reason="no reply"))
        assert relay.follow(2, "cluster 1 is gone") == []
        relay = CommandRelay(3, (5,), coordinator=1)
        relay.command(2, PREPARE)
        relay.forget(2)
        assert relay.follow(2, "cluster 1 is gone") == [], "it was sent by a process that is gone"

    def test_a_restarted_coordinator_that_opens_no_round_releases_training(self) -> None:
        """Its numbers begin with 0 again, and it has not learned of the newest one yet."""
        relay = cluster_relay()
        relay.command(1, Prepare(ROUND, assign=True))
        relay.follow(1, "it has connected again")
        void = Decision(RoundId(0), commit=False, reason="only cluster 2 takes part", assign=True)
        assert relay.command(1, void) == [RoundOver(void, resume=True)]
        assert relay.next_round == ROUND.number + 1
        (reply,) = relay.command(1, Prepare(RoundId(1), assign=True))
        assert isinstance(reply, ReplyToCoordinator), "it learns of the newest round"
        assert reply.head.round > ROUND
