"""What commands show: results on stdout, what goes on meanwhile on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.status import Status

from ravnest.schemas.base import Schema
from ravnest.schemas.jobs import EventView, JobView
from ravnest.schemas.jobs import JobProgress as Training


def out() -> Console:
    """Where results go; as wide as they are."""
    return Console(soft_wrap=True, highlight=False, markup=False)


def err() -> Console:
    """Where people look while they wait."""
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False)


def print_json(value: Schema | Iterable[Schema]) -> None:
    """One JSON document."""
    made = value if isinstance(value, Schema) else list(value)
    out().print(TypeAdapter(object).dump_json(made, indent=2).decode())


def print_json_line(value: Schema) -> None:
    """One JSON document a line, for those that follow."""
    out().print(value.model_dump_json())


def moment(seconds: float) -> str:
    """A time as people of this place write it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def figures(progress: Training) -> str:
    """How far a training is, in a few words; empty before the first update."""
    parts = [f"{progress.updates} updates"] if progress.updates else []
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.diverged:
        parts.append("the loss is not a number any more")
    if progress.validation is not None:
        parts.append(f"validation {progress.validation:.4f}")
    return ", ".join(parts)


def event_line(event: EventView) -> str:
    """An event for people."""
    change = event.after if event.before in ("", event.after) else f"{event.before} -> {event.after}"
    what = f"{event.kind} {event.subject}" + (f" {change}" if change else "")
    return f"{moment(event.time)}  {what}: {event.reason}"


class Bars:
    """A bar for each step of what is done; a step is done when the next begins."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._step = ""
        self._task: TaskID | None = None

    def tell(self, step: str, done: int, total: int) -> None:
        """So much of a step is done."""
        if step != self._step or self._task is None:
            self.finish()
            self._step = step
            self._task = self._progress.add_task(step, total=total or 1)
        self._progress.update(self._task, completed=done, total=total or 1)

    def finish(self) -> None:
        """The last step is done."""
        if self._task is not None:
            task = next(one for one in self._progress.tasks if one.id == self._task)
            self._progress.update(self._task, completed=task.total)


@contextmanager
def bars(console: Console) -> Iterator[Bars]:
    """Bars that stay where they ended; only their end where there is no terminal."""
    columns = (
        TextColumn("{task.description:>20}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as progress:
        shown = Bars(progress)
        yield shown
        shown.finish()


class JobLine:
    """A job's states and validations one below the other, and a live line with its figures."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console = console
        self._status = status
        self._said = ("", "")
        self._validated = ""

    def show(self, view: JobView) -> None:
        """There is news."""
        if (view.state, view.reason) != self._said:
            self._said = (view.state, view.reason)
            self._console.print(f"{view.state:>20} {view.reason}")
        if view.progress.validation is not None and f"{view.progress.validation:.4f}" != self._validated:
            self._validated = f"{view.progress.validation:.4f}"
            self._console.print(f"{'':>20} {figures(view.progress)}")
        self._status.update(f"{view.state} {figures(view.progress)}")


@contextmanager
def job_line(console: Console) -> Iterator[JobLine]:
    """Follow a job while in here."""
    with console.status("") as status:
        yield JobLine(console, status)
