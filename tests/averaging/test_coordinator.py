"""Rounds of averaging: scripted orders in virtual time for each rule."""

from __future__ import annotations

import pytest
from round_cases import Case, asked, settled, weights

from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.events import RoundEnded, SendToCluster, Tick, Wake
from ravnest.averaging.round import ATTEMPTS
from ravnest.wire.messages import Decision, Prepare, RoundId, Start

LIMITS = Deadlines()


class TestBackground:
    def test_one_cluster_that_is_due_opens_a_round_for_all(self) -> None:
        case = Case(3)
        assert case.due(1) == [
            *(SendToCluster(cluster, Prepare(RoundId(0), assign=False)) for cluster in range(3)),
            Wake(LIMITS.answer_most),
        ]

    def test_weights_are_shares_of_the_samples(self) -> None:
        case = Case(3)
        case.due(0)
        case.held(0, 60)
        case.held(1, 30)
        assert weights(case.held(2, 10)) == {0: 0.6, 1: 0.3, 2: 0.1}

    def test_a_cluster_without_samples_only_receives(self) -> None:
        case = Case(2)
        case.due(0)
        case.held(0, 60)
        assert weights(case.held(1, 0)) == {0: 1.0, 1: 0.0}

    def test_without_any_samples_weights_are_equal(self) -> None:
        case = Case(2)
        case.due(0)
        assert weights(case.all_hold(0, 1, samples=0)) == {0: 0.5, 1: 0.5}

    def test_the_average_is_applied_when_all_have_it(self) -> None:
        case = Case(2)
        case.due(0)
        case.now = 0.25
        case.all_hold(0, 1)
        assert case.reduced(0) == []
        case.now = 1.5
        actions = case.reduced(1)
        assert settled(actions) == {0: True, 1: True}
        assert isinstance(actions[-1], RoundEnded)
        outcome = case.outcome
        assert (outcome.committed, outcome.kind, outcome.round) == (True, "background", RoundId(0))
        assert (outcome.sent_bytes, outcome.seconds, outcome.digests) == (200, 1.5, {0: "same"})
        assert outcome.missing == {}

    def test_the_verdict_tells_every_root_what_to_log(self) -> None:
        case = Case(2)
        case.due(0)
        case.all_hold(0, 1)
        case.all_reduce(0, 1)
        (send, _) = case.sends[-2:]
        assert isinstance(send.head, Decision)
        assert send.head.reason == case.outcome.describe()

    def test_clusters_that_become_due_together_average_once(self) -> None:
        case = Case(2)
        case.due(0)
        assert case.due(1) == []  # on its way before the Propose reached it
        case.all_hold(0, 1)
        case.all_reduce(0, 1)
        assert len(case.outcomes) == 1
        assert asked(case.due(1, 16)) == [0, 1]

    def test_a_cluster_due_again_while_a_round_is_slow_opens_the_next(self) -> None:
        case = Case(2)
        case.due(0)
        case.all_hold(0, 1)
        assert case.due(0, 16) == []
        actions = case.all_reduce(0, 1)
        assert asked(actions) == [0, 1]
        assert case.round == RoundId(1)

    def test_a_silent_cluster_holds_nobody_up_beyond_the_deadline(self) -> None:
        case = Case(3)
        case.due(0)
        case.all_hold(0, 1)
        actions = case.wait(LIMITS.answer_most)
        assert weights(actions) == {0: 0.5, 1: 0.5}
        assert settled(actions) == {2: False}
        case.all_reduce(0, 1)
        assert case.outcome.committed
        assert case.outcome.missing == {2: "not answered within 30.0 s"}

    def test_the_deadline_comes_from_measured_answers(self) -> None:
        case = Case(2)
        for number in range(2):
            case.due(0, 8 * (number + 1))
            case.held(0)
            case.wait(0.2)
            case.held(1)
            case.all_reduce(0, 1)
        start = case.now
        assert case.due(0, 24)[-1] == Wake(start + 3 * 0.2 + LIMITS.answer_floor)

    def test_a_cluster_that_was_too_slow_gets_more_time_next(self) -> None:
        case = Case(3)
        case.due(0)
        case.all_hold(0, 1, 2)
        case.all_reduce(0, 1, 2)
        case.due(0, 16)
        case.all_hold(0, 1)
        assert settled(case.wait(LIMITS.answer_floor)) == {2: False}
        case.all_reduce(0, 1)
        assert case.outcome.missing == {2: "not answered within 1.0 s"}
        start = case.now
        assert case.due(0, 24)[-1] == Wake(start + 3 * 1.0 + LIMITS.answer_floor)
        case.all_hold(0, 1, 2)
        case.all_reduce(0, 1, 2)
        assert sorted(case.outcome.weights) == [0, 1, 2]

    def test_alone_with_silence_there_is_no_round(self) -> None:
        case = Case(2)
        case.due(0)
        case.held(0)
        actions = case.wait(LIMITS.answer_most)
        assert settled(actions) == {0: False, 1: False}
        assert not case.outcome.committed
        assert case.outcome.reason == "only cluster 0 is there to take part"

    def test_the_only_cluster_trains_on_without_rounds(self) -> None:
        case = Case(2)
        case.lost(1)
        assert case.due(0) == []
        case.joined(1)
        assert asked(case.due(0, 16)) == [0, 1], "until another one comes"


class TestProblems:
    def test_nan_keeps_a_cluster_out_and_it_still_receives(self) -> None:
        case = Case(3)
        case.due(0)
        case.held(0, 30)
        case.held(1, 50, "node_3: NaN in layer.weight")
        assert weights(case.held(2, 10)) == {0: 0.75, 1: 0.0, 2: 0.25}
        assert settled(case.all_reduce(0, 1, 2)) == {0: True, 1: True, 2: True}
        assert case.outcome.problems == {1: "node_3: NaN in layer.weight"}

    def test_nobody_with_parameters_to_give_voids_the_round(self) -> None:
        case = Case(2)
        case.due(0)
        case.held(0, 5, "NaN in a")
        actions = case.held(1, 5, "NaN in b")
        assert settled(actions) == {0: False, 1: False}
        assert "cluster 0: NaN in a; cluster 1: NaN in b" in case.outcome.reason

    def test_those_without_problem_share_equally_if_no_samples_are_theirs(self) -> None:
        case = Case(3)
        case.due(0)
        case.held(0, 7, "NaN in a")
        case.held(1, 0)
        assert weights(case.held(2, 0)) == {0: 0.0, 1: 0.5, 2: 0.5}


class TestFailures:
    def test_a_cluster_lost_before_averaging_is_left_out(self) -> None:
        case = Case(3)
        case.due(0)
        case.all_hold(0, 1)
        assert weights(case.lost(2)) == {0: 0.5, 1: 0.5}
        case.all_reduce(0, 1)
        assert case.outcome.round == RoundId(0)
        assert case.outcome.missing == {2: "its link is gone"}

    def test_a_cluster_lost_after_its_copy_was_held_is_left_out(self) -> None:
        case = Case(3)
        case.due(0)
        case.all_hold(0, 2)
        assert case.lost(2) == []
        assert weights(case.held(1)) == {0: 0.5, 1: 0.5}

    def test_a_cluster_lost_in_mid_round_voids_it_and_it_is_tried_again(self) -> None:
        case = Case(3)
        case.due(0)
        case.all_hold(0, 1, 2)
        case.reduced(0)
        actions = case.lost(2)
        assert [action for action in actions if isinstance(action, SendToCluster)] == [
            SendToCluster(0, Prepare(RoundId(0, 1), assign=False)),
            SendToCluster(1, Prepare(RoundId(0, 1), assign=False)),
        ]
        assert case.reduced(1, of=RoundId(0, 0)) == []  # of the attempt that is void
        case.all_hold(0, 1)
        assert settled(case.all_reduce(0, 1)) == {0: True, 1: True}
        assert case.outcome.round == RoundId(0, 1)
        assert case.outcome.sent_bytes == 300
        assert len(case.outcomes) == 1

    def test_losing_all_but_one_ends_the_round(self) -> None:
        case = Case(2)
        case.due(0)
        case.all_hold(0, 1)
        assert settled(case.lost(1)) == {0: False}
        assert "cluster 1 was lost: its link is gone" in case.outcome.reason

    def test_the_others_train_and_average_on_without_a_cluster_that_died(self) -> None:
        case = Case(3)
        case.lost(2)
        assert asked(case.due(0)) == [0, 1]
        case.all_hold(0, 1)
        case.all_reduce(0, 1)
        assert case.outcome.missing == {2: "its link is gone"}

    def test_a_cluster_that_comes_back_is_in_the_next_round(self) -> None:
        case = Case(3)
        case.due(0)
        case.all_hold(0, 1, 2)
        case.lost(2)
        case.joined(2)
        assert case.round == RoundId(0, 1)
        case.all_hold(0, 1)
        case.all_reduce(0, 1)
        assert case.outcome.missing == {2: "its link is gone"}
        assert asked(case.due(0, 16)) == [0, 1, 2]

    def test_a_new_cluster_waits_for_the_next_round(self) -> None:
        case = Case(2)
        case.due(0)
        assert case.joined(2) == []
        case.all_hold(0, 1)
        case.all_reduce(0, 1)
        assert case.outcome.missing == {2: "joined while the round was under way"}
        assert asked(case.due(2)) == [0, 1, 2]

    def test_silence_in_mid_round_is_followed_by_an_attempt_without(self) -> None:
        case = Case(3)
        case.due(0)
        case.all_hold(0, 1, 2)
        case.all_reduce(0, 1)
        actions = case.wait(LIMITS.reduce_most)
        assert settled(actions) == {2: False}
        assert asked(actions) == [0, 1]
        case.all_hold(0, 1)
        case.all_reduce(0, 1)
        assert case.outcome.committed
        assert case.outcome.missing == {2: "not done within 3600.0 s"}

    def test_the_wait_for_averages_comes_from_measured_ones(self) -> None:
        case = Case(2)
        case.due(0)
        case.all_hold(0, 1)
        case.wait(4.0)
        case.all_reduce(0, 1)
        case.due(0, 16)
        start = case.now
        assert case.all_hold(0, 1)[-1] == Wake(start + 3 * 4.0 + LIMITS.reduce_floor)

    def test_of_those_that_are_named_the_silent_one_is_left_out(self) -> None:
        """Cluster 2 hangs; 1 waits for it in a ring, and 0 for 1."""
        case = Case(3)
        case.due(0)
        case.all_hold(0, 1, 2)
        case.reduced(1, problem="nothing from cluster 2", missing=2)
        case.reduced(0, problem="nothing from cluster 1", missing=1)
        actions = case.wait(LIMITS.grace)
        assert (settled(actions), asked(actions)) == ({2: False}, [0, 1])

    def test_one_that_names_nobody_is_left_out_and_those_that_wait_for_it_stay(self) -> None:
        case = Case(3)
        case.due(0)
        case.all_hold(0, 1, 2)
        case.reduced(1, problem="node_3: out of memory")
        actions = case.wait(LIMITS.grace)
        assert (settled(actions), asked(actions)) == ({1: False}, [0, 2])
        case.all_hold(0, 2)
        case.all_reduce(0, 2)
        assert case.outcome.missing == {1: "cluster 1: node_3: out of memory"}

    def test_of_two_that_cannot_reach_each_other_one_stays(self) -> None:
        case = Case(3)
        case.due(0)
        case.all_hold(0, 1, 2)
        case.reduced(0, problem="no link", missing=1)
        case.reduced(1, problem="no link", missing=0)
        actions = case.reduced(2)
        assert (settled(actions), asked(actions)) == ({1: False}, [0, 2])

    def test_a_round_is_given_up_after_some_attempts(self) -> None:
        case = Case(5)
        case.due(0)
        members = list(range(5))
        for attempt in range(ATTEMPTS):
            assert case.round == RoundId(0, attempt)
            case.all_hold(*members)
            actions = case.lost(members.pop())
        assert settled(actions) == {0: False, 1: False}
        assert case.outcome.reason.startswith("given up after 3 attempts, the last: cluster 2 was lost")

    def test_averages_that_differ_are_never_applied(self) -> None:
        case = Case(2)
        case.due(0)
        for attempt in range(2):
            assert case.round == RoundId(0, attempt)
            case.all_hold(0, 1)
            case.reduced(0, "ab")
            actions = case.reduced(1, "cd")
        assert settled(actions) == {0: False, 1: False}
        assert "the averages of ring 0 differ: ab at cluster 0, cd at cluster 1, twice" in (
            case.outcome.reason
        )

    def test_averages_that_differ_once_are_made_again(self) -> None:
        case = Case(2)
        case.due(0)
        case.all_hold(0, 1)
        case.reduced(0, "ab")
        assert asked(case.reduced(1, "cd")) == [0, 1]
        case.all_hold(0, 1)
        assert settled(case.all_reduce(0, 1)) == {0: True, 1: True}


class TestBlocking:
    def test_a_round_opens_when_all_are_due(self) -> None:
        case = Case(3, "blocking")
        case.due(0)
        case.due(2)
        actions = case.due(1)
        assert actions[0] == SendToCluster(0, Prepare(RoundId(0), assign=True))
        assert asked(actions) == [0, 1, 2]

    def test_the_wait_for_the_last_comes_from_its_measured_interval(self) -> None:
        case = Case(3, "blocking")
        for cluster, interval in enumerate((1.0, 2.0, 4.0)):
            case.due(cluster, interval=interval)
        case.all_hold(0, 1, 2)
        case.all_reduce(0, 1, 2)
        start = case.now = 10.0
        case.due(0, 16, interval=1.0)
        assert case.wake == start + 3 * 4.0 + LIMITS.due_floor
        case.now = 11.0
        case.due(2, 16, interval=4.0)
        assert case.wake == start + 3 * 2.0 + LIMITS.due_floor
        case.now = start
        actions = case.wait(11.0)
        assert asked(actions) == [0, 2]
        case.all_hold(0, 2)
        case.all_reduce(0, 2)
        assert case.outcome.missing == {1: "not ready after 11.0 s"}

    def test_where_nothing_is_known_the_wait_is_generous(self) -> None:
        case = Case(2, "blocking")
        case.due(0, interval=1.0)
        assert case.wake == LIMITS.due_unknown
        slow = Case(2, "blocking")
        slow.due(0, interval=100.0)
        assert slow.wake == 300.0

    def test_a_late_cluster_is_in_the_next_round(self) -> None:
        case = Case(3, "blocking")
        case.due(0)
        case.due(1)
        case.wait(LIMITS.due_unknown)
        case.due(2)
        case.all_hold(0, 1)
        case.all_reduce(0, 1)
        case.due(0, 16)
        assert asked(case.due(1, 16)) == [0, 1, 2]

    def test_a_late_cluster_does_not_shorten_the_wait_for_the_others(self) -> None:
        case = Case(3, "blocking")
        for cluster in (0, 1):
            case.due(cluster, interval=10.0)
        case.wait(LIMITS.due_unknown)
        case.due(2, interval=200.0)
        case.all_hold(0, 1)
        case.wait(30.0)
        case.all_reduce(0, 1)
        assert case.wake == case.now + 3 * 10.0 + LIMITS.due_floor

    def test_a_cluster_left_alone_is_released(self) -> None:
        case = Case(2, "blocking")
        case.due(0)
        actions = case.lost(1)
        assert settled(actions) == {0: False}
        assert case.outcome.reason == "only cluster 0 is there to take part"

    def test_nobody_comes_in_time_and_the_one_that_waits_is_released(self) -> None:
        case = Case(2, "blocking")
        case.due(0)
        assert settled(case.wait(LIMITS.due_unknown)) == {0: False}
        assert case.outcome.missing == {1: "not ready after 120.0 s"}

    def test_a_loss_opens_the_round_that_waited_for_it(self) -> None:
        case = Case(3, "blocking")
        case.due(0)
        case.due(1)
        assert asked(case.lost(2)) == [0, 1]

    def test_members_stay_stopped_while_a_round_is_tried_again(self) -> None:
        case = Case(3, "blocking")
        for cluster in range(3):
            case.due(cluster)
        case.all_hold(0, 1, 2)
        assert settled(case.lost(2)) == {}
        case.all_hold(0, 1)
        assert settled(case.all_reduce(0, 1)) == {0: True, 1: True}

    def test_a_repeated_due_of_a_member_asks_for_nothing(self) -> None:
        case = Case(2, "blocking")
        case.due(0)
        case.due(1)
        case.all_hold(0, 1)
        case.due(0)
        case.all_reduce(0, 1)
        case.due(1)
        assert case.due(0) == []
        assert len(case.outcomes) == 1


class TestFinal:
    def test_it_opens_when_every_live_cluster_is_ready(self) -> None:
        case = Case(3)
        assert case.due(0, final=True) == []
        assert case.due(2, final=True) == []
        actions = case.due(1, final=True)
        assert actions == [SendToCluster(c, Prepare(RoundId(0), assign=True)) for c in range(3)]
        assert case.all_hold(0, 1, 2)[-1] == SendToCluster(
            2, Start(RoundId(0), dict.fromkeys(range(3), 1 / 3))
        )
        case.all_reduce(0, 1, 2)
        assert (case.outcome.kind, case.outcome.committed) == ("final", True)

    def test_it_waits_as_long_as_the_others_live(self) -> None:
        case = Case(2)
        case.due(0, final=True)
        assert case.wait(1e9) == []
        case.due(1, final=True)
        case.held(0)
        assert case.wait(1e9) == []
        case.held(1)
        case.reduced(0)
        assert case.wait(1e9) == []
        assert settled(case.reduced(1)) == {0: True, 1: True}

    def test_meanwhile_the_others_go_on_with_rounds(self) -> None:
        case = Case(3)
        case.due(0, final=True)
        assert asked(case.due(1)) == [1, 2]
        case.all_hold(1, 2)
        case.all_reduce(1, 2)
        assert case.outcome.missing == {0: "waits for the final round"}

    def test_the_last_that_trains_has_nobody_to_average_with(self) -> None:
        for mode in ("background", "blocking"):
            case = Case(2, mode)  # type: ignore[arg-type]
            case.due(0, final=True)
            actions = case.due(1)
            assert settled(actions) == ({1: False} if mode == "blocking" else {})
            assert asked(case.due(1, final=True)) == [0, 1]

    def test_a_member_that_is_ready_while_a_background_round_runs_finishes_it(self) -> None:
        case = Case(2)
        case.due(0)
        case.due(1, final=True)
        case.all_hold(0, 1)
        assert settled(case.all_reduce(0, 1)) == {0: True, 1: True}
        actions = case.due(0, 16, final=True)
        assert asked(actions) == [0, 1]
        assert case.round == RoundId(1)

    def test_a_loss_opens_it_for_the_rest(self) -> None:
        case = Case(3)
        case.due(0, final=True)
        case.due(1, final=True)
        assert asked(case.lost(2)) == [0, 1]

    def test_alone_at_the_end_it_is_said_and_nobody_waits(self) -> None:
        case = Case(2)
        case.due(0, final=True)
        assert settled(case.lost(1)) == {0: False}
        assert (case.outcome.kind, case.outcome.missing) == ("final", {1: "its link is gone"})

    def test_it_is_tried_for_as_long_as_two_live(self) -> None:
        case = Case(6)
        for cluster in range(6):
            case.due(cluster, final=True)
        for last in (5, 4, 3, 2):
            case.all_hold(*range(last + 1))
            case.lost(last)
        assert case.round == RoundId(0, 4)
        case.all_hold(0, 1)
        assert settled(case.all_reduce(0, 1)) == {0: True, 1: True}

    def test_a_link_that_fails_gets_another_chance_before_one_is_left_out(self) -> None:
        case = Case(3)
        for cluster in range(3):
            case.due(cluster, final=True)
        for _ in range(ATTEMPTS - 1):
            case.all_hold(0, 1, 2)
            case.reduced(0, problem="no link", missing=2)
            actions = case.wait(LIMITS.grace)
            assert (settled(actions), asked(actions)) == ({}, [0, 1, 2])
        case.all_hold(0, 1, 2)
        case.reduced(0, problem="no link", missing=2)
        actions = case.wait(LIMITS.grace)
        assert (settled(actions), asked(actions)) == ({2: False}, [0, 1])

    def test_clusters_that_train_again_average_again(self) -> None:
        case = Case(2)
        for updates in (8, 16):
            case.due(0, updates, final=True)
            case.due(1, updates, final=True)
            case.all_hold(0, 1)
            case.due(1, updates, final=True)  # repeated
            case.all_reduce(0, 1)
            assert asked(case.due(0, updates + 4)) == [0, 1]
            case.all_hold(0, 1)
            case.all_reduce(0, 1)
        assert [outcome.kind for outcome in case.outcomes] == ["final", "background"] * 2


class TestTakeover:
    def test_the_numbering_goes_on(self) -> None:
        case = Case([1, 2, 3], first_round=7)
        case.due(2)
        assert case.round == RoundId(7)
        assert case.coordinator.next_round == 8

    def test_a_root_that_knows_a_newer_round_sets_the_numbering_right(self) -> None:
        case = Case([1, 2, 3], first_round=7)
        case.due(2)
        case.held(1)
        actions = case.held(3, of=RoundId(9, 1), problem="round 9 was opened by another coordinator")
        assert asked(actions) == [1, 2, 3]
        assert case.round == RoundId(10)
        assert settled(actions) == {}
        assert "cluster 3 knows of round 9" in case.outcome.reason
        case.all_hold(1, 2, 3)
        case.all_reduce(1, 2, 3)
        assert case.outcome.committed

    def test_the_same_number_with_another_attempt_is_newer_too(self) -> None:
        case = Case([1, 2], "blocking", first_round=7)
        case.due(1)
        case.due(2)
        case.held(2, of=RoundId(7, 1))
        assert case.round == RoundId(8)

    def test_who_waits_for_the_final_round_still_does_behind_a_corrected_number(self) -> None:
        case = Case([1, 2], first_round=7)
        case.due(2)
        case.due(1, final=True)
        case.held(2, of=RoundId(9))
        case.all_hold(1, 2)
        case.all_reduce(1, 2)
        assert asked(case.due(2, 16, final=True)) == [1, 2]

    def test_no_cluster_can_keep_a_round_from_ending(self) -> None:
        case = Case([1, 2, 3])
        case.due(1)
        for number in range(5, 9):
            case.held(3, of=RoundId(number))
        assert case.round == RoundId(6)
        case.held(3, of=RoundId(2**60))
        assert case.round == RoundId(6)

    def test_a_newer_id_between_rounds_is_remembered(self) -> None:
        case = Case(2)
        assert case.held(1, of=RoundId(4)) == []
        case.due(0)
        assert case.round == RoundId(5)


class TestOddMessages:
    def test_what_is_repeated_late_or_unknown_changes_nothing(self) -> None:
        case = Case(2)
        case.due(0)
        now = RoundId(0)
        for _ in range(2):
            assert case.due(7) == []
            assert case.due(0) == []
            assert case.held(7, of=now) == []
            assert case.reduced(0, of=now) == []
            assert case.held(0, 5, of=now) == []
            assert case.lost(7) == []
            assert case.lost(0) == []  # the coordinator's own
            assert case.joined(1) == []
        assert weights(case.held(1, 5)) == {0: 0.5, 1: 0.5}
        assert case.held(1, 500) == []
        assert case.reduced(1) == []
        assert case.reduced(1, "other") == []
        assert settled(case.reduced(0)) == {0: True, 1: True}
        assert case.reduced(0) == []
        assert case.held(1) == []

    @pytest.mark.parametrize("interval", [float("nan"), float("inf"), -1.0, 1e308])
    def test_an_impossible_interval_leaves_a_deadline(self, interval: float) -> None:
        case = Case(2, "blocking")
        case.due(0, interval=interval)
        case.due(1, interval=interval)
        case.all_hold(0, 1)
        case.all_reduce(0, 1)
        case.due(0, 16)
        assert case.wake is not None
        assert case.wake <= LIMITS.due_most

    def test_negative_samples_are_none(self) -> None:
        case = Case(2)
        case.due(0)
        case.held(0, -5)
        assert weights(case.held(1, 5)) == {0: 0.0, 1: 1.0}

    def test_a_tick_too_early_is_followed_by_another_wake(self) -> None:
        case = Case(2)
        case.due(0)
        case.now = 1.0
        assert case.feed(Tick()) == [Wake(LIMITS.answer_most)]

    def test_who_names_a_stranger_or_itself_blames_itself(self) -> None:
        for named in (9, 1):
            case = Case(3)
            case.due(0)
            case.all_hold(0, 1, 2)
            case.reduced(1, problem="?", missing=named)
            assert settled(case.wait(LIMITS.grace)) == {1: False}
