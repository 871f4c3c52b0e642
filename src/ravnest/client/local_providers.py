"""Provider processes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from ravnest.errors import LaunchError
from ravnest.http.credentials import HOME_VARIABLE

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
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._last_lines: dict[str, str] = {}
        self._readers: list[threading.Thread] = []

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
        process = subprocess.Popen(  # noqa: S603  # our own command
            command,
            env={
                "OMP_NUM_THREADS": "1",
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                HOME_VARIABLE: str(self._folder / "home"),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._processes[name] = process
        assert process.stdout is not None
        reader = threading.Thread(target=self._read, args=(name, process.stdout), daemon=True)
        reader.start()
        self._readers.append(reader)

    def check(self) -> None:
        """Raise ``LaunchError`` if a provider has ended by itself."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                last = self._last_lines.get(name, "no output")
                raise LaunchError(f"{name} ended with exit code {process.returncode}: {last}")

    def stop(self) -> None:
        """Interrupt all providers, interrupt them again after a grace period, then kill them."""
        try:
            for seconds in _GRACE_SECONDS:
                self._signal(signal.SIGINT)
                if self._wait(seconds):
                    break
        finally:
            self._signal(signal.SIGKILL)
            self._wait(None)
            self._processes.clear()

    def _wait(self, seconds: float | None) -> bool:
        """Wait for all providers and return whether they ended in time."""
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            for process in self._processes.values():
                process.wait(None if deadline is None else max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def _read(self, name: str, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode("utf-8", "replace").rstrip()
            self._last_lines[name] = text
            self._on_output(name, text)
