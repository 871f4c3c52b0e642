"""The live view of a job: pipelines, progress bar and loss curve in characters."""

import pytest
from rich.console import Console

from ravnest.cli.console import CommandLog, JobStatusLine, job_status_line
from ravnest.cli.job_view import bar, bounded, chart, job_lines, loss_curve, pipelines
from ravnest.schemas.jobs import (
    AssignmentView,
    ClusterProgress,
    JobProgress,
    JobState,
    JobView,
    LossHistory,
)
from ravnest.telemetry import ScheduleRecord, TimingRecord


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


def test_many_stages_are_a_pipeline_if_their_positions_are_known() -> None:
    roles = ("Stem", "Root", "Stem", "Leaf")
    nodes = [assignment(node, role) for node, role in enumerate(roles)]
    (unknown,) = pipelines(view().model_copy(update={"assignments": tuple(nodes)}))
    assert "→" not in unknown
    known = (n.model_copy(update={"stage": s}) for n, s in zip(nodes, (2, 0, 1, 3), strict=True))
    (line,) = pipelines(view().model_copy(update={"assignments": tuple(known)}))
    assert "host-1 (Root) → host-2 (Stem) → host-0 (Stem) → host-3 (Leaf)" in line


def test_each_update_has_its_place_in_the_curve() -> None:
    losses = {update: float(update) for update in (*range(0, 1000, 100), *range(1000, 2000))}
    lines = list(loss_curve(losses, 60))
    assert len(lines[-1]) == 60
    assert 20 <= lines[0].count(" ") - 9 <= 45, "half of the columns are the first half of the updates"
    many = dict.fromkeys(range(10_001), 1.0)
    assert list(bounded(many))[-2:] == [9998, 10_000]
    assert len(bounded(many)) == 5001


def test_a_pipe_gets_a_line_of_progress_every_half_a_minute() -> None:
    console = Console(record=True, width=80, highlight=False, markup=False)
    now = 0.0
    line = JobStatusLine(CommandLog(console), None, lambda: now)
    for now in (0.0, 10.0, 31.0, 50.0, 62.0):
        line.show(view(int(now) + 1))
    shown = console.export_text().splitlines()
    assert [each.strip() for each in shown if "update" in each] == [
        "epoch 1/2, update 32 of 100, loss 0.5000",
        "epoch 1/2, update 63 of 100, loss 0.5000",
    ]


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
    lines = list(job_lines(view(), {0: 3.0, 1: 2.0, 2: 1.0}, "epoch 1/2, update 50 of 100", width))
    assert max(map(len, lines)) <= width
    assert len(lines) == 8
    assert "\n" not in lines[0]


def test_the_curve_begins_with_the_losses_of_a_job_that_trains_already() -> None:
    console = Console(force_terminal=True, record=True, width=80, highlight=False, markup=False)
    history = LossHistory(first=0, updates=(0, 1), losses=(8.0, None), validations=())
    with job_status_line(CommandLog(console)) as line:
        assert line.is_live
        line.preload(history)
        line.show(view(20, 0.5))
    assert "        8 █" in console.export_text()


def test_the_schedule_is_shown_once_and_when_it_changes() -> None:
    console = Console(record=True, width=200, highlight=False, markup=False)
    with job_status_line(CommandLog(console)) as line:
        line.show(view(10))
        for update, count in ((20, 4), (30, 4), (40, 8)):
            shown = view(update)
            chosen = ScheduleRecord("sync", count, "batches can be split")
            progress = shown.progress.model_copy(update={"schedule": chosen})
            line.show(shown.model_copy(update={"progress": progress}))
    told = [each.strip() for each in console.export_text().splitlines() if "schedule" in each]
    assert told == [
        f"schedule sync, {count} micro-batches per batch: batches can be split" for count in (4, 8)
    ]


def test_a_terminal_shows_the_view_and_a_pipe_only_changes() -> None:
    for is_terminal in (True, False):
        console = Console(
            force_terminal=is_terminal, record=True, width=80, highlight=False, markup=False
        )
        with job_status_line(CommandLog(console)) as line:
            for update in (10, 20, 30):
                line.show(view(update, 1 / update))
        shown = console.export_text()
        assert ("█" in shown) == is_terminal
        assert is_terminal or shown.split() == ["training", "all", "nodes", "train"]
