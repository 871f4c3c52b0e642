"""A worker process, as its agent sees it: started, watched and ended; its records are passed on."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ravnest.deadlines import LAST_CHECKPOINT, OUTPUT_CLOSE, WORKER_STOP
from ravnest.host import INTERRUPT, KILL, TERMINATE, signal_name
from ravnest.provider.child_process import ChildProcess
from ravnest.provider.events import ConnectionsRejected, RecordsReceived, WorkerEnded
from ravnest.provider.failure import cause_of_exit
from ravnest.provider.job_dir import JobDir, WorkerSettings
from ravnest.provider.limits import HOME, TEMPORARY, environment, excess, held_memory
from ravnest.provider.record_pipe import read_records
from ravnest.provider.tls_rejections import is_log_line, rejection_kind
from ravnest.schemas.providers import FailureCause, TlsRejections
from ravnest.telemetry import WorkerRecord

_SAMPLE_SECONDS = 0.25
_LONGEST_REASON = 2000
_TAIL = 1 << 14
_BOOT = (
    "import os, sys\n"
    "sys.path.insert(0, sys.argv[1])\n"
    "from ravnest.provider.limits import confine\n"
    "confine()\n"
    "from ravnest.provider.worker import work\n"
    "code = work(sys.argv[2], int(sys.argv[3]))\n"
    "sys.stdout.flush()\n"
    "sys.stderr.flush()\n"
    "os._exit(code)\n"
)
"""Program of the worker: the Ravnest that runs here, installed or not, confined before it imports torch,
which takes seconds; it ends without unloading torch, because others may wait for its place."""

OnWorkerEvent = Callable[[RecordsReceived | ConnectionsRejected | WorkerEnded], None]


@dataclass
class WorkerProcess:
    """The worker of one assignment."""

    assignment: str
    job_dir: JobDir
    settings: WorkerSettings
    on_event: OnWorkerEvent
    """Called from several threads; ``WorkerEnded`` comes last."""
    _child: ChildProcess = field(init=False)
    _records: threading.Thread = field(init=False)
    _rejections: TlsRejections = field(default_factory=TlsRejections)
    _kill_at: float | None = None
    _excess: str = ""
    _idle: int | None = None

    def start(self) -> None:
        """Start it; call this from a thread that lives as long as the worker may.

        On Linux a process can ask to be killed when the thread that started it ends.
        """
        job_dir = self.job_dir
        job_dir.write_settings(self.settings)
        for name in (HOME, TEMPORARY):
            (job_dir.folder / name).mkdir(exist_ok=True)
        root = Path(__file__).parents[2]
        reading, writing = os.pipe()
        job_dir.errors.write_bytes(b"")
        job_dir.idle.unlink(missing_ok=True)  # of an earlier worker in this folder
        try:
            with job_dir.output.open("wb") as output:
                self._child = ChildProcess(
                    f"worker {self.assignment}",
                    [sys.executable, "-I", "-c", _BOOT, str(root), str(job_dir.folder), str(writing)],
                    environment(job_dir.folder, self.settings.cores),
                    job_dir.folder,
                    stdout=output,
                    pass_fds=(writing,),
                    holds_stdin=True,
                )
                self._child.start()
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._records = threading.Thread(
            target=read_records, args=(reading, self._on_records), name="worker records", daemon=True
        )
        self._records.start()
        self._child.follow(self._on_error_line, self._on_end)
        threading.Thread(target=self._watch, name="worker watch", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    def stop(self, *, hand_over: bool = False) -> None:
        """Ask the worker to end; it is killed if it does not end in time.

        ``hand_over``: it takes a last checkpoint first.
        """
        self._kill_at = time.monotonic() + WORKER_STOP + (LAST_CHECKPOINT if hand_over else 0.0)
        self._child.send_to_group(TERMINATE if hand_over else INTERRUPT)

    def kill(self) -> None:
        """End the worker at once, with all processes that it may have started."""
        self._child.send_to_group(KILL)
        self._child.wait(WORKER_STOP)

    def _on_error_line(self, line: str) -> None:
        """Keep a line of stderr; lines of gRPC about rejected connections are only counted."""
        if kind := rejection_kind(line):
            found = self._rejections
            self._rejections = found.model_copy(update={kind: getattr(found, kind) + 1})
            self.on_event(ConnectionsRejected(self.assignment, self._rejections))
        elif not is_log_line(line):
            with suppress(OSError), self.job_dir.errors.open("ab") as errors:
                errors.write(f"{line}\n".encode())

    def _on_records(self, records: tuple[WorkerRecord, ...]) -> None:
        self.on_event(RecordsReceived(self.assignment, records))

    def _on_end(self, code: int) -> None:
        self._records.join(OUTPUT_CLOSE)
        cause: FailureCause = "machine" if self._excess else cause_of_exit(code)
        self.on_event(WorkerEnded(self.assignment, self._failure(code), cause))

    def _watch(self) -> None:
        """Look at the worker's memory now and then, and end it if it takes too much or too long."""
        process = psutil.Process(self._child.pid)
        while not self._child.wait(_SAMPLE_SECONDS):
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self._child.send_to_group(KILL)
            if self._idle is None:
                self._idle = _idle_memory(self.job_dir.idle)
            elif not self._excess:
                self._excess = excess(held_memory(process), self._idle, self.settings.ram)
                if self._excess:
                    self._child.send_to_group(KILL)

    def _failure(self, code: int) -> str:
        if self._excess:
            return self._excess
        if code == 0:
            return ""
        if code < 0:
            return f"the worker was ended by {signal_name(-code)}"
        return last_line(self.job_dir.errors) or f"the worker ended with exit code {code}"


def _idle_memory(path: Path) -> int | None:
    try:
        return int(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None


def last_line(path: Path) -> str:
    """Return the last line of a file that is not empty, shortened."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL, 0))
        lines = file.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_LONGEST_REASON]
