"""Figures of a provider's work: rates of the last seconds, totals over workers, hostile records."""

import pytest
from rich.console import Console

from ravnest.cli.provider_console import provider_console
from ravnest.provider.assignment_progress import AssignmentProgress
from ravnest.provider.events import ShowProgress
from ravnest.provider.work_meter import WorkMeter
from ravnest.telemetry import LossRecord, WorkRecord


def record(
    updates: int, *, samples: int, busy: float = 0.0, received: int = 0, sent: int = 0
) -> WorkRecord:
    return WorkRecord(updates, 1, samples, busy, received, sent)


def test_rates_are_those_of_the_last_seconds() -> None:
    meter = WorkMeter()
    first = meter.add(record(1, samples=100), 0.0)
    assert first is not None
    assert first.samples_per_second is None
    assert str(first) == "epoch 2, update 1, received 0 kB, sent 0 kB"
    meter.add(record(2, samples=200, busy=1.0), 10.0)
    for second in range(20, 61):
        found = meter.add(
            record(second, samples=200 * second, busy=0.75 * second, received=3_000_000, sent=2**20),
            second,
        )
    assert found is not None
    assert found.samples_per_second == pytest.approx(200)
    assert found.idle == pytest.approx(0.25)
    assert str(found) == "epoch 2, update 60, 200 samples/s, received 3 MB, sent 1 MB, idle 25%"


def test_the_totals_include_earlier_workers() -> None:
    meter = WorkMeter()
    meter.add(record(10, samples=1000, received=5, sent=6), 0.0)
    found = meter.add(record(8, samples=100, received=1, sent=1), 5.0)
    assert found is not None
    assert (found.updates, found.samples, found.received_bytes, found.sent_bytes) == (8, 1100, 6, 7)


@pytest.mark.parametrize("samples", [-1, 2**53, 10**400])
def test_figures_that_cannot_be_true_are_not_shown(samples: int) -> None:
    meter = WorkMeter()
    assert meter.add(record(1, samples=samples), 0.0) is None
    assert meter.add(WorkRecord(1, 0, 1, float("nan"), 0, 0), 0.0) is None
    assert meter.total is None


def test_work_is_shown_to_the_owner_and_not_sent_to_the_server() -> None:
    progress = AssignmentProgress("a", node_title="node 1 of job-1")
    loss = LossRecord(0, 0, 1.0, 1, 0)
    shown = progress.take((record(1, samples=4), loss), 0.0)
    assert shown == [ShowProgress("node 1 of job-1: epoch 2, update 1, received 0 kB, sent 0 kB")]
    assert progress.report().records == (loss,)
    assert progress.finished.startswith("node 1 of job-1: finished after 4 samples: epoch 2, update 1")


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with provider_console(Console(soft_wrap=True, highlight=False, markup=False)) as console:
        console.say("alice offers [2 GB]")
        for number in range(100):
            console.progress(f"update {number}")
        console._next_line = 0.0
        console.progress("update 100")
    assert capsys.readouterr().out == "alice offers [2 GB]\nupdate 100\n"


def test_on_a_terminal_progress_is_one_live_line() -> None:
    terminal = Console(force_terminal=True, record=True, width=80, highlight=False, markup=False)
    with provider_console(terminal) as console:
        console.say("alice offers [2 GB]")
        for number in range(100):
            console.progress(f"update {number}")
    assert "update 98" not in terminal.export_text()


def test_a_quiet_provider_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with provider_console(Console(quiet=True)) as console:
        console.say("alice offers 2 GB")
    assert not capsys.readouterr().out


def test_lines_of_a_worker_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with provider_console(Console(soft_wrap=True, highlight=False, markup=False)) as console:
        console.say("job-1: failed: \x1b[2J\x1b]0;x\x07gone \u202e")
        console.progress("\x1b[1A")
    assert capsys.readouterr().out == "job-1: failed: [2J]0;xgone \n"
