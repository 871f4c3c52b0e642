"""When a cluster is due, and what it brings."""

from __future__ import annotations

import pytest

from ravnest.averaging.trigger import SHORTEST, RoundTrigger
from ravnest.wire.messages import RoundRequest


def train(
    pace: RoundTrigger, updates: int, *, start: float = 0.0, gap: float = 1.0, samples: int = 32
) -> None:
    for index in range(updates):
        pace.updated(samples, start + gap * index)


def test_due_after_reduce_factor_updates() -> None:
    pace = RoundTrigger(1, 4)
    train(pace, 3)
    assert not pace.is_due
    train(pace, 1, start=3.0)
    assert pace.is_due
    assert pace.ask() == RoundRequest(1, 4, 128, 4.0, False)
    assert not pace.is_due


def test_due_once_an_epoch_without_a_factor() -> None:
    pace = RoundTrigger(0, None)
    train(pace, 100)
    assert not pace.is_due
    pace.epoch_ended(100.0)
    assert pace.is_due
    pace.ask()
    assert not pace.is_due
    pace.epoch_ended(150.0)
    assert not pace.is_due, "an epoch without updates brings nothing"


def test_the_interval_is_that_of_training() -> None:
    pace = RoundTrigger(0, 10)
    assert pace.interval == 0
    train(pace, 5, gap=0.5)
    assert pace.interval == pytest.approx(5.0)
    pace.paused()
    train(pace, 5, start=1000.0, gap=0.5)
    assert pace.interval == pytest.approx(5.0)


def test_a_round_that_others_asked_for_is_enough_for_an_epoch() -> None:
    pace = RoundTrigger(0, None)
    for number in range(8):
        pace.updated(4, float(number))
        if number == 3:
            pace.hold()
            pace.settled(commit=True, assign=False)
    pace.epoch_ended(8.0)
    assert not pace.is_due, "half of the epoch is averaged already"
    for number in range(8):
        pace.updated(4, 8.0 + number)
    pace.epoch_ended(16.0)
    assert pace.is_due


def test_the_interval_of_epochs() -> None:
    pace = RoundTrigger(0, None)
    train(pace, 5)
    pace.epoch_ended(5.0)
    train(pace, 5, start=6.0)
    pace.epoch_ended(12.0)
    assert pace.interval == 7.0


def test_an_average_takes_away_the_samples_that_were_held() -> None:
    pace = RoundTrigger(0, 4)
    train(pace, 4)
    pace.ask()
    assert pace.hold() == 128
    train(pace, 2)  # training goes on meanwhile
    pace.settled(commit=True, assign=False)
    assert pace.samples == 64
    assert pace.pending is None


def test_a_round_that_failed_takes_nothing_and_is_not_asked_for_at_once() -> None:
    pace = RoundTrigger(0, 4)
    train(pace, 4)
    pace.ask()
    pace.hold()
    pace.settled(commit=False, assign=False)
    assert pace.samples == 128
    assert not pace.is_due
    train(pace, 4)
    assert pace.is_due
    assert pace.ask().samples == 256


def test_a_round_that_others_asked_for_counts_as_one() -> None:
    pace = RoundTrigger(0, 4)
    train(pace, 3)
    assert pace.hold() == 96
    train(pace, 1)
    assert not pace.is_due
    pace.settled(commit=True, assign=False)
    assert pace.samples == 32


def test_what_is_not_answered_stays_pending() -> None:
    pace = RoundTrigger(0, 1)
    train(pace, 1)
    pace.hold()
    later = pace.ask()  # for what comes after the copy
    pace.settled(commit=True, assign=False)
    assert pace.pending is later


def test_a_wait_for_the_final_round_outlasts_rounds_of_others() -> None:
    pace = RoundTrigger(0, 1)
    train(pace, 1)
    final = pace.ask(final=True)
    pace.hold()
    pace.settled(commit=True, assign=False)
    assert pace.pending is final
    pace.hold()
    pace.settled(commit=True, assign=True)
    assert pace.pending is None


def test_epochs_shorter_than_a_round_is_worth_share_one() -> None:
    pace = RoundTrigger(0, None)
    asked = []
    for epoch in range(50):
        for update in range(5):
            now = 0.2 * epoch + 0.04 * update
            pace.updated(8, now)
            if pace.is_due:
                asked.append(now)
                pace.ask()
        pace.epoch_ended(0.2 * epoch + 0.2)
        if pace.is_due:
            asked.append(0.2 * epoch + 0.2)
            pace.ask()
    assert asked[:4] == pytest.approx([2.0, 4.0, 6.0, 8.0], abs=0.1)
    assert pace.interval == SHORTEST


def test_a_number_of_updates_that_the_user_gave_is_kept_however_short() -> None:
    pace = RoundTrigger(0, 2)
    pace.updated(8, 0.0)
    pace.updated(8, 0.001)
    assert pace.is_due
