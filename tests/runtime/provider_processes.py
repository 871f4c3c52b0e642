"""Nodes in separate processes.

Importing torch takes seconds, so a fork server imports it once and forks a process for each provider,
before any thread or connection exists. What runs in it is the script itself, up to the interpreter's
own handling of errors, signals and the exit.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPT = HERE / "provider_script.py"
DEADLINE = 60.0
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
"""Environment of a node's process: imports of the tests, one core."""


@dataclass
class Provider:
    """Process of one node."""

    pid: int
    output_file: Path
    ended: threading.Event = field(default_factory=threading.Event)
    code: int | None = None
    """Exit code as in ``subprocess``: negative for a signal."""

    def wait(self, seconds: float = DEADLINE) -> int:
        """Wait for the end and return the exit code."""
        assert self.ended.wait(seconds), f"{self.output_file.name} is still there:\n{self.output}"
        assert self.code is not None
        return self.code

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def output(self) -> str:
        return self.output_file.read_text() if self.output_file.exists() else ""


class ForkServer:
    """Starter of node processes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,
        )
        self._changed = threading.Condition()
        self._providers: dict[int, Provider] = {}
        self._started: list[int] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, name: str, folder: Path, settings: Mapping[str, Any]) -> Provider:
        """Run the provider script for a node in ``folder``."""
        output = folder / f"{name}.out"
        request = {"folder": str(folder), "output": str(output), "node": name, **settings}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        with self._changed:
            assert self._changed.wait_for(lambda: self._started, DEADLINE), "the fork server hangs"
            provider = self._providers[self._started.pop()]
        provider.output_file = output
        return provider

    def close(self) -> None:
        """End all remaining processes."""
        for provider in self._providers.values():
            if not provider.ended.is_set():
                os.kill(provider.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            with self._changed:
                if "started" in told:
                    self._providers[told["started"]] = Provider(told["started"], Path())
                    self._started.append(told["started"])
                else:
                    provider = self._providers[told["ended"]]
                    provider.code = told["code"]
                    provider.ended.set()
                self._changed.notify_all()


@contextmanager
def watching(providers: Mapping[str, Provider]) -> Iterator[None]:
    """End all processes after the test session."""
    try:
        yield
    finally:
        for provider in providers.values():
            if not provider.ended.is_set():
                provider.kill(signal.SIGKILL)
                provider.ended.wait(DEADLINE)


Start = Callable[..., dict[str, Provider]]
"""Type of the fixture ``start``."""


def ended_well(providers: Mapping[str, Provider]) -> None:
    """Check that all processes end with code 0."""
    for name, provider in providers.items():
        assert provider.wait() == 0, f"{name}:\n{provider.output}"


def await_line(provider: Provider, line: str) -> None:
    """Wait until a node has printed a line."""
    deadline = time.monotonic() + DEADLINE
    while line not in provider.output:
        assert not provider.ended.wait(0.05), provider.output
        assert time.monotonic() < deadline, provider.output


def _tell(**what: Any) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell(ended=pid, code=os.waitstatus_to_exitcode(status))


def _fork_server() -> dict[str, Any] | None:
    """Fork for each request; return it in the child, and None in the parent at the end."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    pending = b""
    while True:
        for key, _ in selector.select():
            data = os.read(key.fd, 1 << 16)
            if key.fd == woken:
                _reap()
                continue
            if not data:
                return None
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    # As in a terminal, also if the tests run in the background of a shell.
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    selector.close()
                    return dict(json.loads(line))
                _tell(started=pid)


def _become(request: dict[str, Any]) -> None:
    """Set up the process like ``python provider_script.py node_<i>``."""
    output = os.open(request.pop("output"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(request.pop("folder"))
    sys.argv = [str(SCRIPT), request.pop("node"), json.dumps(request)]


def _warm_up() -> None:
    """Trigger torch's lazy imports of the first optimizer step."""
    import torch  # noqa: PLC0415 - only the fork server needs it

    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.AdamW([parameter]).step()


if __name__ == "__main__":
    import provider_script

    _warm_up()
    asked = _fork_server()
    if asked is not None:
        _become(asked)
        provider_script.main(sys.argv[1], json.loads(sys.argv[2]))
