"""Commands of ``ravnest`` as processes that start in milliseconds: forked from one that imported torch.

What runs in them is the command itself, with its own arguments, environment, folder and process group,
and on its own host. ``test_three_commands`` starts commands as a shell does.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fork_server import ChildEnded, ForkServer

_CLONE_NEWNET = 0x40000000
_MODULES = (
    "forked_command",
    "ravnest.cli.serve",
    "ravnest.cli.provide",
    "ravnest.cli.submit",
    "ravnest.jobs.packing",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
)
"""Modules that take long to import."""


def run_command(arguments: Mapping[str, Any]) -> None:
    """Become the command; called in the forked process."""
    os.setpgid(0, 0)
    if arguments["namespace"]:
        enter_namespace(arguments["namespace"])
    os.chdir(arguments["folder"])
    if arguments["python_path"] is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = arguments["python_path"]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = ["ravnest", *arguments["arguments"]]
    from ravnest.cli.app import main  # noqa: PLC0415 - the tests import this module too

    main()


def enter_namespace(name: str) -> None:
    """Have this thread use the network of a namespace."""
    with Path("/run/netns", name).open() as opened:
        failed = ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), _CLONE_NEWNET)
    assert not failed, os.strerror(ctypes.get_errno())


class ForkedProcess:
    """A forked process with the methods of ``Popen`` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def end_with(self, code: int) -> None:
        self.returncode = code
        self._ended.set()


class CommandStarter:
    """Starter of commands, and the thread that notes their ends. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: dict[int, ForkedProcess] = {}
        self._server = ForkServer(_MODULES, {"NO_COLOR": "1"})
        self._stopping, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="ends of commands", daemon=True)
        self._thread.start()

    def start(
        self,
        arguments: Sequence[str],
        folder: Path,
        namespace: str,
        output: Path,
        home: Mapping[str, str],
    ) -> ForkedProcess:
        """Start ``ravnest`` with these arguments; ``output`` is a file or a named pipe."""
        request = {
            "arguments": list(arguments),
            "folder": str(folder),
            "namespace": namespace,
            "python_path": os.environ.get("PYTHONPATH"),
        }
        with self._lock:
            pid = self._server.start("forked_command:run_command", request, output, home)
            process = self._processes[pid] = ForkedProcess(pid)
            self._note(self._server.ended())
        return process

    def close(self) -> None:
        """End the starter and the commands that still run."""
        os.write(self._stop, b"x")
        self._thread.join()
        self._server.__exit__()
        for each in (self._stopping, self._stop):
            os.close(each)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server.fileno, selectors.EVENT_READ)
            selector.register(self._stopping, selectors.EVENT_READ)
            while all(key.fd != self._stopping for key, _ in selector.select()):
                with self._lock:
                    self._note(self._server.events(0.0))

    def _note(self, ended: Sequence[ChildEnded]) -> None:
        for each in ended:
            self._processes.pop(each.pid).end_with(each.code)
