"""When a cluster requests a round, and how many samples it contributes."""

from __future__ import annotations

import pytest

from ravnest.averaging.trigger import MIN_INTERVAL, RoundTrigger
from ravnest.wire.messages import RoundRequest


def train(
    trigger: RoundTrigger, updates: int, *, start: float = 0.0, gap: float = 1.0, samples: int = 32
) -> None:
    for index in range(updates):
        trigger.updated(samples, start + gap * index)


def test_due_after_reduce_factor_updates() -> None:
    trigger = RoundTrigger(1, 4)
    train(trigger, 3)
    assert not trigger.is_due
    train(trigger, 1, start=3.0)
    assert trigger.is_due
    assert trigger.request() == RoundRequest(1, 4, 128, 4.0, False)
    assert not trigger.is_due


def test_due_once_per_epoch_without_a_factor() -> None:
    trigger = RoundTrigger(0, None)
    train(trigger, 100)
    assert not trigger.is_due
    trigger.epoch_ended(100.0)
    assert trigger.is_due
    trigger.request()
    assert not trigger.is_due
    trigger.epoch_ended(150.0)
    assert not trigger.is_due, "an epoch without updates contributes nothing"


def test_the_interval_leaves_pauses_out() -> None:
    trigger = RoundTrigger(0, 10)
    assert trigger.interval == 0
    train(trigger, 5, gap=0.5)
    assert trigger.interval == pytest.approx(5.0)
    trigger.paused()
    train(trigger, 5, start=1000.0, gap=0.5)
    assert trigger.interval == pytest.approx(5.0)


def test_a_round_of_others_suffices_for_an_epoch() -> None:
    trigger = RoundTrigger(0, None)
    for number in range(8):
        trigger.updated(4, float(number))
        if number == 3:
            trigger.hold()
            trigger.settled(0, commit=True, assign=False)
    trigger.epoch_ended(8.0)
    assert not trigger.is_due, "half of the epoch is already averaged"
    for number in range(8):
        trigger.updated(4, 8.0 + number)
    trigger.epoch_ended(16.0)
    assert trigger.is_due


def test_the_interval_of_epochs() -> None:
    trigger = RoundTrigger(0, None)
    train(trigger, 5)
    trigger.epoch_ended(5.0)
    train(trigger, 5, start=6.0)
    trigger.epoch_ended(12.0)
    assert trigger.interval == 7.0


def test_an_average_subtracts_the_samples_of_the_copy() -> None:
    trigger = RoundTrigger(0, 4)
    train(trigger, 4)
    trigger.request()
    assert trigger.hold() == 128
    train(trigger, 2)  # training continues during the round
    trigger.settled(0, commit=True, assign=False)
    assert trigger.samples == 64
    assert trigger.pending is None


def test_a_failed_round_subtracts_nothing_and_is_not_requested_at_once() -> None:
    trigger = RoundTrigger(0, 4)
    train(trigger, 4)
    trigger.request()
    trigger.hold()
    trigger.settled(0, commit=False, assign=False)
    assert trigger.samples == 128
    assert not trigger.is_due
    train(trigger, 4)
    assert trigger.is_due
    assert trigger.request().samples == 256


def test_a_round_of_others_restarts_the_count() -> None:
    trigger = RoundTrigger(0, 4)
    train(trigger, 3)
    assert trigger.hold() == 96
    train(trigger, 1)
    assert not trigger.is_due
    trigger.settled(0, commit=True, assign=False)
    assert trigger.samples == 32


def test_an_unanswered_request_stays_pending() -> None:
    trigger = RoundTrigger(0, 1)
    train(trigger, 1)
    trigger.hold()
    later = trigger.request()  # for updates after the copy
    trigger.settled(0, commit=True, assign=False)
    assert trigger.pending is later


def test_a_request_for_the_final_round_outlasts_rounds_of_others() -> None:
    trigger = RoundTrigger(0, 1)
    train(trigger, 1)
    final = trigger.request(final=True)
    trigger.hold()
    trigger.settled(0, commit=True, assign=False)
    assert trigger.pending is final
    trigger.hold()
    trigger.settled(0, commit=True, assign=True)
    assert trigger.pending is None


def test_short_epochs_share_a_round() -> None:
    trigger = RoundTrigger(0, None)
    requests = []
    for epoch in range(50):
        for update in range(5):
            now = 0.2 * epoch + 0.04 * update
            trigger.updated(8, now)
            if trigger.is_due:
                requests.append(now)
                trigger.request()
        trigger.epoch_ended(0.2 * epoch + 0.2)
        if trigger.is_due:
            requests.append(0.2 * epoch + 0.2)
            trigger.request()
    assert requests[:4] == pytest.approx([2.0, 4.0, 6.0, 8.0], abs=0.1)
    assert trigger.interval == MIN_INTERVAL


def test_a_given_reduce_factor_is_kept_even_if_rounds_are_frequent() -> None:
    trigger = RoundTrigger(0, 2)
    trigger.updated(8, 0.0)
    trigger.updated(8, 0.001)
    assert trigger.is_due


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_run_that_continues_requests_rounds_at_the_same_updates(stop: int) -> None:
    def requests(trigger: RoundTrigger, updates: range) -> list[tuple[int, int]]:
        found = []
        for update in updates:
            trigger.updated(32, float(update))
            if trigger.is_due:
                request = trigger.request()
                found.append((request.updates, request.samples))
                trigger.hold()
                trigger.settled(0, commit=True, assign=False)
        return found

    whole = RoundTrigger(0, 4)
    expected = requests(whole, range(12))
    first, second = RoundTrigger(0, 4), RoundTrigger(0, 4)
    before = requests(first, range(stop))
    second.continue_from(first.updates, first.samples)
    assert before + requests(second, range(stop, 12)) == expected
    assert (second.updates, second.samples) == (whole.updates, whole.samples)
    assert first.averaged + second.averaged == whole.averaged


def test_a_cluster_that_went_back_behind_a_round_asks_for_one_at_once() -> None:
    trigger = RoundTrigger(0, 100)
    trigger.continue_from(40, 64, newest=2, after_loss=True)
    assert trigger.is_due
    assert trigger.request().samples == 64
    assert not trigger.is_due, "once"
    assert not trigger.is_behind(3), "the next round after that of the checkpoint"
    assert trigger.is_behind(4)
    trigger.hold()
    trigger.settled(4, commit=False, assign=False)
    assert trigger.is_behind(5), "that round has failed"
    trigger.hold()
    trigger.settled(5, commit=True, assign=False)
    assert (trigger.newest, trigger.samples) == (5, 0)
    assert not trigger.is_behind(9), "it has missed rounds since, and its own updates count"


def test_a_cluster_that_has_not_lost_a_node_is_not_behind() -> None:
    trigger = RoundTrigger(0, 100)
    trigger.continue_from(40, 64, newest=2)
    assert not trigger.is_due
    assert not trigger.is_behind(9)
