"""Output that a user sees while a node works."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ravnest.runtime.control.metrics import MetricsObserver
from ravnest.runtime.control.progress import ProgressLine, RunState
from ravnest.runtime.control.telemetry_reporter import TelemetryReporter
from ravnest.runtime.stage.observer import UpdateReport
from ravnest.telemetry import PaceRecord
from ravnest.types import Role
from ravnest.wire.messages import PhaseBegin


class _Clock:
    """Time that the test tells."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _state() -> RunState:
    state = RunState(Role.ROOT, window=5)
    state.expect(epochs=4, batches=400)
    state.begin(1, 100.0)
    state.add(120, 130.0)
    state.add_loss(0.25)
    state.in_flight, state.staleness = 3, 2
    return state


def test_the_line_says_all_there_is_to_know() -> None:
    assert _state().line() == (
        "epoch 2/4, loss 0.2500, 4.0 batches/s, ETA 1:10, in flight 3/5, staleness 2"
    )


@pytest.mark.parametrize(
    ("batches", "eta"), [(120 + 4 * 3700, "1:01:40"), (121, "0:00"), (100, "0:00"), (360, "1:00")]
)
def test_the_time_that_is_left(batches: int, eta: str) -> None:
    state = _state()
    state.batches = batches
    assert f"ETA {eta}, " in state.line()


@pytest.mark.parametrize(("microbatches", "shown"), [(4, "sync x 4"), (1, "sync")])
def test_the_schedule_and_the_micro_batches_are_shown(microbatches: int, shown: str) -> None:
    state = _state()
    state.schedule, state.microbatches = "sync", microbatches
    assert state.line().endswith(f", {shown}, staleness 2")


def test_what_is_not_known_is_left_out() -> None:
    state = RunState(Role.STEM)
    assert state.line() == "epoch 1, 0.0 batches/s, staleness 0"


def test_waiting_before_and_idling_after_do_not_count() -> None:
    state = RunState(Role.ROOT)
    state.begin(0, 1000.0)
    state.add(10, 1005.0)
    assert "2.0 batches/s" in state.line()


def test_a_second_training_adds_to_what_is_to_come() -> None:
    state = _state()
    state.expect(epochs=6, batches=80)
    assert state.batches == 200
    assert "ETA 0:20" in state.line()


def test_the_pace_of_a_training_that_continues_in_the_middle_of_an_epoch() -> None:
    state = RunState(Role.ROOT)
    state.expect(epochs=3, batches=30, epoch_batches=10, update_frequency=4)
    assert state.pace(0) == PaceRecord(0, 9, None, None), "three updates per epoch"
    state.begin(1, 100.0, done=4)  # the checkpoint has an epoch and one update
    state.add(4, 102.0, samples=32)
    expected = PaceRecord(1, 9, 16.0, 8.0, recent=16.0)
    assert state.pace(5) == expected, "one update of this epoch is left, then three"
    state.add(4, 103.0, samples=40)
    assert (state.pace(6).samples_per_second, state.pace(6).recent) == (24.0, None)
    state.add(4, 105.0, samples=40)
    assert state.pace(7).recent == 20.0, "since the last record"


def _observe(line: ProgressLine, clock: _Clock, updates: int) -> None:
    """An update every two seconds."""
    observer = MetricsObserver(line, TelemetryReporter(None))
    observer.begun(PhaseBegin("run", 0, "train", 0))
    for number in range(updates):
        clock.now += 2
        observer.updated(UpdateReport(number, 0, 0.5, staleness=1, batches=4, parts=2, in_flight=2))


def test_plain_lines_where_output_is_piped() -> None:
    out, clock = io.StringIO(), _Clock()
    line = ProgressLine(RunState(Role.ROOT, window=3), console=Console(file=out), clock=clock)
    line.say("node_0 [Root] waits")
    _observe(line, clock, 6)
    line.sum_up()
    shown = "Root: epoch 1, loss 0.5000, 2.0 batches/s, in flight 2/3, staleness 1"
    summary = "Root: 24 batches in 0:12, 2.0 batches/s, loss 0.5000"
    assert out.getvalue().splitlines() == ["node_0 [Root] waits", shown, shown, summary]
    assert "\x1b" not in out.getvalue()


def test_a_live_line_on_a_terminal() -> None:
    out, clock = io.StringIO(), _Clock()
    console = Console(file=out, force_terminal=True, width=120)
    line = ProgressLine(RunState(Role.ROOT), console=console, clock=clock)
    _observe(line, clock, 6)
    line.sum_up()
    assert "\x1b[2K" in out.getvalue(), "it is written over"
    assert out.getvalue().count("2.0 batches/s") >= 6


def test_the_line_can_be_switched_off_but_not_what_is_said() -> None:
    out, clock = io.StringIO(), _Clock()
    line = ProgressLine(RunState(Role.ROOT), console=Console(file=out), shown=False, clock=clock)
    _observe(line, clock, 6)
    line.say("validation accuracy 0.9")
    line.sum_up()
    assert out.getvalue() == "validation accuracy 0.9\n"
