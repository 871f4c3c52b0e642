"""Provider processes on this machine."""

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

_GRACE_SECONDS = (3.0, 5.0)
"""Seconds after the first and the second interrupt; the second ends running work at once."""

OutputCallback = Callable[[str, str], None]
"""Called with a provider's name and a line of its output, from several threads."""


class LocalProviders:
    """Processes that run ``ravnest provide``; they end with the context."""

    def __init__(self, folder: Path, options: Mapping[str, str], on_output: OutputCallback) -> None:
        """Store the options that all providers share: the server and the token."""
        self._folder = folder
        self._options = [f"--{name}={value}" for name, value in options.items()]
        self._on_output = on_output
        self._processes: dict[str, ChildProcess] = {}
        self._last_lines: dict[str, str] = {}
        self._exit_codes: dict[str, int] = {}
        """Exit codes of the providers that have ended, set after their last line."""
        self._killed: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, *options: str) -> None:
        """Start a provider in its own process group, so that Ctrl-C reaches it only through us."""
        command = [sys.executable, "-P", "-m", "ravnest.cli.app", "provide", *self._options]
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
            self._last_lines[name] = line.rstrip()
            self._on_output(name, line.rstrip())

        def on_end(code: int) -> None:
            self._exit_codes[name] = code

        process.follow(on_line, on_end)

    def kill(self, name: str) -> None:
        """Kill a provider with SIGKILL, as if its machine had lost power; ``check`` ignores its end."""
        process = self._processes.pop(name)
        self._killed.add(name)
        process.send(KILL)
        process.wait(None)

    def check(self) -> None:
        """Raise ``LaunchError`` if a provider has ended by itself."""
        for name, code in list(self._exit_codes.items()):
            if name in self._killed:
                continue
            last = self._last_lines.get(name, "no output")
            raise LaunchError(f"{name} ended with exit code {code}: {last}")

    def stop(self) -> None:
        """Interrupt all providers, interrupt them again after a grace period, then kill them."""
        try:
            for seconds in _GRACE_SECONDS:
                self._signal(INTERRUPT)
                if self._wait(seconds):
                    break
        finally:
            self._signal(KILL)
            self._wait(None)
            self._processes.clear()

    def _wait(self, seconds: float | None) -> bool:
        """Wait for all providers and return whether they ended in time."""
        deadline = None if seconds is None else time.monotonic() + seconds
        return all(
            process.wait(None if deadline is None else max(deadline - time.monotonic(), 0.01))
            for process in self._processes.values()
        )

    def _signal(self, number: Signals) -> None:
        for process in self._processes.values():
            process.send(number)
