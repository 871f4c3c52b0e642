"""Computes outputs of stages again, each in a process of its own with limits and a sandbox.

A stage is a file of a requester and may hold anything, and so may the files of the providers.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import msgspec

from ravnest import host
from ravnest.provider.sandbox.choice import Sandbox, usable_sandbox
from ravnest.provider.sandbox.entry import entry_order
from ravnest.provider.sandbox.policy import FilePolicy
from ravnest.runtime.stage.forward_check import CheckResult
from ravnest.server.scheduling.check_program import CheckRequest, read_reply

_BOOT = (
    "import sys\n"
    "sys.path.insert(0, sys.argv[1])\n"
    "from ravnest import host\n"
    "from ravnest.provider.sandbox.entry import enter_sandbox\n"
    "host.lower_priority(10)\n"
    "host.disable_core_dumps()\n"
    "enter_sandbox(sys.argv[2], int(sys.argv[3]))\n"
    "from ravnest.server.scheduling.check_program import main\n"
    "main(sys.argv[4])\n"
)
"""Program of the process, which enters the sandbox before it imports torch or reads a file."""
_LISTENER_BYTES = 64
_log = logging.getLogger(__name__)


class ForwardChecker(Protocol):
    """Computes outputs again."""

    @property
    def is_available(self) -> bool:
        """True if checks are possible on this machine."""

    def check(self, request: CheckRequest) -> CheckResult:
        """Compute an output and compare it; takes as long as the stage takes, and some seconds."""


class SandboxedChecker:
    """Checker of a server: one process for each check. Without a sandbox there are no checks."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: time that a check may take."""
        self._seconds = seconds

    @property
    def is_available(self) -> bool:
        """True if this system has a sandbox."""
        return isinstance(usable_sandbox("landlock"), Sandbox)

    def check(self, request: CheckRequest) -> CheckResult:
        """Compute an output and compare it."""
        sandbox = usable_sandbox("landlock")
        if isinstance(sandbox, str):
            return CheckResult(detail=f"the server has no sandbox: {sandbox}", compared=False)
        files = FilePolicy((request.stage, request.stated, request.received), ())
        order = entry_order(files, str(Path.home()), sandbox.version)
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                argv = [sys.executable, "-I", "-c", _BOOT, str(Path(__file__).parents[3])]
                argv += [order, str(theirs.fileno()), msgspec.json.encode(request).decode()]
                process = host.start_process(
                    argv,
                    ends_with_us=True,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            return self._result(process, ours)

    def _result(self, process: subprocess.Popen[bytes], channel: socket.socket) -> CheckResult:
        with process:
            # Without somebody who answers, the process can neither connect nor listen.
            _, listeners, _, _ = socket.recv_fds(channel, _LISTENER_BYTES, 1)
            for listener in listeners:
                os.close(listener)
            try:
                reply, errors = process.communicate(timeout=self._seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                return CheckResult(detail=f"it takes more than {self._seconds:g} s", compared=False)
        try:
            return read_reply(reply)
        except (ValueError, msgspec.MsgspecError):
            last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2][:500]
            _log.warning("a spot check failed with exit code %s: %s", process.returncode, last)
            return CheckResult(detail="the process that computes it again failed", compared=False)
