"""Processes that run side by side, show their output line by line, and end together."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ravnest.errors import LaunchError
from ravnest.provider.signals import interrupts
from ravnest.provider.supervision import (
    DeadlinePassed,
    Ended,
    Event,
    Interrupted,
    OutputClosed,
    Supervision,
)

logger = logging.getLogger(__name__)

_LONGEST_LINE = 1 << 16
_OUTPUT_SECONDS = 2.0
"""How long to wait for the rest of the output, which a grandchild may keep open."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

Show = Callable[[str, str], None]
"""Called with the name of a process and a line of its output, from several threads."""


@dataclass(frozen=True)
class Command:
    """A process to start."""

    name: str
    argv: Sequence[str]


def run_together(
    commands: Sequence[Command],
    supervision: Supervision,
    show: Show,
    *,
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> None:
    """Run all to their end, as ``supervision`` decides.

    They have process groups of their own, so that an interrupt at the terminal reaches them once,
    through us; on Linux they are killed if this process is.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    running: dict[str, subprocess.Popen[bytes]] = {}
    with interrupts(lambda: events.put(Interrupted())):
        try:
            for command in commands:  # all before the first thread: see _start
                running[command.name] = _start(command, environment, folder)
            readers = [_follow(name, process, show, events) for name, process in running.items()]
            _supervise(running, supervision, events)
        finally:
            for process in running.values():
                process.kill()  # does nothing to one that has ended
                process.wait()
    for reader in readers:
        reader.join(_OUTPUT_SECONDS)


def _supervise(
    running: Mapping[str, subprocess.Popen[bytes]],
    supervision: Supervision,
    events: queue.SimpleQueue[Event],
) -> None:
    while supervision.running:
        event = _next(events, supervision.deadline)
        for send in supervision.handle(event, time.monotonic()):
            logger.info("%s gets %s", send.name, send.signal.name)
            running[send.name].send_signal(send.signal)


def _next(events: queue.SimpleQueue[Event], deadline: float | None) -> Event:
    left = None if deadline is None else max(deadline - time.monotonic(), 0)
    try:
        return events.get(timeout=left)
    except queue.Empty:
        return DeadlinePassed()


def _start(
    command: Command, environment: Mapping[str, str], folder: Path | None
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603 - the user's own script
            command.argv,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_die_with_parent(os.getpid()),  # noqa: PLW1509 - no thread of ours runs yet
        )
    except OSError as error:
        raise LaunchError(f"{command.name} cannot be started: {error}") from error


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """Runs in the child before its program; calls nothing that could need a lock."""
    if _LIBC is None:
        return None
    prctl = _LIBC.prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it was gone before we asked
            os._exit(1)

    return ask


def _follow(
    name: str, process: subprocess.Popen[bytes], show: Show, events: queue.SimpleQueue[Event]
) -> threading.Thread:
    """Show what a process writes and report its end, each in a thread; the one that reads."""
    assert process.stdout is not None
    reader = threading.Thread(
        target=_read, args=(name, process.stdout, show, events), name=f"output of {name}", daemon=True
    )
    reader.start()

    def wait() -> None:
        code = process.wait()
        reader.join(_OUTPUT_SECONDS)  # its last words first
        events.put(Ended(name, code))

    threading.Thread(target=wait, name=f"end of {name}", daemon=True).start()
    return reader


def _read(name: str, stream: IO[bytes], show: Show, events: queue.SimpleQueue[Event]) -> None:
    """Read to the end, also when nobody can be shown it: a full pipe would stop the process."""
    shown = True
    while line := stream.readline(_LONGEST_LINE):
        if not shown:
            continue
        try:
            show(name, line.decode("utf-8", "replace").rstrip("\n"))
        except (OSError, SystemExit):  # rich leaves by SystemExit when a pipe is closed
            shown = False
            events.put(OutputClosed())
