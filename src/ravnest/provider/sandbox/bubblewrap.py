"""Bubblewrap: a process sees only its own files and itself. Landlock and seccomp apply inside of it.

The network is that of the machine: a socket belongs to the network in which it was made, and the broker
connects the sockets of its worker. All other namespaces are new.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from ravnest.errors import LaunchError
from ravnest.provider.sandbox.policy import DEVICES, SYSTEM_FOLDERS, FilePolicy, python_folders

PROGRAM = "bwrap"
Start = Callable[[list[str], tuple[int, ...]], int]
"""Starts a command that inherits these descriptors, and returns its process id."""

_START_SECONDS = 30.0
_MOST_LINKS = 40
_LONGEST_REPORT = 4096
_FIXED = (
    *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--hostname", "worker"),
)
_READABLE_DEVICES = ("/dev/random", "/dev/urandom")
_SOURCE = str(Path(__file__).parents[3])
"""Folder of the package, installed or not."""
_LINKED = ("/etc/alternatives",)
"""Folders of links to libraries; Landlock lets links through, a mount has to have them."""
_PYTHON = (
    "import json, sys\n"
    "prefixes = sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix\n"
    "print(json.dumps([sys.path, prefixes]))\n"
)


def launched(
    program: str, policy: FilePolicy, home: str, folder: str, argv: Sequence[str], start: Start
) -> int:
    """Start ``argv`` in ``folder`` within bubblewrap; return its process id, as it is outside.

    ``policy`` is that of ``enter_sandbox``, which the process calls afterwards; ``home`` is the owner's.
    ``LaunchError`` if bubblewrap ends before it has started a process.
    """
    reading, writing = os.pipe()
    try:
        try:
            start(command(program, visible(policy, home), folder, argv, writing), (writing,))
        finally:
            os.close(writing)
        return _inner_process(reading, time.monotonic() + _START_SECONDS)
    finally:
        os.close(reading)


def command(
    program: str, policy: FilePolicy, folder: str, argv: Sequence[str], report: int
) -> list[str]:
    """Return the command that runs ``argv`` with only the files of a policy, all others do not exist.

    Bubblewrap writes the process id of the process inside to the descriptor ``report``.
    """
    return [
        *(program, *_FIXED, "--info-fd", str(report)),
        *mounts(policy),
        *("--proc", "/proc", "--remount-ro", "/", "--chdir", folder, "--", *argv),
    ]


def mounts(policy: FilePolicy) -> Iterator[str]:
    """Yield the options that mount the files of a policy, outer folders before inner ones."""
    devices = (*DEVICES, *_READABLE_DEVICES)
    kinds = dict.fromkeys(_outermost(policy.readable), "--ro-bind-try")
    kinds |= dict.fromkeys(devices, "--dev-bind-try") | dict.fromkeys(policy.writable, "--bind")
    for path in sorted(kinds, key=lambda each: (len(Path(each).parts), each)):
        yield from (kinds[path], path, path)


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return the absolute paths that are not within another one; ``/proc`` and ``/dev`` are new."""
    found = {os.path.normpath(each) for each in paths if Path(each).is_absolute()}
    own = {each for each in found if Path(each).parts[1:2] not in (("proc",), ("dev",), ())}
    return sorted(each for each in own if not any(str(above) in own for above in Path(each).parents))


def visible(policy: FilePolicy, home: str) -> FilePolicy:
    """Return the policy with what a process needs to start: Python, its libraries and the system's."""
    path, prefixes = _python_of_workers()
    python = python_folders([*path, _SOURCE], prefixes, home, os.environ.get("LD_LIBRARY_PATH", ""))
    readable = (*policy.readable, *python, *links(sys.executable), *SYSTEM_FOLDERS, *_LINKED)
    return FilePolicy(readable, policy.writable)


def links(path: str) -> list[str]:
    """Return a path and those to which it leads as a symbolic link, one after the other."""
    found = [Path(path)]
    while found[-1].is_symlink() and len(found) <= _MOST_LINKS:
        target = found[-1].parent / found[-1].readlink()
        found.append(Path(os.path.normpath(target)))
    return list(map(str, found))


@cache
def _python_of_workers() -> tuple[list[str], list[str]]:
    """Return the import path and the prefixes of a worker: this process can have further folders."""
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-I", "-c", _PYTHON],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_START_SECONDS,
        check=True,
    )
    path, prefixes = json.loads(done.stdout)
    return path, prefixes


def _inner_process(report: int, deadline: float) -> int:
    """Read the process id that bubblewrap reports."""
    text = b""
    while len(text) < _LONGEST_REPORT:
        left = deadline - time.monotonic()
        ready, _, _ = select.select([report], [], [], max(left, 0))
        if not ready:
            raise LaunchError(f"bubblewrap did not start a process within {_START_SECONDS:.0f} s")
        part = os.read(report, _LONGEST_REPORT)
        if not part:
            break
        text += part
    try:
        return int(json.loads(text)["child-pid"])
    except (ValueError, KeyError) as error:
        raise LaunchError("bubblewrap ended before it had started a process") from error
