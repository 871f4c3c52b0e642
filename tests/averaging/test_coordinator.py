"""Rules of the coordinator, each with a scripted order of events in virtual time."""

from __future__ import annotations

import pytest
from round_cases import Case, asked, decided, weights

from ravnest.averaging.coordinator import Mode
from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.events import RoundEnded, SendToCluster, Tick, Wake
from ravnest.averaging.two_phase_commit import ATTEMPTS
from ravnest.deadlines import LINK_HELLO, LINK_OUTAGE, ROUND_OUTAGES
from ravnest.wire.messages import Decision, Prepare, RoundId, Start

LIMITS = Deadlines()


class TestBackground:
    def test_one_request_opens_a_round_for_all(self) -> None:
        case = Case(3)
        assert case.request(1) == [
            *(SendToCluster(cluster, Prepare(RoundId(0), assign=False)) for cluster in range(3)),
            Wake(LIMITS.answer_most),
        ]

    def test_weights_are_shares_of_the_samples(self) -> None:
        case = Case(3)
        case.request(0)
        case.prepared(0, 60)
        case.prepared(1, 30)
        assert weights(case.prepared(2, 10)) == {0: 0.6, 1: 0.3, 2: 0.1}

    def test_a_cluster_without_samples_only_receives(self) -> None:
        case = Case(2)
        case.request(0)
        case.prepared(0, 60)
        assert weights(case.prepared(1, 0)) == {0: 1.0, 1: 0.0}

    def test_a_cluster_that_went_back_behind_the_last_average_only_receives(self) -> None:
        case = Case(3)
        case.request(0)
        case.prepared(0, 60)
        case.prepared(1, 20)
        assert weights(case.prepared(2, 40, behind=True)) == {0: 0.75, 1: 0.25, 2: 0.0}
        for cluster in range(3):
            case.reduced(cluster)
        assert "cluster 2 only received: it went back to a checkpoint" in case.outcome.describe()

    def test_clusters_that_all_went_back_average(self) -> None:
        case = Case(2)
        case.request(0)
        case.prepared(0, 60, behind=True)
        assert weights(case.prepared(1, 20, behind=True)) == {0: 0.75, 1: 0.25}

    def test_a_cluster_that_went_back_counts_in_the_final_round(self) -> None:
        """It has trained to the end since."""
        case = Case(2)
        case.request(0, final=True)
        case.request(1, final=True)
        case.prepared(0, 60)
        assert weights(case.prepared(1, 20, behind=True)) == {0: 0.75, 1: 0.25}

    def test_without_any_samples_weights_are_equal(self) -> None:
        case = Case(2)
        case.request(0)
        assert weights(case.all_prepare(0, 1, samples=0)) == {0: 0.5, 1: 0.5}

    def test_the_average_is_committed_when_all_have_it(self) -> None:
        case = Case(2)
        case.request(0)
        case.now = 0.25
        case.all_prepare(0, 1)
        assert case.reduced(0) == []
        case.now = 1.5
        actions = case.reduced(1)
        assert decided(actions) == {0: True, 1: True}
        assert isinstance(actions[-1], RoundEnded)
        outcome = case.outcome
        assert (outcome.committed, outcome.kind, outcome.round) == (True, "background", RoundId(0))
        assert (outcome.sent_bytes, outcome.seconds, outcome.digests) == (200, 1.5, {0: "same"})
        assert outcome.missing == {}

    def test_the_decision_describes_the_outcome(self) -> None:
        case = Case(2)
        case.request(0)
        case.all_prepare(0, 1)
        case.all_reduce(0, 1)
        (send, _) = case.sends[-2:]
        assert isinstance(send.head, Decision)
        assert send.head.reason == case.outcome.describe()

    def test_simultaneous_requests_open_one_round(self) -> None:
        case = Case(2)
        case.request(0)
        assert case.request(1) == []  # sent before the Prepare reached it
        case.all_prepare(0, 1)
        case.all_reduce(0, 1)
        assert len(case.outcomes) == 1
        assert asked(case.request(1, 16)) == [0, 1]

    def test_a_request_during_a_slow_round_opens_the_next(self) -> None:
        case = Case(2)
        case.request(0)
        case.all_prepare(0, 1)
        assert case.request(0, 16) == []
        actions = case.all_reduce(0, 1)
        assert asked(actions) == [0, 1]
        assert case.round == RoundId(1)

    def test_a_silent_cluster_is_left_out_after_the_deadline(self) -> None:
        case = Case(3)
        case.request(0)
        case.all_prepare(0, 1)
        actions = case.wait(LIMITS.answer_most)
        assert weights(actions) == {0: 0.5, 1: 0.5}
        assert decided(actions) == {2: False}
        case.all_reduce(0, 1)
        assert case.outcome.committed
        assert case.outcome.missing == {2: f"no reply within {LIMITS.answer_most:.1f} s"}

    def test_the_deadline_comes_from_measured_answers(self) -> None:
        case = Case(2)
        for number in range(2):
            case.request(0, 8 * (number + 1))
            case.prepared(0)
            case.wait(0.2)
            case.prepared(1)
            case.all_reduce(0, 1)
        start = case.now
        assert case.request(0, 24)[-1] == Wake(start + 3 * 0.2 + LIMITS.answer_floor)

    def test_a_cluster_that_was_too_slow_gets_more_time_next(self) -> None:
        case = Case(3)
        case.request(0)
        case.all_prepare(0, 1, 2)
        case.all_reduce(0, 1, 2)
        case.request(0, 16)
        case.all_prepare(0, 1)
        assert decided(case.wait(LIMITS.answer_floor)) == {2: False}
        case.all_reduce(0, 1)
        assert case.outcome.missing == {2: f"no reply within {LIMITS.answer_floor:.1f} s"}
        start = case.now
        assert case.request(0, 24)[-1] == Wake(start + LIMITS.answer_most)
        case.all_prepare(0, 1, 2)
        case.all_reduce(0, 1, 2)
        assert sorted(case.outcome.weights) == [0, 1, 2]

    def test_no_round_with_a_single_reply(self) -> None:
        case = Case(2)
        case.request(0)
        case.prepared(0)
        actions = case.wait(LIMITS.answer_most)
        assert decided(actions) == {0: False, 1: False}
        assert not case.outcome.committed
        assert case.outcome.reason == "only cluster 0 takes part"

    def test_a_single_cluster_trains_without_rounds(self) -> None:
        case = Case(2)
        case.lost(1)
        assert case.request(0) == []
        case.joined(1)
        assert asked(case.request(0, 16)) == [0, 1], "the other cluster is back"


class TestProblems:
    def test_a_cluster_with_nan_has_weight_zero_and_receives(self) -> None:
        case = Case(3)
        case.request(0)
        case.prepared(0, 30)
        case.prepared(1, 50, "node_3: NaN in layer.weight")
        assert weights(case.prepared(2, 10)) == {0: 0.75, 1: 0.0, 2: 0.25}
        assert decided(case.all_reduce(0, 1, 2)) == {0: True, 1: True, 2: True}
        assert case.outcome.problems == {1: "node_3: NaN in layer.weight"}

    def test_no_round_if_all_copies_are_faulty(self) -> None:
        case = Case(2)
        case.request(0)
        case.prepared(0, 5, "NaN in a")
        actions = case.prepared(1, 5, "NaN in b")
        assert decided(actions) == {0: False, 1: False}
        assert "cluster 0: NaN in a; cluster 1: NaN in b" in case.outcome.reason

    def test_valid_copies_without_samples_weigh_the_same(self) -> None:
        case = Case(3)
        case.request(0)
        case.prepared(0, 7, "NaN in a")
        case.prepared(1, 0)
        assert weights(case.prepared(2, 0)) == {0: 0.0, 1: 0.5, 2: 0.5}


class TestFailures:
    def test_a_cluster_lost_before_averaging_is_left_out(self) -> None:
        case = Case(3)
        case.request(0)
        case.all_prepare(0, 1)
        assert weights(case.lost(2)) == {0: 0.5, 1: 0.5}
        case.all_reduce(0, 1)
        assert case.outcome.round == RoundId(0)
        assert case.outcome.missing == {2: "its link is gone"}

    def test_a_cluster_lost_after_its_prepared_is_left_out(self) -> None:
        case = Case(3)
        case.request(0)
        case.all_prepare(0, 2)
        assert case.lost(2) == []
        assert weights(case.prepared(1)) == {0: 0.5, 1: 0.5}

    def test_a_cluster_lost_after_start_causes_a_retry(self) -> None:
        case = Case(3)
        case.request(0)
        case.all_prepare(0, 1, 2)
        case.reduced(0)
        actions = case.lost(2)
        assert [action for action in actions if isinstance(action, SendToCluster)] == [
            SendToCluster(0, Prepare(RoundId(0, 1), assign=False)),
            SendToCluster(1, Prepare(RoundId(0, 1), assign=False)),
        ]
        assert case.reduced(1, of=RoundId(0, 0)) == []  # belongs to the void attempt
        case.all_prepare(0, 1)
        assert decided(case.all_reduce(0, 1)) == {0: True, 1: True}
        assert case.outcome.round == RoundId(0, 1)
        assert case.outcome.sent_bytes == 300
        assert len(case.outcomes) == 1

    def test_losing_all_but_one_ends_the_round(self) -> None:
        case = Case(2)
        case.request(0)
        case.all_prepare(0, 1)
        assert decided(case.lost(1)) == {0: False}
        assert "cluster 1 was lost: its link is gone" in case.outcome.reason

    def test_the_others_average_without_a_lost_cluster(self) -> None:
        case = Case(3)
        case.lost(2)
        assert asked(case.request(0)) == [0, 1]
        case.all_prepare(0, 1)
        case.all_reduce(0, 1)
        assert case.outcome.missing == {2: "its link is gone"}

    def test_a_cluster_that_reconnects_is_in_the_next_round(self) -> None:
        case = Case(3)
        case.request(0)
        case.all_prepare(0, 1, 2)
        case.lost(2)
        case.joined(2)
        assert case.round == RoundId(0, 1)
        case.all_prepare(0, 1)
        case.all_reduce(0, 1)
        assert case.outcome.missing == {2: "its link is gone"}
        assert asked(case.request(0, 16)) == [0, 1, 2]

    def test_a_new_cluster_waits_for_the_next_round(self) -> None:
        case = Case(2)
        case.request(0)
        assert case.joined(2) == []
        case.all_prepare(0, 1)
        case.all_reduce(0, 1)
        assert case.outcome.missing == {2: "joined during the round"}
        assert asked(case.request(2)) == [0, 1, 2]

    def test_silence_after_start_causes_a_retry_without_the_silent(self) -> None:
        case = Case(3)
        case.request(0)
        case.all_prepare(0, 1, 2)
        case.all_reduce(0, 1)
        actions = case.wait(LIMITS.reduce_most)
        assert decided(actions) == {2: False}
        assert asked(actions) == [0, 1]
        case.all_prepare(0, 1)
        case.all_reduce(0, 1)
        assert case.outcome.committed
        assert case.outcome.missing == {2: "not done within 3600.0 s"}

    def test_a_slow_average_is_not_given_up_because_earlier_ones_were_fast(self) -> None:
        """Nodes report an all-reduce without progress; one with progress may take long."""
        case = Case(2)
        case.request(0)
        case.all_prepare(0, 1)
        case.wait(4.0)
        case.all_reduce(0, 1)
        case.request(0, 16)
        case.all_prepare(0, 1)
        case.reduced(0)
        assert case.wait(LIMITS.reduce_most - 1) == []
        case.reduced(1)
        assert case.outcome.committed

    def test_the_blamed_and_silent_cluster_is_left_out(self) -> None:
        """Cluster 2 hangs; 1 waits for it in a ring, and 0 for 1."""
        case = Case(3)
        case.request(0)
        case.all_prepare(0, 1, 2)
        case.reduced(1, problem="nothing from cluster 2", missing=2)
        case.reduced(0, problem="nothing from cluster 1", missing=1)
        actions = case.wait(LIMITS.grace)
        assert (decided(actions), asked(actions)) == ({2: False}, [0, 1])

    def test_a_cluster_that_blames_no_other_is_left_out(self) -> None:
        case = Case(3)
        case.request(0)
        case.all_prepare(0, 1, 2)
        case.reduced(1, problem="node_3: out of memory")
        actions = case.wait(LIMITS.grace)
        assert (decided(actions), asked(actions)) == ({1: False}, [0, 2])
        case.all_prepare(0, 2)
        case.all_reduce(0, 2)
        assert case.outcome.missing == {1: "cluster 1: node_3: out of memory"}

    def test_one_of_two_that_cannot_reach_each_other_is_left_out(self) -> None:
        case = Case(3)
        case.request(0)
        case.all_prepare(0, 1, 2)
        case.reduced(0, problem="no link", missing=1)
        case.reduced(1, problem="no link", missing=0)
        actions = case.reduced(2)
        assert (decided(actions), asked(actions)) == ({1: False}, [0, 2])

    def test_a_round_is_given_up_after_three_attempts(self) -> None:
        case = Case(5)
        case.request(0)
        members = list(range(5))
        for attempt in range(ATTEMPTS):
            assert case.round == RoundId(0, attempt)
            case.all_prepare(*members)
            actions = case.lost(members.pop())
        assert decided(actions) == {0: False, 1: False}
        assert case.outcome.reason.startswith("given up after 3 attempts, the last: cluster 2 was lost")

    def test_averages_that_differ_are_never_committed(self) -> None:
        case = Case(2)
        case.request(0)
        for attempt in range(2):
            assert case.round == RoundId(0, attempt)
            case.all_prepare(0, 1)
            case.reduced(0, "ab")
            actions = case.reduced(1, "cd")
        assert decided(actions) == {0: False, 1: False}
        assert "the averages of ring 0 differ: ab at cluster 0, cd at cluster 1, twice" in (
            case.outcome.reason
        )

    def test_averages_that_differ_once_are_retried(self) -> None:
        case = Case(2)
        case.request(0)
        case.all_prepare(0, 1)
        case.reduced(0, "ab")
        assert asked(case.reduced(1, "cd")) == [0, 1]
        case.all_prepare(0, 1)
        assert decided(case.all_reduce(0, 1)) == {0: True, 1: True}


class TestOutages:
    """A cluster whose links are in outages that they tolerate is not left out; one that is lost is."""

    @pytest.mark.parametrize("mode", ["background", "blocking"])
    def test_each_step_outlasts_outages_of_links(self, mode: Mode) -> None:
        case = Case(2, mode)
        for updates in (8, 16):  # the second round has measured times of the first
            quick = updates == 8
            pause = 0.1 if quick else ROUND_OUTAGES * (LINK_OUTAGE + LINK_HELLO)
            case.request(0, updates, interval=0.1)
            case.wait(pause if mode == "blocking" else 0.0)
            case.request(1, updates, interval=0.1)
            case.prepared(0)
            case.wait(pause)
            case.prepared(1)
            case.reduced(0)
            case.wait(pause)
            case.reduced(1)
            assert case.outcome.committed
            assert (case.outcome.missing, case.outcome.round.attempt) == ({}, 0)

    @pytest.mark.parametrize("mode", ["background", "blocking"])
    def test_a_loss_is_not_waited_for(self, mode: Mode) -> None:
        case = Case(3, mode)
        for cluster in range(3):
            case.request(cluster)
        case.all_prepare(0, 1, 2)
        case.reduced(0)
        assert asked(case.lost(2)) == [0, 1]
        case.all_prepare(0, 1)
        case.all_reduce(0, 1)
        assert case.outcome.committed
        assert case.now == 0.0


class TestBlocking:
    def test_a_round_opens_when_all_have_requested_it(self) -> None:
        case = Case(3, "blocking")
        case.request(0)
        case.request(2)
        actions = case.request(1)
        assert actions[0] == SendToCluster(0, Prepare(RoundId(0), assign=True))
        assert asked(actions) == [0, 1, 2]

    def test_the_deadline_of_the_last_request_comes_from_its_interval(self) -> None:
        case = Case(3, "blocking")
        for cluster, interval in enumerate((1.0, 2.0, 4.0)):
            case.request(cluster, interval=interval)
        case.all_prepare(0, 1, 2)
        case.all_reduce(0, 1, 2)
        start = case.now = 10.0
        case.request(0, 16, interval=1.0)
        assert case.wake == start + 3 * 4.0 + LIMITS.request_floor
        case.now = 11.0
        case.request(2, 16, interval=4.0)
        assert case.wake == start + 3 * 2.0 + LIMITS.request_floor
        case.now = start
        actions = case.wait(3 * 2.0 + LIMITS.request_floor)
        assert asked(actions) == [0, 2]
        case.all_prepare(0, 2)
        case.all_reduce(0, 2)
        assert case.outcome.missing == {1: f"not ready after {6.0 + LIMITS.request_floor:.1f} s"}

    def test_the_deadline_of_unknown_clusters_is_long(self) -> None:
        case = Case(2, "blocking")
        case.request(0, interval=1.0)
        assert case.wake == LIMITS.request_unknown
        slow = Case(2, "blocking")
        slow.request(0, interval=200.0)
        assert slow.wake == 600.0

    def test_a_late_cluster_is_in_the_next_round(self) -> None:
        case = Case(3, "blocking")
        case.request(0)
        case.request(1)
        case.wait(LIMITS.request_unknown)
        case.request(2)
        case.all_prepare(0, 1)
        case.all_reduce(0, 1)
        case.request(0, 16)
        assert asked(case.request(1, 16)) == [0, 1, 2]

    def test_a_late_cluster_does_not_shorten_the_wait_for_the_others(self) -> None:
        case = Case(3, "blocking")
        for cluster in (0, 1):
            case.request(cluster, interval=10.0)
        case.wait(LIMITS.request_unknown)
        case.request(2, interval=200.0)
        case.all_prepare(0, 1)
        case.wait(30.0)
        case.all_reduce(0, 1)
        assert case.wake == case.now + 3 * 10.0 + LIMITS.request_floor

    def test_a_cluster_left_alone_is_released(self) -> None:
        case = Case(2, "blocking")
        case.request(0)
        actions = case.lost(1)
        assert decided(actions) == {0: False}
        assert case.outcome.reason == "only cluster 0 takes part"

    def test_a_cluster_that_waits_alone_is_released(self) -> None:
        case = Case(2, "blocking")
        case.request(0)
        assert decided(case.wait(LIMITS.request_unknown)) == {0: False}
        assert case.outcome.missing == {1: f"not ready after {LIMITS.request_unknown:.1f} s"}

    def test_a_loss_opens_the_round_that_waited_for_it(self) -> None:
        case = Case(3, "blocking")
        case.request(0)
        case.request(1)
        assert asked(case.lost(2)) == [0, 1]

    def test_members_stay_paused_during_a_retry(self) -> None:
        case = Case(3, "blocking")
        for cluster in range(3):
            case.request(cluster)
        case.all_prepare(0, 1, 2)
        assert decided(case.lost(2)) == {}
        case.all_prepare(0, 1)
        assert decided(case.all_reduce(0, 1)) == {0: True, 1: True}

    def test_a_repeated_request_of_a_member_is_ignored(self) -> None:
        case = Case(2, "blocking")
        case.request(0)
        case.request(1)
        case.all_prepare(0, 1)
        case.request(0)
        case.all_reduce(0, 1)
        case.request(1)
        assert case.request(0) == []
        assert len(case.outcomes) == 1


class TestFinal:
    def test_it_opens_when_every_live_cluster_is_ready(self) -> None:
        case = Case(3)
        assert case.request(0, final=True) == []
        assert case.request(2, final=True) == []
        actions = case.request(1, final=True)
        prepares = [SendToCluster(c, Prepare(RoundId(0), assign=True)) for c in range(3)]
        assert actions == [*prepares, Wake(LIMITS.final_answer)]
        assert SendToCluster(2, Start(RoundId(0), dict.fromkeys(range(3), 1 / 3))) in case.all_prepare(
            0, 1, 2
        )
        case.all_reduce(0, 1, 2)
        assert (case.outcome.kind, case.outcome.committed) == ("final", True)

    def test_it_opens_as_late_as_the_others_train(self) -> None:
        case = Case(2)
        case.request(0, final=True)
        assert case.wait(1e9) == []
        assert asked(case.request(1, final=True)) == [0, 1]

    def test_a_cluster_that_does_not_reply_is_left_out_after_the_deadline(self) -> None:
        case = Case(3)
        for cluster in range(3):
            case.request(cluster, final=True)
        case.all_prepare(0, 1)
        assert case.wait(LIMITS.final_answer - 1) == []
        assert weights(case.wait(1)) == {0: 0.5, 1: 0.5}
        assert decided(case.all_reduce(0, 1)) == {0: True, 1: True}
        assert case.outcome.missing == {2: f"no reply within {LIMITS.final_answer:.1f} s"}

    def test_two_clusters_end_without_it_if_one_does_not_reply(self) -> None:
        case = Case(2)
        case.request(0, final=True)
        case.request(1, final=True)
        case.prepared(0)
        assert decided(case.wait(LIMITS.final_answer)) == {0: False, 1: False}
        assert (case.outcome.kind, case.outcome.committed) == ("final", False)
        assert "only cluster 0 takes part" in case.outcome.reason

    def test_its_deadline_follows_from_measured_times(self) -> None:
        case = Case(2)
        case.request(0)
        case.now = 250.0
        case.all_prepare(0, 1)
        case.all_reduce(0, 1)
        for cluster in range(2):
            case.request(cluster, 16, final=True)
        assert case.wake == case.now + 3 * 250
        case.all_prepare(0, 1)
        assert case.wake == case.now + LIMITS.reduce_most

    def test_it_is_given_up_as_a_whole_after_its_longest_duration(self) -> None:
        case = Case(3)
        for cluster in range(3):
            case.request(cluster, final=True)
        while not case.outcomes:  # an average that never arrives, and clusters that always reply
            case.all_prepare(0, 1, 2)
            case.reduced(0)
            case.wait(LIMITS.reduce_most)
        assert case.now <= LIMITS.final_most + LIMITS.reduce_most
        assert not case.outcome.committed

    def test_the_others_continue_with_rounds_until_then(self) -> None:
        case = Case(3)
        case.request(0, final=True)
        assert asked(case.request(1)) == [1, 2]
        case.all_prepare(1, 2)
        case.all_reduce(1, 2)
        assert case.outcome.missing == {0: "waits for the final round"}

    def test_the_last_cluster_that_trains_averages_with_none(self) -> None:
        for mode in ("background", "blocking"):
            case = Case(2, mode)  # type: ignore[arg-type]
            case.request(0, final=True)
            actions = case.request(1)
            assert decided(actions) == ({1: False} if mode == "blocking" else {})
            assert asked(case.request(1, final=True)) == [0, 1]

    def test_a_member_that_finishes_training_completes_the_open_round(self) -> None:
        case = Case(2)
        case.request(0)
        case.request(1, final=True)
        case.all_prepare(0, 1)
        assert decided(case.all_reduce(0, 1)) == {0: True, 1: True}
        actions = case.request(0, 16, final=True)
        assert asked(actions) == [0, 1]
        assert case.round == RoundId(1)

    def test_a_loss_opens_it_for_the_rest(self) -> None:
        case = Case(3)
        case.request(0, final=True)
        case.request(1, final=True)
        assert asked(case.lost(2)) == [0, 1]

    def test_the_last_live_cluster_does_not_wait(self) -> None:
        case = Case(2)
        case.request(0, final=True)
        assert decided(case.lost(1)) == {0: False}
        assert (case.outcome.kind, case.outcome.missing) == ("final", {1: "its link is gone"})

    def test_it_is_retried_while_two_clusters_live(self) -> None:
        case = Case(6)
        for cluster in range(6):
            case.request(cluster, final=True)
        for last in (5, 4, 3, 2):
            case.all_prepare(*range(last + 1))
            case.lost(last)
        assert case.round == RoundId(0, 4)
        case.all_prepare(0, 1)
        assert decided(case.all_reduce(0, 1)) == {0: True, 1: True}

    def test_it_retries_with_all_before_one_is_left_out(self) -> None:
        case = Case(3)
        for cluster in range(3):
            case.request(cluster, final=True)
        for _ in range(ATTEMPTS - 1):
            case.all_prepare(0, 1, 2)
            case.reduced(0, problem="no link", missing=2)
            actions = case.wait(LIMITS.grace)
            assert (decided(actions), asked(actions)) == ({}, [0, 1, 2])
        case.all_prepare(0, 1, 2)
        case.reduced(0, problem="no link", missing=2)
        actions = case.wait(LIMITS.grace)
        assert (decided(actions), asked(actions)) == ({2: False}, [0, 1])

    def test_clusters_that_train_again_average_again(self) -> None:
        case = Case(2)
        for updates in (8, 16):
            case.request(0, updates, final=True)
            case.request(1, updates, final=True)
            case.all_prepare(0, 1)
            case.request(1, updates, final=True)  # repeated
            case.all_reduce(0, 1)
            assert asked(case.request(0, updates + 4)) == [0, 1]
            case.all_prepare(0, 1)
            case.all_reduce(0, 1)
        assert [outcome.kind for outcome in case.outcomes] == ["final", "background"] * 2


class TestTakeover:
    def test_round_numbers_continue(self) -> None:
        case = Case([1, 2, 3], first_round=7)
        case.request(2)
        assert case.round == RoundId(7)
        assert case.coordinator.next_round == 8

    def test_a_root_that_knows_a_newer_round_corrects_the_number(self) -> None:
        case = Case([1, 2, 3], first_round=7)
        case.request(2)
        case.prepared(1)
        actions = case.prepared(3, of=RoundId(9, 1), problem="round 9 was opened by another coordinator")
        assert asked(actions) == [1, 2, 3]
        assert case.round == RoundId(10)
        assert decided(actions) == {}
        assert "cluster 3 already knows round 9" in case.outcome.reason
        case.all_prepare(1, 2, 3)
        case.all_reduce(1, 2, 3)
        assert case.outcome.committed

    def test_the_same_number_with_another_attempt_is_newer_too(self) -> None:
        case = Case([1, 2], "blocking", first_round=7)
        case.request(1)
        case.request(2)
        case.prepared(2, of=RoundId(7, 1))
        assert case.round == RoundId(8)

    def test_a_corrected_number_keeps_the_wait_for_the_final_round(self) -> None:
        case = Case([1, 2], first_round=7)
        case.request(2)
        case.request(1, final=True)
        case.prepared(2, of=RoundId(9))
        case.all_prepare(1, 2)
        case.all_reduce(1, 2)
        assert asked(case.request(2, 16, final=True)) == [1, 2]

    def test_a_cluster_corrects_the_number_of_a_round_once(self) -> None:
        case = Case([1, 2, 3])
        case.request(1)
        for number in range(5, 9):
            case.prepared(3, of=RoundId(number))
        assert case.round == RoundId(6)
        case.prepared(3, of=RoundId(2**60))
        assert case.round == RoundId(6)

    def test_a_newer_id_between_rounds_is_remembered(self) -> None:
        case = Case(2)
        assert case.prepared(1, of=RoundId(4)) == []
        case.request(0)
        assert case.round == RoundId(5)


class TestOddMessages:
    def test_repeated_late_and_unknown_messages_are_ignored(self) -> None:
        case = Case(2)
        case.request(0)
        now = RoundId(0)
        for _ in range(2):
            assert case.request(7) == []
            assert case.request(0) == []
            assert case.prepared(7, of=now) == []
            assert case.reduced(0, of=now) == []
            assert case.prepared(0, 5, of=now) == []
            assert case.lost(7) == []
            assert case.lost(0) == []  # the cluster of the coordinator
            assert case.joined(1) == []
        assert weights(case.prepared(1, 5)) == {0: 0.5, 1: 0.5}
        assert case.prepared(1, 500) == []
        assert case.reduced(1) == []
        assert case.reduced(1, "other") == []
        assert decided(case.reduced(0)) == {0: True, 1: True}
        assert case.reduced(0) == []
        assert case.prepared(1) == []

    @pytest.mark.parametrize("interval", [float("nan"), float("inf"), -1.0, 1e308])
    def test_an_impossible_interval_leaves_a_deadline(self, interval: float) -> None:
        case = Case(2, "blocking")
        case.request(0, interval=interval)
        case.request(1, interval=interval)
        case.all_prepare(0, 1)
        case.all_reduce(0, 1)
        case.request(0, 16)
        assert case.wake is not None
        assert case.wake <= LIMITS.request_most

    def test_negative_samples_count_as_zero(self) -> None:
        case = Case(2)
        case.request(0)
        case.prepared(0, -5)
        assert weights(case.prepared(1, 5)) == {0: 0.0, 1: 1.0}

    def test_a_tick_too_early_is_followed_by_another_wake(self) -> None:
        case = Case(2)
        case.request(0)
        case.now = 1.0
        assert case.feed(Tick()) == [Wake(LIMITS.answer_most)]

    def test_blame_of_an_unknown_cluster_counts_against_the_sender(self) -> None:
        for named in (9, 1):
            case = Case(3)
            case.request(0)
            case.all_prepare(0, 1, 2)
            case.reduced(1, problem="?", missing=named)
            assert decided(case.wait(LIMITS.grace)) == {1: False}
