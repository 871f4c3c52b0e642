"""The live view of a job: pipelines, progress bar and loss curve in characters."""

import pytest
from rich.console import Console

from ravnest.cli.console import job_status_line
from ravnest.cli.job_view import bar, chart, job_lines, pipelines
from ravnest.schemas.jobs import (
    AssignmentView,
    ClusterProgress,
    JobProgress,
    JobState,
    JobView,
    LossHistory,
)
from ravnest.telemetry import TimingRecord


def assignment(node: int, role: str, phase: str = "training") -> AssignmentView:
    return AssignmentView(
        provider=f"p{node}", provider_name=f"host-{node}", node=node, cluster=0, role=role, phase=phase
    )


def view(updates: int = 50, loss: float | None = 0.5) -> JobView:
    timings = tuple(TimingRecord(stage, 1, 0.004, 0.008, 0, 0, 0) for stage in range(3))
    return JobView(
        id="job-1",
        name="digits",
        owner="rita",
        state=JobState.TRAINING,
        reason="all nodes\ntrain",
        created=0.0,
        changed=float(updates),
        progress=JobProgress(updates=updates, total_updates=100, epoch=1, epochs=2, loss=loss),
        assignments=(assignment(0, "Leaf"), assignment(1, "Root"), assignment(2, "Stem", "lost")),
        clusters=(ClusterProgress(cluster=0, timings=timings),),
    )


def test_a_pipeline_is_shown_in_its_order() -> None:
    (line,) = pipelines(view())
    nodes = "host-1 (Root) → host-2 (Stem, lost) → host-0 (Leaf)"
    assert line == f"cluster 0: {nodes}; stages take 12, 12, 12 ms"


def test_a_bar_has_its_width() -> None:
    assert bar(0.5, 25) == "━" * 10 + "─" * 10 + "  50%"
    assert bar(1.0, 25).endswith(" 100%")
    assert {len(bar(share / 7, 40)) for share in range(8)} == {40}


def test_a_curve_falls_from_its_largest_to_its_smallest_value() -> None:
    lines = chart([8.0, 6.0, 4.0, 2.0], 40, 2)
    assert lines == ["        8 █▃", "        2 ██▆▁"]
    long = chart([float(n) for n in range(10_000)], 40, 4)
    assert len(long) == 4
    assert max(map(len, long)) == 40
    assert chart([1.0, 1.0], 40, 1) == ["        1 ▁▁"]


@pytest.mark.parametrize("width", [10, 40, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = list(job_lines(view(), [3.0, 2.0, 1.0], "epoch 1/2, update 50 of 100", width))
    assert max(map(len, lines)) <= width
    assert len(lines) == 8
    assert "\n" not in lines[0]


def test_the_curve_begins_with_the_losses_of_a_job_that_trains_already() -> None:
    console = Console(force_terminal=True, record=True, width=80, highlight=False, markup=False)
    history = LossHistory(first=0, updates=(0, 1), losses=(8.0, None), validations=())
    with job_status_line(console) as line:
        assert line.is_live
        line.preload(history)
        line.show(view(20, 0.5))
    assert "        8 █" in console.export_text()


def test_a_terminal_shows_the_view_and_a_pipe_only_changes() -> None:
    for is_terminal in (True, False):
        console = Console(
            force_terminal=is_terminal, record=True, width=80, highlight=False, markup=False
        )
        with job_status_line(console) as line:
            for update in (10, 20, 30):
                line.show(view(update, 1 / update))
        shown = console.export_text()
        assert ("█" in shown) == is_terminal
        assert is_terminal or shown.split() == ["training", "all", "nodes", "train"]
