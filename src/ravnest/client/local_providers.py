"""Providers on this machine, as processes, for as long as somebody needs them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Self

from ravnest.errors import LaunchError
from ravnest.host import INTERRUPT, KILL
from ravnest.http.credentials import HOME_VARIABLE
from ravnest.provider.child_process import ChildProcess

_PATIENCE = (3.0, 5.0)
"""Seconds for providers to leave, and to end what they do after a second interrupt."""

Show = Callable[[str, str], None]
"""Called with a provider's name and a line that it wrote, from several threads."""


class LocalProviders:
    """``ravnest provide`` in processes of its own; they end with the context."""

    def __init__(self, folder: Path, invitation: Mapping[str, str], show: Show) -> None:
        """``invitation`` are the options that name the server and the token."""
        self._folder = folder
        self._invitation = [f"--{name}={value}" for name, value in invitation.items()]
        self._show = show
        self._processes: dict[str, ChildProcess] = {}
        self._last: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, *options: str) -> None:
        """One more; it has a process group of its own, so that Ctrl-C reaches it through us."""
        command = [sys.executable, "-P", "-m", "ravnest.cli.app", "provide", *self._invitation]
        command += [f"--name={name}", f"--folder={self._folder / name}", *options]
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            HOME_VARIABLE: str(self._folder / "home"),
        }
        process = ChildProcess(name, command, environment)
        process.start()
        self._processes[name] = process

        def on_line(line: str) -> None:
            self._last[name] = line.rstrip()
            self._show(name, line.rstrip())

        process.follow(on_line)

    def check(self) -> None:
        """``LaunchError`` if one has ended by itself."""
        for name, process in self._processes.items():
            if process.code is not None:
                last = self._last.get(name, "it said nothing")
                raise LaunchError(f"{name} ended with code {process.code}: {last}")

    def stop(self) -> None:
        """Let all leave; those that take long are told to hurry, and those that do not are killed."""
        try:
            for patience in _PATIENCE:
                self._signal(INTERRUPT)
                if self._wait(patience):
                    break
        finally:
            self._signal(KILL)
            self._wait(None)
            self._processes.clear()

    def _wait(self, seconds: float | None) -> bool:
        """Return ``True`` if all have ended within the time."""
        deadline = None if seconds is None else time.monotonic() + seconds
        return all(
            process.wait(None if deadline is None else max(deadline - time.monotonic(), 0.01))
            for process in self._processes.values()
        )

    def _signal(self, number: Signals) -> None:
        for process in self._processes.values():
            process.send(number)
