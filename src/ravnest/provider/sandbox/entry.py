"""Entry of a process into its sandbox; it cannot leave it again."""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
from dataclasses import asdict
from pathlib import Path

from ravnest.provider.sandbox import kernel, landlock
from ravnest.provider.sandbox.filter_program import encoded, filter_program
from ravnest.provider.sandbox.policy import FilePolicy, complete
from ravnest.provider.sandbox.system_calls import PROCESSORS
from ravnest.provider.sandbox.worker_rules import worker_rules

_KEPT_CAPABILITIES = 0b110
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root reads files of others; Landlock says which."""
_LISTENER = b"listener"


def entry_order(policy: FilePolicy, home: str, version: int) -> str:
    """Return the argument of ``enter_sandbox`` as text."""
    return json.dumps({**asdict(policy), "home": home, "version": version})


def enter_sandbox(order: str, channel: int) -> None:
    """Enter the sandbox of an order and send the listener of the filter through a socket.

    Call it while the process has a single thread: threads that run already would stay outside. Modules
    that are imported later must be in the folders of this Python.
    """
    if threading.active_count() != 1 or len([*Path("/proc/self/task").iterdir()]) != 1:
        raise RuntimeError("a process with several threads cannot enter a sandbox")
    found = json.loads(order)
    policy = FilePolicy(tuple(found["readable"]), tuple(found["writable"]))
    kernel.forbid_new_privileges()
    kernel.keep_capabilities(_KEPT_CAPABILITIES)
    landlock.restrict(complete(policy, found["home"]), found["version"])
    program = filter_program(PROCESSORS[platform.machine()], worker_rules(os.getpid()))
    listener = kernel.install_filter(encoded(program))
    with socket.socket(fileno=channel) as agent:
        socket.send_fds(agent, [_LISTENER], [listener])
    os.close(listener)  # whoever holds it answers the questions
