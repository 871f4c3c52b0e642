"""Every call that depends on the operating system.

Other modules import this one, so that the package can be imported on Linux, macOS and Windows. Functions
that have no equivalent on a system do nothing there, unless their docstring says otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from ravnest.errors import LaunchError, UnsafeFolderError

IS_POSIX = os.name == "posix"
INTERRUPT = signal.SIGINT if IS_POSIX else getattr(signal, "CTRL_BREAK_EVENT", signal.SIGINT)
"""Signal that asks a child process to end cleanly."""
TERMINATE = signal.SIGTERM
KILL: signal.Signals = getattr(signal, "SIGKILL", signal.SIGTERM)
"""Signal that ends a process at once."""
SIGNALLED = 128
"""Exit code of a program whose child was ended by a signal, less the number of the signal."""
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
_KEPT_BYTES = 32 << 20
"""Free memory at the end of a heap before glibc returns it, and size from which blocks are mapped
separately. glibc itself uses this value after a program has freed a block of this size."""
_ARENAS = 2
"""Number of heaps that the threads share; each keeps freed memory. With glibc's default of eight per
core, a node used 50 MB more and was not faster."""
_PR_SET_PDEATHSIG = 1
_UNRECLAIMABLE = ("RssAnon", "RssShmem", "VmSwap")
"""Memory in ``/proc/PID/status``, in units of 1024 bytes, that belongs to no file on a disk."""
_CPU_INFO = Path("/proc/cpuinfo")
_KERNELS_VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = {_KERNELS_VARIABLE: "AVX512_CORE_FP16"}
"""Environment of a process whose matrix products use everything but AMX instructions."""
_BF16_PRODUCT = (
    "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(a, a)"
)
_PRODUCT_SECONDS = 120.0


def _optional_module(name: str) -> ModuleType | None:
    """Import a module of the standard library, or return ``None`` where the system lacks it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_resource: Any = _optional_module("resource")
_fcntl: Any = _optional_module("fcntl")
_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@functools.cache
def bf16_products_work() -> bool:
    """Return False if the system ends a process that multiplies matrices of bfloat16.

    Some virtual machines report AMX instructions and do not execute them. Where they are reported, a
    product is tried in a process of its own, unless the environment says which instructions to use.
    """
    if _KERNELS_VARIABLE in os.environ or not _reports_amx():
        return True
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-c", _BF16_PRODUCT]
    try:
        done = subprocess.run(  # noqa: S603 - our own command
            command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=_PRODUCT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode != -signal.SIGILL


def working_kernels() -> dict[str, str]:
    """Return the variables with which processes of this machine multiply matrices of bfloat16."""
    return {} if bf16_products_work() else dict(WITHOUT_AMX)


def _reports_amx() -> bool:
    try:
        return "amx_bf16" in _CPU_INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False


def user_id() -> str:
    """Return the number of the current user, or ``user`` where users have none."""
    getuid = getattr(os, "getuid", None)
    return "user" if getuid is None else str(getuid())


# This process


_CAUSES = {
    errno.ENOSPC: "the disk is full: free some space, or use another folder",
    getattr(errno, "EDQUOT", -1): "your disk quota is used up: free some space, or use another folder",
    errno.EROFS: "the file system is read-only: use another folder",
    errno.EACCES: "you have no permission: use another folder, or change its permissions",
    errno.EPERM: "you have no permission: use another folder, or change its permissions",
    errno.EMFILE: "too many files are open: raise the limit with `ulimit -n`",
    errno.ENOMEM: "there is not enough memory",
}


def explained(error: BaseException) -> str:
    """Return an error as a sentence: one of the system says what happened, to which file, what to do."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error) or type(error).__name__
    cause = _CAUSES.get(error.errno, error.strerror or str(error))
    return f"{error.filename}: {cause}" if error.filename else cause


def lower_priority(nice: int) -> None:
    """Lower the priority of this process to ``nice``, if it is not lower already."""
    if IS_POSIX:
        os.nice(max(nice - os.nice(0), 0))
    else:
        psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)  # type: ignore[attr-defined,unused-ignore]


def lower_thread_priority(nice: int) -> None:
    """Lower the priority of this thread, and of those that it starts, to ``nice``; Linux only."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


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


def limit_file_size(limit: int) -> None:
    """Limit the size of files that this process writes, in bytes; larger writes fail."""
    if _resource is not None:
        _, hard = _resource.getrlimit(_resource.RLIMIT_FSIZE)
        most = limit if hard == _resource.RLIM_INFINITY else min(limit, hard)
        _resource.setrlimit(_resource.RLIMIT_FSIZE, (most, most))


def limit_open_files(limit: int) -> None:
    """Limit the number of files and sockets that this process has open."""
    if _resource is not None:
        _, hard = _resource.getrlimit(_resource.RLIMIT_NOFILE)
        most = limit if hard == _resource.RLIM_INFINITY else min(limit, hard)
        _resource.setrlimit(_resource.RLIMIT_NOFILE, (most, most))


def unreclaimable_memory(pid: int) -> int | None:
    """Return the bytes of a process that are no cache of a file; 0 if it has ended; Linux only."""
    if sys.platform != "linux":
        return None
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(1024 * int(fields.get(name, "0").split()[0]) for name in _UNRECLAIMABLE)


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
    _set_thresholds(_LARGE_BLOCK)


@functools.cache
def keep_freed_memory() -> None:
    """Make the allocator keep some freed memory, which saves time; not if large blocks are mapped.

    Do nothing if the user has configured the allocator.
    """
    if _allocator_configured():
        return
    _limit_heaps()
    if not map_large_blocks.cache_info().currsize:
        _set_thresholds(_KEPT_BYTES)


@contextlib.contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Map larger blocks, as ``map_large_blocks`` does, for a while.

    Do nothing if the user has configured the allocator.
    """
    if _allocator_configured() or map_large_blocks.cache_info().currsize:
        yield
        return
    _set_thresholds(_LARGE_BLOCK)
    try:
        yield
    finally:
        if not map_large_blocks.cache_info().currsize:
            _set_thresholds(_KEPT_BYTES)


def _allocator_configured() -> bool:
    return any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)


def _limit_heaps() -> None:
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_ARENA_MAX, _ARENAS)


def _set_thresholds(size: int) -> None:
    """Set the size from which blocks are mapped, and of the free memory that a heap keeps."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_MMAP_THRESHOLD, size)
        _libc.mallopt(_TRIM_THRESHOLD, size)


def return_freed_memory() -> None:
    """Return memory that was freed to the system; the allocator of Linux keeps much of it otherwise."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def end_with_parent() -> None:
    """Have the system kill this process when its parent ends; Linux only."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(KILL))


# Sockets and pipes

_SPLICE_NOW = getattr(os, "SPLICE_F_MOVE", 0) | getattr(os, "SPLICE_F_NONBLOCK", 0)


@functools.cache
def can_splice() -> bool:
    """Return whether bytes can be moved between sockets and pipes without copying; tried once."""
    if not hasattr(os, "splice"):
        return False
    left, right = socket.socketpair()
    reader, writer = os.pipe()
    try:
        left.sendall(b"x")
        return splice(right.fileno(), writer, 1) == 1
    except OSError:  # forbidden by a sandbox
        return False
    finally:
        left.close()
        right.close()
        os.close(reader)
        os.close(writer)


def splice(source: int, target: int, count: int) -> int:
    """Move at most ``count`` bytes, one descriptor being a pipe; requires ``can_splice``.

    Return 0 at the end of the source; ``BlockingIOError`` if nothing can be moved now.
    """
    moved: int = os.splice(source, target, count, flags=_SPLICE_NOW)  # type: ignore[attr-defined,unused-ignore]
    return moved


def open_pipe(size: int) -> tuple[int, int]:
    """Return the two ends of a non-blocking pipe that holds ``size`` bytes, or as many as is allowed."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    command = getattr(_fcntl, "F_SETPIPE_SZ", None)
    if command is not None:
        with contextlib.suppress(OSError):  # beyond the system's limit for pipes of a user
            _fcntl.fcntl(writer, command, size)
    return reader, writer


def tune_tcp(connection: socket.socket, dead_after: float) -> None:
    """Send small messages at once, and find a peer that is gone after about ``dead_after`` seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = max(int(dead_after / 2), 1)
    for name, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPALIVE", idle),  # the same on macOS
        ("TCP_KEEPINTVL", max(int(dead_after / 6), 1)),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(1000 * dead_after)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def raise_file_limit() -> int | None:
    """Raise the number of files that this process may open to the most allowed, and return it.

    ``None`` where there is no such limit.
    """
    if _resource is None:
        return None
    soft, hard = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            _resource.setrlimit(_resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return None if soft == _resource.RLIM_INFINITY else int(soft)


# Child processes


def start_process(
    argv: list[str], *, ends_with_us: bool = False, pass_fds: tuple[int, ...] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process in a process group of its own: Ctrl-C at the terminal reaches it through us only.

    ``ends_with_us``: the system kills the process if the calling thread ends (Linux only). ``options``
    are passed to ``Popen``.
    """
    if not IS_POSIX:
        if pass_fds:
            raise LaunchError("provider workers need Linux or macOS; on Windows, run `ravnest` in WSL")
        options["creationflags"] = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        return subprocess.Popen(argv, **options)  # noqa: S603 - the callers build the command
    if ends_with_us and _libc is not None:
        argv = [sys.executable, "-I", "-S", "-c", _ENDS_WITH_PARENT, str(os.getpid()), *argv]
    return subprocess.Popen(argv, process_group=0, pass_fds=pass_fds, **options)  # noqa: S603


_ENDS_WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(KILL)})
if os.getppid() == int(sys.argv[1]):  # else the parent ended before the call
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Program that becomes another one which the system kills if its parent ends; a process with several
threads can use it, while no code may run between its fork and exec (``preexec_fn``)."""


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


def signal_process(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def make_private(folder: Path) -> None:
    """Create a folder that only its owner can use, or take the rights of others from an existing one.

    ``UnsafeFolderError`` if that is not possible: the folder belongs to another user, who could read and
    replace everything in it, or many use it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not IS_POSIX:
        return
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise UnsafeFolderError(
            f"{folder} belongs to another user, who could read and change its files: choose a folder of "
            "your own"
        )
    if found.st_mode & stat.S_ISVTX:
        raise UnsafeFolderError(f"{folder} is shared by many users: choose a folder inside it")
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
