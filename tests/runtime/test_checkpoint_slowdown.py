"""Cost of checkpoints that the Root sees: updates that take longer while one is being stored."""

import random

import pytest

from ravnest.runtime.control.checkpoint_policy import CheckpointPolicy
from ravnest.runtime.control.checkpoint_slowdown import CheckpointSlowdown


def seconds_of(quiet: list[float], storing: list[float]) -> float:
    """Return the cost of a checkpoint beside which updates took the times ``storing``."""
    slowdown, now = CheckpointSlowdown(), 0.0
    slowdown.update(now, storing=False)
    for took in quiet:
        now += took
        slowdown.update(now, storing=False)
    for took in storing:
        now += took
        slowdown.update(now, storing=True)
    slowdown.update(now + 1.0, storing=False)
    return slowdown.seconds


def test_longer_updates_are_the_cost() -> None:
    assert seconds_of([1.0] * 20, [1.0, 4.0, 2.0]) == pytest.approx(4.0)
    assert seconds_of([1.0] * 20, [1.0] * 5) == 0.0
    assert seconds_of([1.0] * 20, [0.5] * 5) == 0.0


def test_noise_is_no_cost() -> None:
    dice = random.Random(0)
    times = [dice.uniform(0.5, 1.5) for _ in range(100)]
    costs = [seconds_of(times, [dice.uniform(0.5, 1.5) for _ in range(25)]) for _ in range(40)]
    assert max(costs) < 25 * 0.3
    assert sum(cost == 0.0 for cost in costs) > 30


def test_few_updates_tell_nothing() -> None:
    assert seconds_of([1.0] * 3, [9.0] * 5) == 0.0


def test_a_validation_is_no_cost() -> None:
    slowdown = CheckpointSlowdown()
    for now in range(20):
        slowdown.update(float(now), storing=False)
    slowdown.update(20.0, storing=True)
    slowdown.interrupt()
    slowdown.update(500.0, storing=True)
    slowdown.update(501.0, storing=False)
    assert slowdown.seconds == 0.0


@pytest.mark.parametrize("replica", [0.0, 5.0, 40.0])
@pytest.mark.parametrize("slower", [1.1, 1.5, 3.0])
def test_checkpoints_take_at_most_two_percent_of_a_long_training(replica: float, slower: float) -> None:
    """Updates of a second take ``slower`` times as long for ``replica`` seconds after a checkpoint."""
    policy = CheckpointPolicy(None, 60.0, 0, 0.0)
    now, lost, ends = 0.0, 0.0, None
    for update in range(1, 40_000):
        took = slower if ends is not None else 1.0
        now += took
        lost += took - 1.0
        if ends is not None and now >= ends:
            policy.settled, ends = policy.taken, None
        if policy.due_after_update(update, now):
            ends = now + replica
    assert policy.taken > 5
    assert lost < 0.02 * now
