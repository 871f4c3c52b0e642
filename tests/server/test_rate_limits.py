"""Token buckets by key."""

from ravnest.server.rate_limits import Rate, RateLimits


def test_a_burst_is_allowed_and_then_a_rate() -> None:
    limits = RateLimits(Rate(burst=3, per_second=2.0))
    assert [limits.take("a", 0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert limits.take("b", 0.0) == 0.0, "each key has its own bucket"
    assert limits.take("a", 0.5) == 0.0
    assert limits.take("a", 0.5) == 0.5
    assert [limits.take("a", 100.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_asking_does_not_count() -> None:
    limits = RateLimits(Rate(burst=1, per_second=1.0))
    assert [limits.wait("a", 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    limits.take("a", 0.0)
    assert limits.wait("a", 0.25) == 0.75


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    limits = RateLimits(Rate(burst=1, per_second=1.0))
    limits.take("a", 10.0)
    assert limits.wait("a", 5.0) == 1.0


def test_memory_is_bounded() -> None:
    limits = RateLimits(Rate(burst=2, per_second=1.0), most_keys=100)
    for number in range(1000):
        limits.take(f"a{number}", 0.0)
    assert len(limits) <= 100
    for number in range(1000):
        limits.take(f"b{number}", float(number))
    assert len(limits) <= 100
