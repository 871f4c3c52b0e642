"""A worker process, as its agent sees it: started, watched and ended; its records are passed on."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import psutil

from ravnest import host
from ravnest.deadlines import LAST_CHECKPOINT, OUTPUT_CLOSE, WORKER_START, WORKER_STOP
from ravnest.host import INTERRUPT, KILL, SIGNALLED, TERMINATE, signal_name, signal_process
from ravnest.provider.child_process import ChildProcess
from ravnest.provider.events import ConnectionsRejected, RecordsReceived, WorkerEnded
from ravnest.provider.failure import cause_of_exit
from ravnest.provider.job_dir import JobDir, WorkerSettings
from ravnest.provider.limits import (
    HOME,
    MOST_IDLE,
    TEMPORARY,
    disk_shortage,
    environment,
    excess,
    folder_usage,
    held_memory,
    job_excess,
    removed_size,
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
from ravnest.schemas.base import plain_lines
from ravnest.schemas.providers import FailureCause, TlsRejections, UsedMemory
from ravnest.store.node_spec import read_node, write_node
from ravnest.telemetry import WorkerRecord
from ravnest.transport.tls_rejections import rejection_kind

logger = logging.getLogger(__name__)

_SAMPLE_SECONDS = 0.25
_LONGEST_REASON = 2000
_TAIL = 1 << 14
_LONGEST_NUMBER = 32
_SAMPLES_PER_WALK = 4
"""Samples of the memory per walk through the job's folder."""
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors that only the worker can cause in its own folder."""
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
    memory: UsedMemory | None = field(default=None, init=False)
    """Memory that the job takes; ``None``: not measured yet."""
    _child: ChildProcess = field(init=False)
    _records: threading.Thread = field(init=False)
    _rejections: TlsRejections = field(default_factory=TlsRejections)
    _kill_at: float | None = None
    _excess: _Excess | None = None
    """Limit that the worker has exceeded, and whose fault that is."""
    _started: float = 0.0
    _idle: int | None = None
    _inner: int | None = None
    """Process id of the worker, if the child process is bubblewrap, whose child it is."""

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
                    self._launch(output, self._command(writing), (writing,))
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

    def _command(self, records: int, order: str = "", channel: int = -1) -> list[str]:
        """Return the command of the worker; ``order`` and ``channel`` are those of ``enter_sandbox``."""
        root, folder = Path(__file__).parents[2], self.job_dir.folder
        return [
            *(sys.executable, "-I", "-c", _BOOT, str(root), str(folder), str(records)),
            *(order, str(channel)),
        ]

    def _launch(self, output: IO[bytes], argv: list[str], descriptors: tuple[int, ...]) -> int:
        """Start the child process; return its process id."""
        self._child = ChildProcess(
            f"worker {self.assignment}",
            argv,
            environment(self.job_dir.scratch, self.settings.cores),
            self.job_dir.folder,
            stdout=output,
            pass_fds=descriptors,
            holds_stdin=True,
        )
        self._child.start()
        return self._child.pid

    def _launch_in_sandbox(self, sandbox: Sandbox, output: IO[bytes], records: int) -> None:
        job_dir = self.job_dir
        spec = with_ip_addresses(read_node(job_dir.node_data, job_dir.read_assignment().node_spec.name))
        write_node(job_dir.node_data, spec)
        files = FilePolicy((str(job_dir.folder),), tuple(map(str, job_dir.written)))
        order = entry_order(files, str(Path.home()), sandbox.version)
        policy = network_policy(spec, self.settings.listen)
        with ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)

            def start(argv: list[str], descriptors: tuple[int, ...]) -> int:
                pid = self._launch(output, argv, (records, theirs.fileno(), *descriptors))
                undo.callback(self._child.kill)
                return pid

            with theirs:
                argv = self._command(records, order, theirs.fileno())
                pid = sandbox.launch(files, str(job_dir.folder), argv, start)
            if pid != self._child.pid:
                self._inner = pid
            broker = SocketBroker(pid, ours, sandbox.processor, policy)
            broker.on_refusal = PeerUpdates(broker, self.find_peers).on_refusal
            broker.start()
            undo.pop_all()

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._child.pid if self._inner is None else self._inner

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker and to the processes that it may have started.

        A worker in bubblewrap has a session of its own, and bubblewrap passes no signals on. All
        processes of its namespace end with it, and then bubblewrap does.
        """
        if self._inner is None:
            self._child.send_to_group(number)
        elif self._child.code is None:
            signal_process(self._inner, number)

    def stop(self, *, hand_over: bool = False) -> None:
        """Ask the worker to end; it is killed if it does not end in time.

        ``hand_over``: it takes a last checkpoint first.
        """
        self._kill_at = time.monotonic() + WORKER_STOP + (LAST_CHECKPOINT if hand_over else 0.0)
        self._signal(TERMINATE if hand_over else INTERRUPT)

    def kill(self) -> None:
        """End the worker at once, with all processes that it may have started."""
        self._signal(KILL)
        self._child.wait(WORKER_STOP)

    def _on_error_line(self, line: str) -> None:
        """Keep a line of stderr; lines about rejected connections are only counted."""
        if kind := rejection_kind(line):
            found = self._rejections
            self._rejections = found.model_copy(update={kind: getattr(found, kind) + 1})
            self.on_event(ConnectionsRejected(self.assignment, self._rejections))
        else:
            with suppress(OSError), self.job_dir.errors.open("ab") as errors:
                errors.write(f"{line}\n".encode())

    def _on_records(self, records: tuple[WorkerRecord, ...]) -> None:
        self.on_event(RecordsReceived(self.assignment, records))

    def _on_end(self, code: int) -> None:
        if self._inner is not None and code > SIGNALLED:  # as bubblewrap tells that a signal ended it
            code = SIGNALLED - code
        failure, cause = f"the worker ended with exit code {code}", cause_of_exit(code)
        try:
            self._records.join(OUTPUT_CLOSE)
            if code and self._excess is None:  # a write that the system refused ended it before
                self._excess = self._job_excess(threads=0, removed=0)
            failure, cause = self._failure(code), cause if self._excess is None else self._excess[1]
        except Exception:  # top of the thread: the agent would wait for this worker for ever
            logger.exception("the reason for the end of the worker of %s is not known", self.assignment)
        self.on_event(WorkerEnded(self.assignment, failure, cause))

    def _watch(self) -> None:
        """Look at the worker now and then, and end it if it takes too much or too long.

        A worker that is not watched has no limits, so it ends if the watch does, for whatever reason.
        """
        try:
            self._sample(psutil.Process(self.pid))
        except psutil.NoSuchProcess:  # it has ended already
            return
        except Exception as error:  # top of the thread
            logger.exception("the worker of %s is not watched any more", self.assignment)
            reason = f"the limits of the worker cannot be checked: {host.explained(error)}"
            self._end_for((reason, "machine"))

    def _end_for(self, found: _Excess) -> None:
        if self._excess is None:
            self._excess = found
            self._signal(KILL)

    def _sample(self, process: psutil.Process) -> None:
        for sample in itertools.count():
            if self._child.wait(_SAMPLE_SECONDS):
                return
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self._signal(KILL)
            held = held_memory(process)
            reason = self._memory_excess(held)
            if self._idle is not None and held:  # 0: it has just ended
                self.memory = following(self.memory, held - self._idle)
            found: _Excess | None = (reason, "machine") if reason else None
            if found is None and sample % _SAMPLES_PER_WALK == 0:
                found = self._usage_excess(process)
            if found is not None:
                self._end_for(found)

    def _memory_excess(self, held: int) -> str:
        if self._idle is None:
            idle = _idle_memory(self.job_dir.idle)
            if idle is not None:
                self._idle = min(idle, held, MOST_IDLE)  # a worker cannot claim more
            elif time.monotonic() - self._started > WORKER_START:
                self._idle = 0
            return ""
        return excess(held, self._idle, self.settings.ram)

    def _usage_excess(self, process: psutil.Process) -> _Excess | None:
        try:
            removed = removed_size(process)
        except OSError as error:
            return _unreadable(error)
        return self._job_excess(thread_count(process), removed)

    def _job_excess(self, threads: int, removed: int) -> _Excess | None:
        """Compare the worker with the limits of a job, which it would exceed anywhere else too.

        ``removed``: bytes of files that it has removed and not closed.
        """
        try:
            usage = folder_usage(self.job_dir.folder)
        except OSError as error:
            return _unreadable(error)
        usage = replace(usage, size=usage.size + removed)
        seconds = time.monotonic() - self._started
        settings = self.settings
        reason = job_excess(usage, threads, seconds, disk=settings.disk, longest=settings.seconds)
        if reason:
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


def following(before: UsedMemory | None, used: int) -> UsedMemory:
    """Return the memory of a worker that takes ``used`` bytes now; libraries may have freed some."""
    now = max(used, 0)
    return UsedMemory(now=now, peak=now if before is None else max(now, before.peak))


def _unreadable(error: OSError) -> _Excess:
    """Return why a worker must end whose files cannot be counted, and whose fault that is."""
    if error.errno in _UNREADABLE:
        return f"the worker made a folder or a file that cannot be read: {error.strerror}", "job"
    return f"the files of the job cannot be counted: {host.explained(error)}", "machine"


def _idle_memory(path: Path) -> int | None:
    """Return what a worker says that it held; one that does not say it properly held nothing."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_LONGEST_NUMBER))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return 0
    return found if isinstance(found, int) else 0


def last_line(path: Path) -> str:
    """Return the last line of a file that is not empty, shortened, without control characters."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL, 0))
        lines = plain_lines(file.read().decode("utf-8", "replace")).split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_LONGEST_REASON]
