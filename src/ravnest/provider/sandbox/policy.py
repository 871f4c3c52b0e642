"""Policy of a worker's files: folders that it may read, and folders that it may change."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM_FOLDERS = (
    "/lib",
    "/lib32",
    "/lib64",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/locale",
    "/usr/share/zoneinfo",
    "/etc/ssl/openssl.cnf",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/proc/self/cgroup",
    "/proc/self/environ",
    "/proc/self/maps",
    "/proc/self/stat",
    "/proc/self/statm",
    "/proc/self/status",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/sys/net/core/somaxconn",
    "/proc/sys/vm/overcommit_memory",
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
    "/sys/kernel/mm/transparent_hugepage",
    "/dev/random",
    "/dev/urandom",
)
"""Shared libraries, and files that describe the machine and the process itself."""
PREFIX_PARTS = ("bin", "lib", "lib32", "lib64", "pyvenv.cfg", "ssl")
"""Parts of a prefix of Python that a process needs. A virtual environment can be a folder with other
files too, for example a project that was made one with ``python -m venv .``."""
DEVICES = ("/dev/null", "/dev/zero")
"""Devices that may be read and written."""


@dataclass(frozen=True)
class FilePolicy:
    """Files that a sandboxed process can open; all others are out of reach."""

    readable: tuple[str, ...]
    writable: tuple[str, ...]
    """Folders in which it also makes, changes, renames and removes files and folders."""


def python_folders(
    path: Sequence[str], prefixes: Iterable[str], home: str, libraries: str = ""
) -> list[str]:
    """Return the folders of a Python installation: in its prefixes, its import path and libraries.

    ``libraries`` is the value of ``LD_LIBRARY_PATH``. A folder that contains the owner's home is left
    out: an import path can be anything, and a worker must not read the home.
    """
    parts = [str(Path(prefix, part)) for prefix in prefixes for part in PREFIX_PARTS]
    found = [*parts, *(each for each in path if each), *filter(None, libraries.split(os.pathsep))]
    kept = (each for each in found if not Path(os.path.realpath(home)).is_relative_to(_real(each)))
    return list(dict.fromkeys(kept))


def _real(path: str) -> str:
    return os.path.realpath(path)


def complete(policy: FilePolicy, owners_home: str) -> FilePolicy:
    """Return the policy with what this process needs beside its own folders: Python and the system."""
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
    libraries = os.environ.get("LD_LIBRARY_PATH", "")
    python = python_folders(sys.path, prefixes, owners_home, libraries)
    return FilePolicy((*policy.readable, *python, *SYSTEM_FOLDERS), policy.writable)
