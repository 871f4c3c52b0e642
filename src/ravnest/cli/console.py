"""Console output of commands: results on stdout, progress on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ravnest.cli.exit_codes import ExitCode
from ravnest.cli.job_view import job_lines
from ravnest.client.progress_text import progress_text
from ravnest.schemas.base import Schema
from ravnest.schemas.jobs import EventView, JobView, LossHistory

_KEPT_LOSSES = 10_000
"""Losses of the curve in a live view."""
_UNLIMITED = 10_000
"""Width of a console without a terminal; no row is longer."""


def out(*, quiet: bool = False) -> Console:
    """Return a console for results on stdout, without line wrapping; a ``quiet`` one shows nothing."""
    return Console(soft_wrap=True, highlight=False, markup=False, quiet=quiet)


def err(*, quiet: bool = False) -> Console:
    """Return a console for progress on stderr; a ``quiet`` one shows nothing."""
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False, quiet=quiet)


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


def event_line(event: EventView) -> str:
    """Format an event as one line."""
    change = event.after if event.before in ("", event.after) else f"{event.before} -> {event.after}"
    subject = f"{event.kind} {event.subject}" + (f" {change}" if change else "")
    reason = event.reason.replace("\n", "\n    ")  # no line of it looks like another event
    return f"{local_time(event.time)}  {subject}: {reason}"


def warn_of_degraded(view: JobView) -> None:
    """Warn of a model that lacks a part of its training, and exit with the code of that."""
    if view.degraded:
        err().print(f"warning: {view.degraded}")
        raise typer.Exit(ExitCode.DEGRADED)


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
    """State changes and validation results of a job as lines, and a live view on a terminal."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self._console = console
        self._live = live
        self._state = ("", "")
        self._validation = ""
        self._losses: dict[int, float] = {}
        """Losses that were seen, by update."""

    @property
    def is_live(self) -> bool:
        """``True`` on a terminal."""
        return self._live is not None

    def preload(self, history: LossHistory) -> None:
        """Begin the curve with the losses of a job that trains already."""
        pairs = zip(history.updates, history.losses, strict=True)
        self._losses |= {update + 1: loss for update, loss in pairs if loss is not None}

    def show(self, view: JobView) -> None:
        """Print what changed since the last view, and update the live line.

        The last figures are always printed before the end.
        """
        progress = view.progress
        figures = "" if progress.validation is None else f"{progress.validation:.4f}"
        if figures != self._validation or (view.state.is_final and progress_text(progress)):
            self._validation = figures
            self._console.print(f"{'':>20} {progress_text(progress)}")
        if (view.state, view.reason) != self._state:
            self._state = (view.state, view.reason)
            self._console.print(f"{view.state:>20} {view.reason}")
        if progress.loss is not None:
            self._losses[progress.updates] = progress.loss
        if self._live is not None:
            losses = [self._losses[update] for update in sorted(self._losses)][-_KEPT_LOSSES:]
            lines = job_lines(view, losses, progress_text(progress), self._console.width - 1)
            self._live.update(Text("\n".join(lines), no_wrap=True), refresh=True)


@contextmanager
def job_status_line(console: Console) -> Iterator[JobStatusLine]:
    """Show the status of a job while the context lasts."""
    if not console.is_terminal or console.quiet:
        yield JobStatusLine(console, None)
        return
    with Live(Text(""), console=console, auto_refresh=False, transient=True) as live:
        yield JobStatusLine(console, live)
