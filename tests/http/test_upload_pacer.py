"""Uploads beside training leave most of the connection to it; time is virtual here."""

import pytest

from ravnest.deadlines import UPLOAD_SENT
from ravnest.http.upload_pacer import LARGEST_PART, PART_SECONDS, SHARE, SMALLEST_PART, UploadPacer

MEGABIT = 125_000.0


def run(size: int, rate: float) -> tuple[float, float, UploadPacer]:
    """Upload at a rate; return the time, the longest pause and the pacer."""
    pacer, now, left, longest = UploadPacer(0.0), 0.0, size, 0.0
    while left > 0:
        count = min(pacer.part, left)
        left -= count
        now += count / rate
        pause = pacer.sent(count, count / rate, left, now)
        longest = max(longest, pause)
        now += pause
    return now, longest, pacer


def test_parts_are_short_and_leave_most_of_the_time() -> None:
    rate = 100 * MEGABIT
    now, _, pacer = run(100_000_000, rate)
    assert pacer.part / rate == pytest.approx(PART_SECONDS, rel=0.01)
    assert 100_000_000 / rate / now == pytest.approx(SHARE, rel=0.02)


def test_a_slow_connection_ends_in_time() -> None:
    now, _, _ = run(100_000_000, 5 * MEGABIT)  # 160 s without pauses
    assert now == pytest.approx(UPLOAD_SENT, rel=0.02)


def test_a_connection_that_is_too_slow_has_no_pauses_at_the_end() -> None:
    now, _, _ = run(100_000_000, 2 * MEGABIT)
    assert now == pytest.approx(400.0, rel=0.02)


def test_pauses_and_parts_have_bounds() -> None:
    pacer = UploadPacer(0.0)
    assert pacer.sent(1000, 20.0, 1000, 20.0) <= 2.0
    assert pacer.part == SMALLEST_PART
    assert pacer.sent(1 << 30, 0.0, 1, 20.0) < 0.001
    assert pacer.part == LARGEST_PART
    assert pacer.sent(1000, 1.0, 0, 21.0) == 0.0, "nothing follows"
    assert pacer.sent(0, 1.0, 0, 22.0) == 0.0
