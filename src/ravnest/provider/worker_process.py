"""A worker process, as its agent sees it: started, watched and ended; its records are passed on."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from ravnest.deadlines import LAST_CHECKPOINT, OUTPUT_CLOSE, WORKER_STOP
from ravnest.host import INTERRUPT, KILL, TERMINATE, signal_name
from ravnest.provider.child_process import ChildProcess
from ravnest.provider.events import ConnectionsRejected, RecordsReceived, WorkerEnded
from ravnest.provider.failure import cause_of_exit
from ravnest.provider.job_dir import JobDir, WorkerSettings
from ravnest.provider.limits import (
    HOME,
    TEMPORARY,
    disk_shortage,
    environment,
    excess,
    folder_usage,
    held_memory,
    job_excess,
    thread_count,
)
from ravnest.provider.record_pipe import read_records
from ravnest.provider.sandbox.choice import Sandbox
from ravnest.provider.sandbox.entry import entry_order
from ravnest.provider.sandbox.policy import FilePolicy
from ravnest.provider.sandbox.socket_broker import SocketBroker
from ravnest.provider.sandbox.worker_network import (
    FindPeers,
    PeerUpdates,
    network_policy,
    with_ip_addresses,
)
from ravnest.provider.tls_rejections import is_log_line, rejection_kind
from ravnest.schemas.providers import FailureCause, TlsRejections
from ravnest.store.node_spec import read_node, write_node
from ravnest.telemetry import WorkerRecord

_SAMPLE_SECONDS = 0.25
_LONGEST_REASON = 2000
_TAIL = 1 << 14
_LONGEST_NUMBER = 32
_SAMPLES_PER_WALK = 4
"""Samples of the memory per walk through the job's folder."""
_BOOT = (
    "import os, sys\n"
    "sys.path.insert(0, sys.argv[1])\n"
    "from ravnest.provider.limits import confine\n"
    "confine(sys.argv[4], int(sys.argv[5]))\n"
    "from ravnest.provider.worker import work\n"
    "code = work(sys.argv[2], int(sys.argv[3]))\n"
    "sys.stdout.flush()\n"
    "sys.stderr.flush()\n"
    "os._exit(code)\n"
)
"""Program of the worker: the Ravnest that runs here, installed or not, confined before it imports torch,
which takes seconds; it ends without unloading torch, because others may wait for its place."""

_Excess = tuple[str, FailureCause]
OnWorkerEvent = Callable[[RecordsReceived | ConnectionsRejected | WorkerEnded], None]


@dataclass
class WorkerProcess:
    """The worker of one assignment."""

    assignment: str
    job_dir: JobDir
    settings: WorkerSettings
    on_event: OnWorkerEvent
    """Called from several threads; ``WorkerEnded`` comes last."""
    sandbox: Sandbox | None
    find_peers: FindPeers
    _child: ChildProcess = field(init=False)
    _records: threading.Thread = field(init=False)
    _rejections: TlsRejections = field(default_factory=TlsRejections)
    _kill_at: float | None = None
    _excess: _Excess | None = None
    """Limit that the worker has exceeded, and whose fault that is."""
    _started: float = 0.0
    _idle: int | None = None

    def start(self) -> None:
        """Start it; call this from a thread that lives as long as the worker may.

        On Linux a process can ask to be killed when the thread that started it ends.
        """
        job_dir = self.job_dir
        job_dir.write_settings(self.settings)
        for folder in (*job_dir.written, job_dir.scratch / HOME, job_dir.scratch / TEMPORARY):
            folder.mkdir(exist_ok=True)
        reading, writing = os.pipe()
        job_dir.errors.write_bytes(b"")
        job_dir.idle.unlink(missing_ok=True)  # of an earlier worker in this folder
        self._started = time.monotonic()
        try:
            with job_dir.output.open("wb") as output:
                if self.sandbox is None:
                    self._launch(output, writing)
                else:
                    self._launch_in_sandbox(self.sandbox, output, writing)
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

    def _launch(
        self, output: IO[bytes], records: int, order: str = "", channel: socket.socket | None = None
    ) -> None:
        """Start the process; ``order`` and ``channel`` are for its entry into a sandbox."""
        job_dir, root = self.job_dir, Path(__file__).parents[2]
        end = -1 if channel is None else channel.fileno()
        self._child = ChildProcess(
            f"worker {self.assignment}",
            [
                *(sys.executable, "-I", "-c", _BOOT, str(root), str(job_dir.folder), str(records)),
                *(order, str(end)),
            ],
            environment(job_dir.scratch, self.settings.cores),
            job_dir.folder,
            stdout=output,
            pass_fds=(records,) if channel is None else (records, end),
            holds_stdin=True,
        )
        self._child.start()

    def _launch_in_sandbox(self, sandbox: Sandbox, output: IO[bytes], records: int) -> None:
        job_dir = self.job_dir
        spec = with_ip_addresses(read_node(job_dir.node_data, job_dir.read_assignment().node_spec.name))
        write_node(job_dir.node_data, spec)
        order = entry_order(
            FilePolicy((str(job_dir.folder),), tuple(map(str, job_dir.written))),
            str(Path.home()),
            sandbox.version,
        )
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._launch(output, records, order, theirs)
            broker = SocketBroker(
                self._child.pid, ours, sandbox.processor, network_policy(spec, self.settings.listen)
            )
            broker.on_refusal = PeerUpdates(broker, self.find_peers).on_refusal
            broker.start()
        except BaseException:
            ours.close()
            raise

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
        if code and self._excess is None:  # a write that the system refused ended it before the watch
            self._excess = self._job_excess(threads=0)
        cause = cause_of_exit(code) if self._excess is None else self._excess[1]
        self.on_event(WorkerEnded(self.assignment, self._failure(code), cause))

    def _watch(self) -> None:
        """Look at the worker now and then, and end it if it takes too much or too long."""
        process = psutil.Process(self._child.pid)
        for sample in itertools.count():
            if self._child.wait(_SAMPLE_SECONDS):
                return
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self._child.send_to_group(KILL)
            reason = self._memory_excess(held_memory(process))
            found: _Excess | None = (reason, "machine") if reason else None
            if found is None and sample % _SAMPLES_PER_WALK == 0:
                found = self._job_excess(thread_count(process))
            if found is not None and self._excess is None:
                self._excess = found
                self._child.send_to_group(KILL)

    def _memory_excess(self, held: int) -> str:
        if self._idle is None:
            idle = _idle_memory(self.job_dir.idle)
            self._idle = None if idle is None else min(idle, held)  # a worker cannot claim more
            return ""
        return excess(held, self._idle, self.settings.ram)

    def _job_excess(self, threads: int) -> _Excess | None:
        """Compare the worker with the limits of a job, which it would exceed anywhere else too."""
        usage = None
        with suppress(PermissionError):
            usage = folder_usage(self.job_dir.folder)
        seconds = time.monotonic() - self._started
        settings = self.settings
        reason = job_excess(usage, threads, seconds, disk=settings.disk, longest=settings.seconds)
        if reason or usage is None:
            return reason, "job"
        shortage = disk_shortage(usage)
        return (shortage, "machine") if shortage else None

    def _failure(self, code: int) -> str:
        if self._excess is not None:
            return self._excess[0]
        if code == 0:
            return ""
        if code < 0:
            return f"the worker was ended by {signal_name(-code)}"
        return last_line(self.job_dir.errors) or f"the worker ended with exit code {code}"


def _idle_memory(path: Path) -> int | None:
    try:
        with path.open("rb") as file:
            return int(json.loads(file.read(_LONGEST_NUMBER)))
    except FileNotFoundError:
        return None
    except ValueError:  # a worker that does not say what it held held nothing
        return 0


def last_line(path: Path) -> str:
    """Return the last line of a file that is not empty, shortened."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL, 0))
        lines = file.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_LONGEST_REASON]
