"""Console output of commands: results on stdout, progress on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table

from ravnest.schemas.base import Schema
from ravnest.schemas.jobs import EventView, JobProgress, JobView

_UNLIMITED = 10_000
"""Width of a console without a terminal; no row is longer."""


def out() -> Console:
    """Return a console for results on stdout, without line wrapping."""
    return Console(soft_wrap=True, highlight=False, markup=False)


def err() -> Console:
    """Return a console for progress on stderr."""
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False)


def print_json(value: object) -> None:
    """Print a schema, a dataclass or a list of them as one JSON document."""
    out().print(TypeAdapter(object).dump_json(value, indent=2).decode())


def print_json_line(value: Schema) -> None:
    """Print one JSON document on a line of its own, for streams."""
    out().print(value.model_dump_json())


def print_table(table: Table) -> None:
    """Print a table: fitted to a terminal, but with one line per row in a pipe or file."""
    console = out()
    if not console.is_terminal:
        console.width = _UNLIMITED
    console.print(table)


def local_time(seconds: float) -> str:
    """Format seconds since 1970 as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def progress_text(progress: JobProgress) -> str:
    """Describe the progress of a job in a few words; empty before the first update."""
    parts = [f"{progress.updates} updates"] if progress.updates else []
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.diverged:
        parts.append("the loss is not finite")
    if progress.validation is not None:
        parts.append(f"validation {progress.validation:.4f}")
    if progress.staleness:
        parts.append(f"staleness {progress.staleness}")
    return ", ".join(parts)


def schedule_text(progress: JobProgress) -> str:
    """Describe the schedule of a job; empty before training begins."""
    chosen = progress.schedule
    if chosen is None:
        return ""
    count = "1 micro-batch" if chosen.microbatches == 1 else f"{chosen.microbatches} micro-batches"
    return f"schedule {chosen.schedule}, {count} per batch: {chosen.reason}"


def event_line(event: EventView) -> str:
    """Format an event as one line."""
    change = event.after if event.before in ("", event.after) else f"{event.before} -> {event.after}"
    subject = f"{event.kind} {event.subject}" + (f" {change}" if change else "")
    reason = event.reason.replace("\n", "\n    ")  # no line of it looks like another event
    return f"{local_time(event.time)}  {subject}: {reason}"


class StepBars:
    """One progress bar per step; a step is complete when the next one begins."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._step = ""
        self._task: TaskID | None = None

    def update(self, step: str, done: int, total: int) -> None:
        """Show the progress of ``step``."""
        if step != self._step or self._task is None:
            self.finish()
            self._step = step
            self._task = self._progress.add_task(step, total=total or 1)
        self._progress.update(self._task, completed=done, total=total or 1)

    def finish(self) -> None:
        """Show the last step as complete."""
        if self._task is not None:
            task = next(one for one in self._progress.tasks if one.id == self._task)
            self._progress.update(self._task, completed=task.total)


@contextmanager
def progress_bars(console: Console) -> Iterator[StepBars]:
    """Show progress bars; without a terminal, only their final state."""
    columns = (
        TextColumn("{task.description:>20}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as progress:
        bars = StepBars(progress)
        yield bars
        bars.finish()


class JobStatusLine:
    """State changes and validation results of a job as lines, and a live line with its progress."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console = console
        self._status = status
        self._state = ("", "")
        self._validation = ""

    def show(self, view: JobView) -> None:
        """Print what changed since the last view, and update the live line."""
        if (view.state, view.reason) != self._state:
            self._state = (view.state, view.reason)
            self._console.print(f"{view.state:>20} {view.reason}")
        if (
            view.progress.validation is not None
            and f"{view.progress.validation:.4f}" != self._validation
        ):
            self._validation = f"{view.progress.validation:.4f}"
            self._console.print(f"{'':>20} {progress_text(view.progress)}")
        self._status.update(f"{view.state} {progress_text(view.progress)}")


@contextmanager
def job_status_line(console: Console) -> Iterator[JobStatusLine]:
    """Show the status of a job while the context lasts."""
    with console.status("") as status:
        yield JobStatusLine(console, status)
