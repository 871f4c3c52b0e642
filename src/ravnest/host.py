"""Every call that depends on the operating system.

Other modules import this one, so that the package can be imported on Linux, macOS and Windows. Functions
that have no equivalent on a system do nothing there, unless their docstring says otherwise.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import psutil

from ravnest.errors import LaunchError

IS_POSIX = os.name == "posix"
INTERRUPT = signal.SIGINT if IS_POSIX else getattr(signal, "CTRL_BREAK_EVENT", signal.SIGINT)
"""Signal that asks a child process to end cleanly."""
TERMINATE = signal.SIGTERM
KILL: signal.Signals = getattr(signal, "SIGKILL", signal.SIGTERM)
"""Signal that ends a process at once."""
END_SIGNALS: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    if hasattr(signal, name)
)
"""Signals by which a user or the system asks this process to end."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Settings of glibc's ``mallopt``."""
_LARGE_BLOCK = 1 << 18
"""Size from which ``map_large_blocks`` maps a block. With 1 MB, the freed activations of GPT-2 small in
the heaps took 30 to 65 MB per node, with 256 kB 5 to 9 MB, at the same user time."""
_HUGE_BLOCK = 32 << 20
"""Size from which ``keep_freed_memory`` maps blocks separately; glibc accepts no larger one."""
_KEPT_BYTES = 256 << 20
"""Free memory at the end of a heap before glibc returns it. An update frees all gradients, and the next
batch needs it again: with 32 MB, three nodes that trained 76 MB of weights took a tenth more CPU time,
since they got that memory from the system again for each batch."""
_ARENAS = 2
"""Number of heaps that the threads share; each keeps freed memory. With glibc's default of eight per
core, a node used 50 MB more and was not faster."""
_PR_SET_PDEATHSIG = 1


def _optional_module(name: str) -> ModuleType | None:
    """Import a module of the standard library, or return ``None`` where the system lacks it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_resource: Any = _optional_module("resource")
_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def user_id() -> str:
    """Return the number of the current user, or ``user`` where users have none."""
    getuid = getattr(os, "getuid", None)
    return "user" if getuid is None else str(getuid())


# This process


def lower_priority(nice: int) -> None:
    """Lower the priority of this process to ``nice``, if it is not lower already."""
    if IS_POSIX:
        os.nice(max(nice - os.nice(0), 0))
    else:
        psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)  # type: ignore[attr-defined,unused-ignore]


def disable_core_dumps() -> None:
    """Write no core dump if this process crashes: it would hold the job's data."""
    if _resource is not None:
        _resource.setrlimit(_resource.RLIMIT_CORE, (0, 0))


def limit_data_memory(limit: int) -> None:
    """Limit the data memory of this process, in bytes, reserved memory included; Linux only."""
    if sys.platform == "linux" and _resource is not None:
        _, hard = _resource.getrlimit(_resource.RLIMIT_DATA)
        most = limit if hard == _resource.RLIM_INFINITY else min(limit, hard)
        _resource.setrlimit(_resource.RLIMIT_DATA, (most, most))


def data_memory(process: psutil.Process) -> int:
    """Return the bytes that count against ``limit_data_memory``; 0 without such a limit."""
    return int(getattr(process.memory_info(), "data", 0))


@functools.cache
def map_large_blocks() -> None:
    """Give each larger block of memory pages of its own, which return to the system once it is freed.

    Heaps keep such blocks otherwise. It takes some time for each block, so that it is for processes
    whose memory is short. ``keep_freed_memory`` does not undo it.
    """
    _limit_heaps()
    _set_thresholds(_LARGE_BLOCK, _LARGE_BLOCK)


@functools.cache
def keep_freed_memory() -> None:
    """Make the allocator keep some freed memory, which saves time; not if large blocks are mapped.

    Do nothing if the user has configured the allocator.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    _limit_heaps()
    if not map_large_blocks.cache_info().currsize:
        _set_thresholds(_HUGE_BLOCK, _KEPT_BYTES)


def _limit_heaps() -> None:
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_ARENA_MAX, _ARENAS)


def _set_thresholds(mapped: int, kept: int) -> None:
    """Set the size from which blocks are mapped, and of the free memory that a heap keeps."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_MMAP_THRESHOLD, mapped)
        _libc.mallopt(_TRIM_THRESHOLD, kept)


def return_freed_memory() -> None:
    """Return memory that was freed to the system; the allocator of Linux keeps much of it otherwise."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def end_with_parent() -> None:
    """Have the system kill this process when its parent ends; Linux only."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(KILL))


# Child processes


def start_process(
    argv: list[str], *, ends_with_us: bool = False, pass_fds: tuple[int, ...] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process in a process group of its own: Ctrl-C at the terminal reaches it through us only.

    ``ends_with_us``: the system kills the process if this one ends (Linux only); do not use it once
    this process has several threads, as code runs between fork and exec. ``options`` are passed to
    ``Popen``.
    """
    if not IS_POSIX:
        if pass_fds:
            raise LaunchError("provider workers need Linux or macOS; on Windows, run `ravnest` in WSL")
        options["creationflags"] = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        return subprocess.Popen(argv, **options)  # noqa: S603 - the callers build the command
    return subprocess.Popen(  # noqa: S603 - the callers build the command
        argv,
        process_group=0,
        pass_fds=pass_fds,
        preexec_fn=_before_exec(os.getpid()) if ends_with_us else None,  # noqa: PLW1509
        **options,
    )


def _before_exec(parent: int) -> Callable[[], None] | None:
    """Return a function for the child to run before its program; it takes no lock."""
    if _libc is None:
        return None
    prctl = _libc.prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(KILL))
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)

    return ask


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process of ``start_process`` and to all processes of its group."""
    if process.returncode is not None:
        return
    if not IS_POSIX:
        process.send_signal(number)
        return
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
