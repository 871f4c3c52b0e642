"""Delay measurement with given times."""

from ravnest.transport.base import LinkDelay
from ravnest.transport.delay_meter import DelayMeter


def test_delays_are_zero_before_any_measurement() -> None:
    assert DelayMeter().delay() == LinkDelay(0.0, 0.0)


def test_the_minimum_of_three_probes_at_the_start_counts() -> None:
    meter = DelayMeter()
    token: int | None = meter.probe(0.0)
    seconds = [0.5, 0.25, 0.75]
    now = 0.0
    for trip in seconds:
        assert token is not None
        meter.probe_left(token, now)
        now += trip
        token = meter.echo_arrived(token, now)
    assert token is None
    assert meter.delay() == LinkDelay(0.25, 0.125)


def test_a_probe_every_few_seconds_of_traffic() -> None:
    meter = DelayMeter()
    meter.probe(0.0)
    due = [now for now in range(20) if meter.message_sent(now, float(now)) is not None]
    assert due == [3, 6, 9, 12, 15, 18]


def test_unexpected_answers_are_ignored() -> None:
    meter = DelayMeter()
    meter.probe_left(meter.probe(0.0), 0.0)
    assert meter.echo_arrived(99, 1.0) is None
    meter.ack_arrived(50, 1.0)
    assert meter.delay() == LinkDelay(0.0, 0.0)


def test_what_is_under_way_does_not_count_after_a_reconnection() -> None:
    meter = _meter_with_round_trip(0.5)
    meter.message_sent(0, 1.0)
    meter.probe_left(meter.probe(1.0), 1.0)
    meter.reconnected()
    meter.ack_arrived(1, 60.0)
    assert meter.delay() == LinkDelay(0.5, 0.25)


def _meter_with_round_trip(seconds: float) -> DelayMeter:
    meter = DelayMeter()
    token = meter.probe(0.0)
    meter.probe_left(token, 0.0)
    meter.echo_arrived(token, seconds)
    return meter


def test_time_beyond_the_round_trip_is_busy_time() -> None:
    meter = _meter_with_round_trip(0.5)
    meter.message_sent(0, 1.0)
    meter.ack_arrived(1, 2.0)
    assert meter.delay() == LinkDelay(0.5, 0.75, 0.5)


def test_queueing_does_not_count() -> None:
    meter = _meter_with_round_trip(0.5)
    for number in range(10):
        meter.message_sent(number, 1.0)
    for count in range(1, 11):
        meter.ack_arrived(count, 1.5 + 0.25 * count)
    assert meter.delay() == LinkDelay(0.5, 0.5, 0.25)


def test_messages_in_a_row_on_a_slow_link_are_not_queued() -> None:
    meter = _meter_with_round_trip(0.5)
    for number in range(1, 11):
        meter.message_sent(number - 1, 0.125 * number)
    for number in range(1, 11):
        meter.ack_arrived(number, 0.125 * number + 0.5)
    assert meter.delay() == LinkDelay(0.5, 0.25, 0.0)


def test_messages_of_one_ack_share_the_time() -> None:
    meter = _meter_with_round_trip(0.5)
    for number in range(4):
        meter.message_sent(number, 1.0)
    meter.ack_arrived(4, 2.5)
    assert meter.delay().busy == 0.25


def test_idle_time_between_messages_of_one_ack_does_not_count() -> None:
    meter = _meter_with_round_trip(0.5)
    for number in range(4):
        meter.message_sent(number, 1.0 + number)
    meter.ack_arrived(4, 4.75)
    assert meter.delay().busy == 0.25


def test_only_recent_messages_count() -> None:
    meter = DelayMeter()
    for number in range(1, 101):
        meter.message_sent(number - 1, float(number))
        meter.ack_arrived(number, number + (4.0 if number <= 80 else 0.5))
    assert meter.delay().message == 0.5
