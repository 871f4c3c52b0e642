"""Console output of commands: results on stdout, progress on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ravnest.cli.exit_codes import ExitCode
from ravnest.cli.job_view import bounded, job_lines
from ravnest.client.progress_text import progress_text, schedule_text
from ravnest.logs.json_lines import LogFormat, json_line
from ravnest.schemas.base import Schema
from ravnest.schemas.jobs import EventView, JobView, LossHistory

_PLAIN_INTERVAL = 30.0
"""Seconds between two lines of progress without a terminal."""
_UNLIMITED = 10_000
"""Width of a console without a terminal; no row is longer."""


def out(*, quiet: bool = False) -> Console:
    """Return a console for results on stdout, without line wrapping; a ``quiet`` one shows nothing."""
    return Console(soft_wrap=True, highlight=False, markup=False, quiet=quiet)


def err(*, quiet: bool = False) -> Console:
    """Return a console for progress on stderr; a ``quiet`` one shows nothing."""
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False, quiet=quiet)


class CommandLog:
    """Lines that a command writes about its job: as text, or as JSON with one object per line."""

    def __init__(self, console: Console, log_format: LogFormat = "text") -> None:
        self.console = console
        self._log_format = log_format

    @property
    def is_json(self) -> bool:
        """``True`` if lines are JSON."""
        return self._log_format == "json"

    @property
    def bars(self) -> Console:
        """Console for progress bars; among lines of JSON there are none."""
        return err(quiet=True) if self.is_json else self.console

    def always(self) -> CommandLog:
        """Return a log for lines that a quiet command writes too."""
        return CommandLog(err(), self._log_format)

    def say(self, event: str, text: str, *, level: str = "info", **fields: object) -> None:
        """Write a line; as JSON it has the fields, or the text as ``message`` if there are none."""
        if self.is_json:
            text = json_line(event, at=None, level=level, **(fields or {"message": text.strip()}))
        self.console.print(text)


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


def warn_of_degraded(view: JobView, log_format: LogFormat = "text") -> None:
    """Warn of a model that lacks a part of its training, and exit with the code of that."""
    if view.degraded:
        text, about = f"warning: {view.degraded}", {"subject": view.id, "reason": view.degraded}
        CommandLog(err(), log_format).say("degraded", text, level="warning", **about)
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
    """State changes, schedule and validations of a job as lines, and a live view on a terminal.

    Without a terminal, the progress is a line every half a minute.
    """

    def __init__(
        self, log: CommandLog, live: Live | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._live = live
        self._clock = clock
        self._told = clock()
        """When the progress was printed last."""
        self._state = ("", "")
        self._validation = ""
        self._schedule = ""
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
        is_due = not self.is_live and self._clock() - self._told >= _PLAIN_INTERVAL
        if figures != self._validation or ((view.state.is_final or is_due) and progress_text(progress)):
            self._validation, self._told = figures, self._clock()
            values = progress.model_dump(mode="json", exclude={"schedule"})
            self._say("progress", view, progress_text(progress), **values)
        if (view.state, view.reason) != self._state:
            before, self._state = self._state[0], (view.state, view.reason)
            change = {"before": before, "after": view.state, "reason": view.reason}
            self._say("job", view, view.reason, view.state, **change)
        schedule = schedule_text(progress)
        if schedule and schedule != self._schedule:
            self._schedule = schedule
            self._say("schedule", view, schedule, message=schedule)
        if progress.loss is not None:
            self._losses = bounded({**self._losses, progress.updates: progress.loss})
        if self._live is not None:
            lines = job_lines(view, self._losses, progress_text(progress), self._log.console.width - 1)
            self._live.update(Text("\n".join(lines), no_wrap=True), refresh=True)

    def _say(self, event: str, view: JobView, text: str, state: str = "", **fields: object) -> None:
        self._log.say(event, f"{state:>20} {text}", level="info", subject=view.id, **fields)


@contextmanager
def job_status_line(log: CommandLog) -> Iterator[JobStatusLine]:
    """Show the status of a job while the context lasts."""
    console = log.console
    if not console.is_terminal or console.quiet or log.is_json:
        yield JobStatusLine(log, None)
        return
    with Live(Text(""), console=console, auto_refresh=False, transient=True) as live:
        yield JobStatusLine(log, live)
