"""A worker within what was offered: memory, cores, priority, folder, environment, and lifetime.

The worker confines itself before it reads anything of the job's, so that nothing has to run between
fork and exec of a process with threads; the agent watches it from outside.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil

_PASSED_ON = ("PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
_PASSED_ON_PREFIX = "LC_"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_TELLS_OF_STRANGERS = {"GRPC_VERBOSITY": "info"}
"""gRPC says nowhere else that it refused a certificate; ``strangers.py`` reads it."""
_NICE = 10
_PR_SET_PDEATHSIG = 1
_STACKS = 1 << 30
"""Address space for the stacks of threads: counted by the system as data, used in small part."""

BUFFERS = 64 << 20
"""Bytes that libraries take beside a job's tensors once they are at work: buffers of gRPC and oneDNN,
and freed memory that the allocator keeps. They count as the process's own."""

HOME = "home"
TEMPORARY = "tmp"


def environment(folder: Path, cores: int, source: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a worker in ``folder`` sees of the environment: a few names, and folders of its own."""
    found = os.environ if source is None else source
    passed = {
        name: value
        for name, value in found.items()
        if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIX)
    }
    own = {"HOME": str(folder / HOME), "TMPDIR": str(folder / TEMPORARY), **_TELLS_OF_STRANGERS}
    return passed | own | dict.fromkeys(_THREADS, str(cores))


def confine() -> None:
    """In the worker, before all else: low priority, no core dumps, and an end with the agent's end.

    The agent holds the other end of our stdin; it closes when the agent ends, however it ends. On
    Linux the system kills us even where Python cannot run.
    """
    os.nice(max(_NICE - os.nice(0), 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    threading.Thread(target=_end_with_stdin, name="agent", daemon=True).start()


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def limit_memory(room: int) -> int:
    """In the worker, once all is imported: at most ``room`` bytes more; the bytes in use already.

    The system's own limit counts reserved memory too, so that it is a coarse one: it stops what
    would take too much at once, the agent's watch the rest.
    """
    process = psutil.Process()
    if sys.platform == "linux":
        most = process.memory_info().data + room + _STACKS
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return held_memory(process)


def held_memory(process: psutil.Process) -> int:
    """Resident bytes of a process that the system cannot take back; 0 if it has ended.

    Files that are mapped, such as training data, are left out: they are cache.
    """
    try:
        found = process.memory_info()
    except psutil.Error:
        return 0
    return int(found.rss - getattr(found, "shared", 0))


def excess(held: int, idle: int, offered: int) -> str:
    """Why a worker that holds so much must end; empty if it may go on."""
    if held <= idle + BUFFERS + offered:
        return ""
    taken = held - idle - BUFFERS
    return (
        f"the worker took {taken / 1e9:.2f} GB for training, {offered / 1e9:.2f} GB are "
        "offered; offer more with --ram, or submit the job with smaller batches"
    )
