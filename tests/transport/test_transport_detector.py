"""Suspicion of silent connections, and the size of what is sent at once, with given times."""

import pytest

from ravnest.deadlines import LINK_HEARTBEAT
from ravnest.transport.chunk_size import SMALLEST_BYTES, ChunkSize
from ravnest.transport.failure_detector import SUSPICIOUS, FailureDetector
from ravnest.wire.frames import CHUNK_BYTES


def silence_until_suspicion(detector: FailureDetector, now: float) -> float:
    """Look at the clock twice per heartbeat, as the heartbeat thread does."""
    begin = now
    while not detector.suspects(now):
        now += LINK_HEARTBEAT / 2
        assert now < begin + 1000
    return now - begin


def arrivals(detector: FailureDetector, interval: float, count: int = 40) -> float:
    now = 0.0
    for _ in range(count):
        for step in range(int(interval / LINK_HEARTBEAT) + 1):
            detector.suspicion(now + step * LINK_HEARTBEAT)
        now += interval
        detector.arrived(now)
    return now


@pytest.mark.parametrize("interval", [0.001, 0.01, 1.0])
def test_a_peer_that_stops_is_suspected_after_some_seconds(interval: float) -> None:
    detector = FailureDetector()
    assert 4 <= silence_until_suspicion(detector, arrivals(detector, interval)) <= 9


def test_a_slow_link_is_given_more_time() -> None:
    detector = FailureDetector()
    now = arrivals(detector, 6.0)
    assert detector.suspicion(now + 5.0) < SUSPICIOUS
    assert silence_until_suspicion(detector, now) > 9


def test_a_wrong_suspicion_makes_the_detector_more_patient() -> None:
    detector = FailureDetector()
    now = arrivals(detector, 1.0, 3)
    first = silence_until_suspicion(detector, now)
    detector.restarted()
    assert silence_until_suspicion(detector, now + first) > first


def test_a_process_that_was_stopped_does_not_suspect_its_peers() -> None:
    detector = FailureDetector()
    now = arrivals(detector, 1.0)
    assert not detector.suspects(now + 3600.0)
    assert not detector.suspects(now - 3600.0)


def test_suspicion_grows_with_silence() -> None:
    detector = FailureDetector()
    detector.arrived(0.0)
    found = [detector.suspicion(float(second)) for second in range(60)]
    assert found == sorted(found)
    assert found[0] < 1


def test_chunks_grow_on_a_fast_network_and_shrink_on_a_slow_one() -> None:
    size = ChunkSize()
    for _ in range(40):
        size.sent(size.bytes, 0.001)
    assert size.bytes == CHUNK_BYTES
    for _ in range(10):
        size.sent(size.bytes, size.bytes / 125_000)
    assert SMALLEST_BYTES <= size.bytes <= 125_000 / 2


def test_small_batches_say_nothing_about_the_rate() -> None:
    size = ChunkSize()
    first = size.bytes
    for _ in range(40):
        size.sent(100, 0.001)
    assert size.bytes == first
