"""Progress output on a terminal and in a file, and tracebacks of errors."""

import io
import traceback
from typing import Any

import pytest
from rich.console import Console

from ravnest.errors import RunError
from ravnest.runtime.control.progress import ProgressLine, RunState
from ravnest.runtime.trainer import _shortened
from ravnest.types import Role


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def line_of(role: Role = Role.ROOT, **options: Any) -> tuple[ProgressLine, Clock, io.StringIO]:
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, width=options.pop("width", 80), **options)
    line = ProgressLine(RunState(role), console=console, clock=clock)
    line.state.begin(0, clock.now)
    return line, clock, file


def run(line: ProgressLine, clock: Clock, seconds: int) -> None:
    """Simulate a run with ten micro-batches per second."""
    for _ in range(seconds):
        clock.now += 1
        line.state.add(10, clock.now)
        line.changed()


def test_the_root_writes_a_line_every_five_seconds_to_a_file() -> None:
    line, clock, file = line_of()
    line.state.epochs, line.state.batches, line.state.window = 2, 300, 4
    line.state.in_flight, line.state.staleness = 3, 2
    line.state.add_loss(0.5)
    run(line, clock, 12)
    first, second = file.getvalue().splitlines()
    assert first == (
        "Root: epoch 1/2, loss 0.5000, 10.0 batches/s, ETA 0:25, in flight 3/4, staleness 2"
    )
    assert "ETA 0:20" in second


@pytest.mark.parametrize("role", [Role.STEM, Role.LEAF])
def test_other_nodes_write_one_line_a_minute(role: Role) -> None:
    line, clock, file = line_of(role)
    run(line, clock, 119)
    assert file.getvalue() == f"{role}: epoch 1, 10.0 batches/s, staleness 0\n"


def test_waiting_for_the_neighbours_prints_no_progress_line() -> None:
    file, clock = io.StringIO(), Clock()
    line = ProgressLine(RunState(Role.ROOT), console=Console(file=file, width=80), clock=clock)
    clock.now += 3600
    line.state.begin(0, clock.now)
    run(line, clock, 4)
    assert file.getvalue() == ""
    run(line, clock, 1)
    assert file.getvalue() == "Root: epoch 1, 10.0 batches/s, staleness 0\n"


def test_the_summary_is_printed_once() -> None:
    line, clock, file = line_of()
    line.sum_up()
    assert file.getvalue() == "", "nothing was done"
    run(line, clock, 4)
    line.sum_up()
    line.sum_up()
    assert file.getvalue() == "Root: 40 batches in 0:04, 10.0 batches/s\n"


@pytest.mark.parametrize("width", [80, 40])
def test_a_live_line_never_wraps(width: int) -> None:
    line, clock, file = line_of(force_terminal=True, width=width)
    line.state.epochs, line.state.batches, line.state.window = 20, 300, 4
    line.state.add_loss(0.5)
    run(line, clock, 3)
    assert "\n" not in file.getvalue()
    assert "epoch 1/20, loss 0.5000" in file.getvalue()
    line.sum_up()
    assert "Root: 30 batches in 0:03" in file.getvalue()


def test_a_traceback_ends_at_the_users_line() -> None:
    namespace: dict[str, Any] = {"__name__": "ravnest.runtime.somewhere", "RunError": RunError}
    exec("def deep():\n    raise RunError('why')\ndef inside():\n    deep()", namespace)

    def users() -> None:
        namespace["inside"]()

    with pytest.raises(RunError) as caught:
        users()
    frames = traceback.extract_tb(_shortened(caught.value).__traceback__)
    assert [frame.name for frame in frames][-1] == "users"


def test_a_traceback_of_only_internal_frames_is_empty() -> None:
    namespace: dict[str, Any] = {"__name__": "ravnest.runtime.somewhere", "RunError": RunError}
    source = (
        "def inside():\n    try:\n        raise RunError('why')\n"
        "    except RunError as error:\n        return error"
    )
    exec(source, namespace)
    assert _shortened(namespace["inside"]()).__traceback__ is None
