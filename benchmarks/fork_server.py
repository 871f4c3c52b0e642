"""Processes that start in milliseconds: a parent has imported torch and ravnest, and forks them.

The parent has a single thread and uses neither gRPC nor torch's thread pools before it forks. Children
are real processes: ``kill -9`` ends them without a chance to react. They end with the parent, and the
parent with the program that uses it.

    server = ForkServer(("chaos_node",))
    pid = server.start("chaos_node:main", {"node": "node_0"}, output, {"RAVNEST_RESUME": "1"})
    server.events(1.0)      # [ChildEnded(pid, -9)]
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ravnest.host import end_with_parent

_START_SECONDS = 120.0
"""Time for the imports of the parent on a busy machine."""


@dataclass(frozen=True)
class ChildEnded:
    """A process has ended; a negative code is the number of the signal that ended it."""

    pid: int
    code: int


class ForkServer:
    """The parent, from outside; ``with`` ends it and its children."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """``modules`` are imported before the first fork, with further variables of ``environment``."""
        path = os.pathsep.join(each for each in sys.path if each)
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | dict(environment or {}),
        )
        assert self._process.stdout is not None
        self.fileno = self._process.stdout.fileno()
        """Descriptor that becomes readable when there may be events."""
        self._pending = b""
        self._ended: list[ChildEnded] = []
        self._started: list[int] = []
        self._await_start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # the parent ends, and its children with it
        self._process.wait(_START_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def start(
        self, call: str, arguments: Mapping[str, Any], output: Path, environment: Mapping[str, str]
    ) -> int:
        """Run ``module:function(arguments)`` in a new process and return its id.

        The output is appended to a file. An exception of the function ends the process with code 1.
        """
        request = {
            "call": call,
            "arguments": dict(arguments),
            "output": str(output),
            "environment": dict(environment),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._await_start()

    def events(self, seconds: float) -> list[ChildEnded]:
        """Wait for the end of a process, and return those that have ended."""
        if not self._ended:
            self._read(seconds)
        return self.ended()

    def ended(self) -> list[ChildEnded]:
        """Return the processes whose end was read already, while another one was started."""
        ended, self._ended = self._ended, []
        return ended

    def _await_start(self) -> int:
        deadline = time.monotonic() + _START_SECONDS
        while not self._started:
            if not self._read(deadline - time.monotonic()):
                raise TimeoutError("the fork server does not answer")
        return self._started.pop()

    def _read(self, seconds: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            if not selector.select(max(seconds, 0.0)):
                return False
        data = os.read(self.fileno, 1 << 16)
        if not data:
            raise ChildProcessError("the fork server has ended")
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "ended" in told:
                self._ended.append(ChildEnded(told["ended"], told["code"]))
            else:
                self._started.append(told["started"])
        return True


def _tell(**what: int) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell(ended=pid, code=os.waitstatus_to_exitcode(status))


def _fork_for_requests() -> dict[str, Any] | None:
    """Fork for each request; return it in the child, and None in the parent at the end."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is for the program that uses this one
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    _tell(started=os.getpid())
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
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    selector.close()
                    return dict(json.loads(line))
                _tell(started=pid)


def _become(request: dict[str, Any]) -> None:
    """Set up the process like one that was started by a shell, and call the function."""
    end_with_parent()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.update(request["environment"])
    module, _, function = request["call"].partition(":")
    getattr(importlib.import_module(module), function)(request["arguments"])


def _warm_up() -> None:
    """Trigger torch's lazy imports of the first optimizer step."""
    import torch  # noqa: PLC0415 - only the parent needs it

    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.AdamW([parameter]).step()


def _serve(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    _warm_up()
    request = _fork_for_requests()
    if request is not None:
        _become(request)


if __name__ == "__main__":
    end_with_parent()
    _serve(sys.argv[1:])
