"""Repeated measurements: a busy minute at joining does not decide, and work is not disturbed."""

import pytest

from ravnest.provider.agent import Agent
from ravnest.provider.events import (
    Action,
    Announce,
    DeadlinePassed,
    HeartbeatAnswered,
    InterruptReceived,
    MeasureSpeed,
    OfferAccepted,
    SendHeartbeat,
    SpeedMeasured,
    UpdateOffer,
)
from ravnest.provider.speed_check import FIRST_CHECK, NEXT_CHECKS, SpeedCheck
from ravnest.schemas.providers import HeartbeatReply

TICK = DeadlinePassed()


def measured(check: SpeedCheck, rate: float | None, now: float) -> list[Action]:
    assert check.handle(TICK, now, is_idle=True) == [MeasureSpeed()]
    assert check.deadline is None
    return check.handle(SpeedMeasured(rate), now + 1, is_idle=True)


def test_a_busy_minute_at_joining_does_not_decide() -> None:
    check = SpeedCheck(5.0, now=0.0)
    assert check.deadline == FIRST_CHECK
    assert check.handle(TICK, FIRST_CHECK - 1, is_idle=True) == []
    line, update = measured(check, 50.0, FIRST_CHECK)
    assert line == Announce("measured again: 50 GFLOP/s, not 5; the server plans with that")
    assert update == UpdateOffer(50.0)
    assert check.deadline == FIRST_CHECK + NEXT_CHECKS


def test_a_busy_minute_later_does_not_decide_either() -> None:
    check, now = SpeedCheck(50.0, now=0.0), FIRST_CHECK
    for rate in (52.0, 5.0, 51.0, 50.0, 4.0, 49.0):
        assert measured(check, rate, now) == []
        now += NEXT_CHECKS


def test_a_machine_that_stays_slower_is_offered_as_it_is() -> None:
    check = SpeedCheck(50.0, now=0.0)
    assert measured(check, 20.0, FIRST_CHECK) == []
    later = FIRST_CHECK + NEXT_CHECKS
    assert measured(check, 21.0, later)[-1] == UpdateOffer(21.0)


def test_no_measurement_while_the_provider_works() -> None:
    check = SpeedCheck(50.0, now=0.0)
    assert check.handle(TICK, FIRST_CHECK, is_idle=False) == []
    assert check.deadline == FIRST_CHECK + NEXT_CHECKS
    assert check.handle(TICK, FIRST_CHECK + NEXT_CHECKS, is_idle=True) == [MeasureSpeed()]
    assert check.handle(SpeedMeasured(5.0), 0.0, is_idle=False) == []  # work began meanwhile


def test_a_measurement_that_fails_is_repeated_later() -> None:
    check = SpeedCheck(50.0, now=0.0)
    assert measured(check, None, FIRST_CHECK) == []
    assert check.deadline == FIRST_CHECK + NEXT_CHECKS


@pytest.mark.parametrize("is_idle", [True, False])
def test_the_agent_measures_while_it_is_idle(is_idle: bool) -> None:
    agent = Agent(speed=SpeedCheck(5.0, now=0.0))
    (poll,) = agent.handle(OfferAccepted(), 0.0)
    assert isinstance(poll, SendHeartbeat)
    assignment = None if is_idle else "job-1-node-0"
    agent.handle(HeartbeatAnswered(poll.number, HeartbeatReply(assignment=assignment)), 1.0)
    assert (MeasureSpeed() in agent.handle(TICK, FIRST_CHECK)) == is_idle
    assert (UpdateOffer(50.0) in agent.handle(SpeedMeasured(50.0), FIRST_CHECK + 1)) == is_idle


def test_an_agent_that_leaves_does_not_measure() -> None:
    agent = Agent(speed=SpeedCheck(5.0, now=0.0))
    agent.handle(OfferAccepted(), 0.0)
    agent.handle(InterruptReceived(), 1.0)
    assert MeasureSpeed() not in agent.handle(TICK, FIRST_CHECK)
