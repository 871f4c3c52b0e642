"""Replicas use what training leaves of a link; time is virtual here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from ravnest.deadlines import REPLICA_SENT
from ravnest.runtime.control.replica_pacer import (
    LOOK_SECONDS,
    PIECE_SECONDS,
    SMALLEST_PIECE,
    ReplicaPacer,
    best_patience,
)
from ravnest.runtime.control.state_blocks import BLOCK

MEGABIT = 125_000.0
"""Bytes per second of a link with 1 Mbit/s."""


def begun(size: int) -> ReplicaPacer:
    """Return a pacer with a replica of this size at the time 0."""
    pacer = ReplicaPacer()
    pacer.begin(size, 0.0)
    return pacer


def settled(rate: float, round_trip: float = 0.0) -> tuple[ReplicaPacer, float]:
    """Return a pacer that knows the rate of its link, and the time."""
    pacer, now = begun(100_000_000), 0.0
    for _ in range(8):
        count = pacer.piece(now)
        now += round_trip + count / rate
        pacer.arrived(count, round_trip + count / rate, round_trip, now, disturbed=False)
    pacer.begin(100_000_000, now)
    return pacer, now


def test_a_piece_occupies_a_link_for_a_short_time() -> None:
    for megabits in (20, 100, 500):
        rate = megabits * MEGABIT
        pacer, now = settled(rate)
        assert pacer.piece(now) / rate == pytest.approx(PIECE_SECONDS, rel=0.01)


def test_a_round_trip_is_no_time_of_the_link() -> None:
    rate = 100 * MEGABIT
    pacer, now = settled(rate, round_trip=0.05)
    assert pacer.piece(now) / rate == pytest.approx(PIECE_SECONDS, rel=0.01)


def test_pieces_have_bounds() -> None:
    pacer, now = settled(MEGABIT)
    assert pacer.piece(now) == SMALLEST_PIECE
    pacer, now = settled(100_000 * MEGABIT)
    assert pacer.piece(now) == BLOCK


def test_a_link_that_is_quiet_for_long_gets_larger_pieces_without_pauses() -> None:
    rate = 100 * MEGABIT
    pacer, now = settled(rate)
    assert pacer.pause(now + PIECE_SECONDS) == 0.0
    assert pacer.piece(now + 2.0) == BLOCK
    sent, began = 0, now
    now += PIECE_SECONDS
    while sent < 50 << 20:
        assert pacer.pause(now) == 0.0
        count = pacer.piece(now)
        now += count / rate
        sent += count
        pacer.arrived(count, count / rate, 0.0, now, disturbed=False)
    assert sent / (now - began) > 0.99 * rate


def test_pieces_begin_when_a_gap_has_outlasted_the_short_ones() -> None:
    short = [0.02] * 15
    assert best_patience([*short, 0.2], needed=0.1) == 0.02
    assert best_patience([*short, 0.2, 0.19], needed=0.1) == 0.02
    assert best_patience([0.02] * 8, needed=0.1) == 0.0, "gaps of one length are used from the beginning"


def test_short_gaps_are_used_if_the_long_ones_do_not_suffice() -> None:
    gaps = [0.02] * 15 + [0.2]
    assert best_patience(gaps, needed=0.3) == 0.0
    assert best_patience(gaps, needed=9.0) == 0.0
    assert best_patience([0.0] * 8, needed=0.1) == 0.0


def test_a_pacer_learns_the_gaps_of_training() -> None:
    pacer, now = settled(100 * MEGABIT)
    for gap in (*[0.02] * 15, 0.5) * 2:
        now += gap
        pacer.training_sent(125_000, now)
        now += 0.01
    pacer.arrived(1000, 0.001, 0.0, now, disturbed=True)
    assert pacer.pause(now) == pytest.approx(0.02)


def test_a_message_of_training_waits_for_half_a_piece() -> None:
    pacer, now = settled(100 * MEGABIT)
    pacer.arrived(pacer.piece(now), PIECE_SECONDS, 0.0, now + PIECE_SECONDS, disturbed=True)
    assert pacer.delayed == pytest.approx(PIECE_SECONDS / 2, rel=0.01)


def test_a_slow_arrival_shows_that_others_use_the_path() -> None:
    pacer, now = settled(100 * MEGABIT)
    assert pacer.pause(now + PIECE_SECONDS) == 0.0
    later = now + 5 * PIECE_SECONDS
    pacer.arrived(pacer.piece(now), later - now, 0.0, later, disturbed=False)
    assert pacer.pause(later) == pytest.approx(PIECE_SECONDS, rel=0.01), "the gap is over"
    assert pacer.delayed > 0.0


def test_a_link_that_is_never_quiet_carries_a_small_share() -> None:
    pacer, now = settled(100 * MEGABIT)
    pacer.training_sent(10_000_000, now)
    assert pacer.pause(now) == pytest.approx(24 * PIECE_SECONDS, rel=0.01)
    assert pacer.pause(now + 24 * PIECE_SECONDS) == pytest.approx(0.0, abs=1e-9)
    assert pacer.piece(now + 24 * PIECE_SECONDS) < 0.011 * 100 * MEGABIT


def test_a_replica_ends_in_time_on_a_link_that_is_never_quiet() -> None:
    rate, size = 5 * MEGABIT, 100_000_000  # 160 s of the link
    pacer, now, left = begun(size), 0.0, size
    while left > 0:
        pacer.training_sent(10_000_000, now)
        now += pacer.pause(now)
        count = min(pacer.piece(now), left)
        left -= count
        now += count / rate
        pacer.arrived(count, count / rate, 0.0, now, disturbed=True)
    assert now < 1.02 * REPLICA_SENT


def test_an_outage_does_not_change_the_size_of_pieces() -> None:
    pacer, now = settled(100 * MEGABIT)
    before, delayed = pacer.piece(now), pacer.delayed
    pacer.arrived(before, 50.0, 0.0, now + 50.0, disturbed=False)
    assert pacer.piece(now + 50.0) == before
    assert pacer.delayed - delayed < PIECE_SECONDS


@dataclass
class Pipeline:
    """Stage in the middle of a pipeline: what it sends in an update, on one link, in virtual time.

    Each update has messages with short gaps and a longer gap, in which other stages compute. An update
    ends as much later as its messages had to wait.
    """

    rate: float
    message: float
    """Seconds of a message on the link."""
    gaps: tuple[float, ...]
    """Seconds between the end of a message and the next one."""
    waited: float = 0.0
    free_at: float = 0.0
    next_send: float = 0.0
    queued: int = 0
    pacer: ReplicaPacer = field(default_factory=ReplicaPacer)
    _number: int = field(default=0)

    def run_until(self, time: float) -> None:
        """Send what training sends until this time."""
        while self.next_send <= time:
            begins = max(self.next_send, self.free_at)
            self.waited += begins - self.next_send
            self.free_at = begins + self.message
            self.next_send = self.free_at + self.gaps[self._number % len(self.gaps)]
            self._number += 1
            self.queued += 1

    def carry(self, size: int, now: float) -> float:
        """Send a replica and return the time at which it has arrived."""
        pacer, left, seen = self.pacer, size, self.queued
        pacer.begin(size, now)
        while left > 0:
            seen = self._look(seen, now)
            if (pause := pacer.pause(now)) > 0:
                now += min(pause, LOOK_SECONDS)
                continue
            count = min(pacer.piece(now), left)
            began, now = now, max(now, self.free_at) + count / self.rate
            left -= count
            self.free_at = now
            before, seen = seen, self._look(seen, now)
            pacer.arrived(count, now - began, 0.0, now, disturbed=seen != before)
        return now

    def _look(self, seen: int, now: float) -> int:
        """Tell the pacer what training has sent; return the number of its messages."""
        self.run_until(now)
        if self.queued != seen:
            sent = (self.queued - seen) * self.message * self.rate
            self.pacer.training_sent(int(sent), now)
        return self.queued


def test_a_replica_beside_training_costs_little() -> None:
    """A 6-layer MLP at 100 Mbit/s: 16 messages of 42 ms per update, and a replica of 100 MB a minute."""
    gaps = (0.012, 0.02, 0.008, 0.015) * 4
    pipeline = Pipeline(100 * MEGABIT, 0.042, (*gaps[:-1], 0.2))
    taken = pipeline.carry(100_000_000, 0.0)
    assert taken < 60.0
    assert pipeline.waited < 0.015 * 60.0
    assert 0.5 * pipeline.waited < pipeline.pacer.delayed < 3 * pipeline.waited


def test_the_cost_of_a_replica_on_a_saturated_link_counts() -> None:
    pipeline = Pipeline(100 * MEGABIT, 0.042, (0.0,))
    taken = pipeline.carry(20_000_000, 0.0)  # 1.6 s of the link
    assert taken < REPLICA_SENT
    assert pipeline.waited < 0.04 * taken
    assert pipeline.pacer.delayed > 0.5 * pipeline.waited
