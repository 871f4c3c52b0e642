"""Output of ``ravnest provide``: events as lines, and what it does now as a live line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from ravnest.logs.json_lines import LogFormat, json_line, log_as_json
from ravnest.schemas.base import plain_lines

_LINE_SECONDS = 30.0
"""Least time between two lines of progress that are not on a terminal."""


class ProviderConsole:
    """Lines for the owner of a machine. Used by one thread."""

    def __init__(
        self, console: Console, status: Status, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._status = status
        self._clock = clock
        self._next_line = clock() + _LINE_SECONDS

    def say(self, line: str) -> None:
        """Print an event; it is the newest thing to know until there is progress.

        The reason in it can be a line that a worker has written.
        """
        line = plain_lines(line)
        self._console.print(line)
        self._status.update(escape(line))

    def progress(self, line: str) -> None:
        """Show what the provider does now: live on a terminal, else a line from time to time."""
        line = plain_lines(line)
        if self._console.is_terminal:
            self._status.update(escape(line))
        elif self._clock() >= self._next_line:
            self._next_line = self._clock() + _LINE_SECONDS
            self._console.print(line)


class JsonConsole:
    """The same lines as JSON, one object per line."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._next_line = clock() + _LINE_SECONDS

    def say(self, line: str) -> None:
        """Print an event."""
        self._console.print(json_line("provider", message=line))

    def progress(self, line: str) -> None:
        """Print from time to time what the provider does."""
        if self._clock() >= self._next_line:
            self._next_line = self._clock() + _LINE_SECONDS
            self._console.print(json_line("progress", message=line))


@contextmanager
def provider_console(
    console: Console, log_format: LogFormat = "text"
) -> Iterator[ProviderConsole | JsonConsole]:
    """Show a live line while the block runs, if there is a terminal; or everything as JSON."""
    if log_format == "json":
        log_as_json()
        yield JsonConsole(console)
        return
    with console.status("") as status:
        yield ProviderConsole(console, status)
