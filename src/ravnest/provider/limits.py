"""Limits of a worker: memory, cores, priority, folder, environment and lifetime.

The worker confines itself before it reads any data of the job, so that no code has to run between fork
and exec of a process with threads; the agent watches it from outside.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from ravnest import host
from ravnest.provider.sandbox.entry import enter_sandbox

_PASSED_ON = (
    *("PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"),
    *host.WITHOUT_AMX,
)
_PASSED_ON_PREFIX = "LC_"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
WORKER_NICE = 10
_STACKS = 1 << 30
"""Address space for the stacks of threads: the system counts it as data, but little of it is used."""

BUFFERS = 64 << 20
"""Bytes that libraries take beside a job's tensors while they work: buffers of links and oneDNN, and
freed memory that the allocator keeps. They count as the process's own."""

MOST_ENTRIES = 100_000
"""Files and folders that the folder of a job may have."""
LEAST_FREE = 256 << 20
"""Bytes of the disk that a worker leaves to its owner."""
MOST_THREADS = 1024
"""Threads that a worker may have; some libraries start one for each core and peer."""
MOST_OPEN_FILES = 4096
"""Files and sockets that a worker may have open."""
MOST_IDLE = 1 << 30
"""Bytes that count as held before a worker read the job's data, at most: that is its own statement."""

_FIRST = 1
"""Process id of a worker in bubblewrap: it is the first process of its namespace."""

HOME = "home"
TEMPORARY = "tmp"


def environment(folder: Path, cores: int, source: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a worker: a few variables of ours; its home is in ``folder``."""
    found = os.environ if source is None else source
    passed = {
        name: value
        for name, value in found.items()
        if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIX)
    }
    own = {"HOME": str(folder / HOME), "TMPDIR": str(folder / TEMPORARY)}
    return passed | own | host.working_kernels() | dict.fromkeys(_THREADS, str(cores))


def confine(sandbox: str = "", channel: int = -1) -> None:
    """Confine this process, a worker, before anything else: low priority, no core dumps, bound lifetime.

    ``sandbox`` and ``channel`` are the arguments of ``enter_sandbox``; without them there is no sandbox.

    The agent holds the other end of stdin, which closes when the agent ends, for whatever reason. On
    Linux the system also kills the worker, even if Python cannot run at that moment.
    """
    host.lower_priority(WORKER_NICE)
    host.disable_core_dumps()
    host.end_with_parent()
    if os.getpid() == _FIRST:
        signal.signal(signal.SIGTERM, _end_by_signal)
    if sandbox:
        enter_sandbox(sandbox, channel)
    threading.Thread(target=_end_with_stdin, name="agent", daemon=True).start()


def _end_by_signal(number: int, _frame: FrameType | None) -> None:
    """End as other processes do: the system spares the first process of a namespace."""
    os._exit(host.SIGNALLED + number)


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def limit_memory(room: int) -> int:
    """Allow this process ``room`` more bytes, once all is imported; return the bytes held already.

    The limit of the system counts reserved memory too, so it is coarse: it refuses very large
    allocations, and the agent's watch finds the rest.
    """
    process = psutil.Process()
    host.limit_data_memory(host.data_memory(process) + room + _STACKS)
    return held_memory(process)


def held_memory(process: psutil.Process) -> int:
    """Return the bytes of a process that the system cannot take back; 0 if it has ended.

    Mapped files, such as training data, are left out: they are cache. Shared memory that is no file on
    a disk, and what was swapped out, count.
    """
    held = host.unreclaimable_memory(process.pid)
    if held is not None:
        return held
    try:
        found = process.memory_info()
    except psutil.Error:
        return 0
    return int(found.rss - getattr(found, "shared", 0))


def thread_count(process: psutil.Process) -> int:
    """Return the number of threads of a process; 0 if it has ended."""
    try:
        return int(process.num_threads())
    except psutil.Error:
        return 0


def excess(held: int, idle: int, offered: int) -> str:
    """Return why a worker that holds ``held`` bytes must end; an empty string if it may continue."""
    if held <= idle + BUFFERS + offered:
        return ""
    taken = held - idle - BUFFERS
    return (
        f"the worker took {taken / 1e9:.2f} GB for training, {offered / 1e9:.2f} GB are "
        "offered; offer more with --ram, or submit the job with smaller batches"
    )


def limit_files(size: int) -> None:
    """Refuse files of this process that are larger than a whole job may be, and too many open ones.

    The agent adds their sizes up.
    """
    host.limit_file_size(size)
    host.limit_open_files(MOST_OPEN_FILES)


@dataclass(frozen=True)
class FolderUsage:
    """Disk space and entries of a folder, and the space that its disk has left."""

    size: int
    entries: int
    free: int


def folder_usage(folder: Path) -> FolderUsage:
    """Return what a folder that a worker writes takes on the disk, links not followed.

    The walk ends early at ``MOST_ENTRIES``; ``OSError`` if a folder cannot be read.
    """
    size = entries = 0
    pending = [str(folder)]
    while pending and entries <= MOST_ENTRIES:
        try:
            with os.scandir(pending.pop()) as found:
                for each in itertools.islice(found, MOST_ENTRIES + 1):
                    entries += 1
                    if each.is_dir(follow_symlinks=False):
                        pending.append(each.path)
                    with suppress(FileNotFoundError):
                        size += _disk_size(each.stat(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):  # the worker removes and renames at any time
            continue
    return FolderUsage(size, entries, shutil.disk_usage(folder).free)


def removed_size(process: psutil.Process) -> int:
    """Return the disk space of files that a process has removed and still has open; 0 if it has ended.

    ``OSError`` if its open files cannot be read.
    """
    found: dict[tuple[int, int], int] = {}
    try:
        for path in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                each = path.stat()
                if stat.S_ISREG(each.st_mode) and each.st_nlink == 0:
                    found[each.st_dev, each.st_ino] = _disk_size(each)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError:  # a process that is just ending belongs to root
        if held_memory(process):
            raise
        return 0
    return sum(found.values())


def _disk_size(found: os.stat_result) -> int:
    return 512 * found.st_blocks if hasattr(found, "st_blocks") else found.st_size


def disk_shortage(usage: FolderUsage) -> str:
    """Return why a worker must end although its job has exceeded no limit: the owner's disk is full."""
    if usage.free >= LEAST_FREE:
        return ""
    return f"the disk of this provider has only {usage.free / 1e9:.2f} GB left"


def job_excess(usage: FolderUsage, threads: int, seconds: float, *, disk: int, longest: float) -> str:
    """Return which limit a job has exceeded, as the reason for its end; an empty string if none."""
    if seconds > longest:
        return (
            f"the worker ran for {seconds / 3600:.2g} hours, the most that this provider allows a job; "
            "submit the rest as another job, or raise --job-hours at the provider"
        )
    if threads > MOST_THREADS:
        return f"the worker started {threads} threads; a job may have {MOST_THREADS}"
    if usage.entries > MOST_ENTRIES:
        return f"the worker made more than {MOST_ENTRIES} files; a job may have no more"
    if usage.size > disk:
        return (
            f"the files of the job take {usage.size / 1e9:.2f} GB, {disk / 1e9:.2f} GB are allowed; "
            "raise --disk at the provider, or submit a smaller job"
        )
    return ""
