"""Limits of a worker: memory, cores, priority, folder, environment and lifetime.

The worker confines itself before it reads any data of the job, so that no code has to run between fork
and exec of a process with threads; the agent watches it from outside.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil

from ravnest import host

_PASSED_ON = ("PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
_PASSED_ON_PREFIX = "LC_"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_GRPC_LOG = {"GRPC_VERBOSITY": "info"}
"""Makes gRPC log rejected certificates; ``tls_rejections.py`` reads the lines."""
_NICE = 10
_STACKS = 1 << 30
"""Address space for the stacks of threads: the system counts it as data, but little of it is used."""

BUFFERS = 64 << 20
"""Bytes that libraries take beside a job's tensors while they work: buffers of gRPC and oneDNN, and
freed memory that the allocator keeps. They count as the process's own."""

HOME = "home"
TEMPORARY = "tmp"


def environment(folder: Path, cores: int, source: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a worker: a few variables of ours, and ``folder`` as its home."""
    found = os.environ if source is None else source
    passed = {
        name: value
        for name, value in found.items()
        if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIX)
    }
    own = {"HOME": str(folder / HOME), "TMPDIR": str(folder / TEMPORARY), **_GRPC_LOG}
    return passed | own | dict.fromkeys(_THREADS, str(cores))


def confine() -> None:
    """Confine this process, a worker, before anything else: low priority, no core dumps, bound lifetime.

    The agent holds the other end of stdin, which closes when the agent ends, for whatever reason. On
    Linux the system also kills the worker, even if Python cannot run at that moment.
    """
    host.lower_priority(_NICE)
    host.disable_core_dumps()
    host.end_with_parent()
    threading.Thread(target=_end_with_stdin, name="agent", daemon=True).start()


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
    """Return the resident bytes of a process that the system cannot take back; 0 if it has ended.

    Mapped files, such as training data, are left out: they are cache.
    """
    try:
        found = process.memory_info()
    except psutil.Error:
        return 0
    return int(found.rss - getattr(found, "shared", 0))


def excess(held: int, idle: int, offered: int) -> str:
    """Return why a worker that holds ``held`` bytes must end; an empty string if it may continue."""
    if held <= idle + BUFFERS + offered:
        return ""
    taken = held - idle - BUFFERS
    return (
        f"the worker took {taken / 1e9:.2f} GB for training, {offered / 1e9:.2f} GB are "
        "offered; offer more with --ram, or submit the job with smaller batches"
    )
