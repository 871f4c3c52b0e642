"""Child processes: started in process groups of their own, with threads that read their output."""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from ravnest import host
from ravnest.deadlines import OUTPUT_CLOSE
from ravnest.errors import LaunchError
from ravnest.provider.signals import interrupts
from ravnest.provider.supervision import (
    Interrupted,
    OutputClosed,
    PauseOver,
    ProcessEnded,
    SendSignal,
    StartAgain,
    Supervision,
    SupervisionEvent,
)

logger = logging.getLogger(__name__)

_LONGEST_LINE = 1 << 16

OnLine = Callable[[str], None]
"""Called with each line of the output, without its line break, from a thread of the child process."""
OnEnd = Callable[[int], None]
"""Called with the exit code, after the last line; a negative code is the number of a signal."""
Show = Callable[[str, str], None]
"""Called with the name of a process and a line of its output, from several threads."""
Say = Callable[[str], None]
"""Called with a line about a process."""


@dataclass
class ChildProcess:
    """A process of ours: ``start`` it, ``follow`` it, signal it, wait for its end.

    Its output, stdout and stderr together, is read line by line; with ``stdout``, only stderr is, and
    stdout is written to that file.
    """

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    folder: Path | None = None
    stdout: IO[bytes] | None = None
    pass_fds: tuple[int, ...] = ()
    """Descriptors that the process inherits under the same numbers."""
    holds_stdin: bool = False
    """Keep the other end of its stdin open until it ends, so that it notices our end."""
    ends_with_us: bool = False
    """Have the system kill it if this process ends; see ``host.start_process``."""
    _process: subprocess.Popen[bytes] = field(init=False, repr=False)
    _ended: threading.Event = field(default_factory=threading.Event, repr=False)

    def start(self) -> None:
        """Start the process; ``LaunchError`` if the system cannot."""
        alone = self.stdout is not None
        try:
            self._process = host.start_process(
                list(self.argv),
                ends_with_us=self.ends_with_us,
                pass_fds=self.pass_fds,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE if self.holds_stdin else subprocess.DEVNULL,
                stdout=self.stdout if alone else subprocess.PIPE,
                stderr=subprocess.PIPE if alone else subprocess.STDOUT,
            )
        except OSError as error:
            raise LaunchError(f"{self.name} cannot be started: {error}") from error

    def again(self, **environment: str) -> ChildProcess:
        """Return the same process, not yet started, with further environment variables."""
        return replace(self, environment={**self.environment, **environment}, _ended=threading.Event())

    def follow(self, on_line: OnLine, on_end: OnEnd | None = None) -> None:
        """Read the output and wait for the end, each in a thread."""
        stream = self._process.stdout or self._process.stderr
        assert stream is not None
        reader = threading.Thread(
            target=_read_lines, args=(stream, on_line), name=f"output of {self.name}", daemon=True
        )

        def wait() -> None:
            code = self._process.wait()
            self._ended.set()
            if self._process.stdin is not None:
                self._process.stdin.close()
            reader.join(
                OUTPUT_CLOSE
            )  # the last lines come before the end; a grandchild may keep it open
            if on_end is not None:
                on_end(code)

        reader.start()
        threading.Thread(target=wait, name=f"end of {self.name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code; ``None`` while the process runs."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        self._process.send_signal(number)

    def send_to_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and to the processes that it started."""
        host.signal_group(self._process, number)

    def kill(self) -> None:
        """End the process at once, if it runs, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most ``seconds``, once ``follow`` runs; return ``True`` if the process has ended."""
        return self._ended.wait(seconds)


def _read_lines(stream: IO[bytes], on_line: OnLine) -> None:
    with stream:
        while line := stream.readline(_LONGEST_LINE):
            on_line(line.decode("utf-8", "replace").rstrip("\n"))


def run_together(
    children: Sequence[ChildProcess],
    supervision: Supervision,
    show: Show,
    *,
    say: Say = lambda _line: None,
    restarted: Mapping[str, str] | None = None,
) -> None:
    """Run all processes to their end; ``supervision`` decides which is started again or gets a signal.

    ``restarted`` holds further environment variables of processes that are started again.
    """
    events: queue.SimpleQueue[SupervisionEvent] = queue.SimpleQueue()
    running: dict[str, ChildProcess] = {}

    def start_again(order: StartAgain) -> None:
        child = running[order.name].again(**(restarted or {}))
        try:
            child.start()
        except LaunchError as error:
            logger.warning("%s", error)
            events.put(ProcessEnded(order.name, 1))
            return
        running[order.name] = child
        _say(order.reason, say, events)
        _follow(child, show, events)

    with interrupts(lambda: events.put(Interrupted())):
        try:
            for child in children:
                child.start()
                running[child.name] = child
            for child in children:
                _follow(child, show, events)
            _supervise(running, supervision, events, start_again)
        finally:
            for child in running.values():
                child.kill()


def _say(line: str, say: Say, events: queue.SimpleQueue[SupervisionEvent]) -> None:
    try:
        say(line)
    except (OSError, SystemExit):  # rich raises SystemExit when a pipe is closed
        events.put(OutputClosed())


def _follow(child: ChildProcess, show: Show, events: queue.SimpleQueue[SupervisionEvent]) -> None:
    name, shown = child.name, True

    def on_line(line: str) -> None:
        """Show a line; read on if that is no longer possible, as a full pipe would stop the process."""
        nonlocal shown
        if not shown:
            return
        try:
            show(name, line)
        except (OSError, SystemExit):  # rich raises SystemExit when a pipe is closed
            shown = False
            events.put(OutputClosed())

    child.follow(on_line, lambda code: events.put(ProcessEnded(name, code)))


def _supervise(
    running: Mapping[str, ChildProcess],
    supervision: Supervision,
    events: queue.SimpleQueue[SupervisionEvent],
    start_again: Callable[[StartAgain], None],
) -> None:
    while supervision.active:
        event = _next(events, supervision.deadline)
        for action in supervision.handle(event, time.monotonic()):
            match action:
                case SendSignal(name, number):
                    logger.info("%s gets %s", name, number.name)
                    running[name].send(number)
                case StartAgain():
                    start_again(action)


def _next(events: queue.SimpleQueue[SupervisionEvent], deadline: float | None) -> SupervisionEvent:
    left = None if deadline is None else max(deadline - time.monotonic(), 0)
    try:
        return events.get(timeout=left)
    except queue.Empty:
        return PauseOver()
