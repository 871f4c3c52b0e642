"""Landlock: this process can open only the files of a policy, and use no network of its own."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from ravnest.provider.sandbox import kernel
from ravnest.provider.sandbox.policy import DEVICES, FilePolicy

OLDEST = 2
"""First version in which files can be renamed into other folders; Linux 5.19."""
_EXECUTE, _WRITE, _READ, _LIST = (1 << bit for bit in range(4))
_REMOVE_FOLDER, _REMOVE, _MAKE_FOLDER, _MAKE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_RIGHTS = {1: (1 << 13) - 1, 2: _REFER, 3: _TRUNCATE, 5: 1 << 15}
"""Rights that each version added."""
_TCP = 0b11
"""Rights to bind and to connect, from version 4; the agent has them, this process does not."""
_SCOPES = 0b11
"""Abstract sockets and signals of processes outside, from version 6."""
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE
"""Rights that a rule for a file, not a folder, can have."""


def rights_of(version: int) -> int:
    """Return the rights that a version knows; all are forbidden where no rule permits them."""
    return sum(rights for since, rights in _RIGHTS.items() if since <= version)


def rules(policy: FilePolicy) -> Iterator[tuple[str, int]]:
    """Yield each path with the rights below it: no links, devices, pipes or sockets are made."""
    changes = _WRITE | _TRUNCATE | _REMOVE | _REMOVE_FOLDER | _MAKE | _MAKE_FOLDER | _REFER
    for path in policy.readable:
        yield path, _READ | _LIST
    for path in policy.writable:
        yield path, _READ | _LIST | changes
    for path in DEVICES:
        yield path, _READ | _WRITE


def restrict(policy: FilePolicy, version: int) -> None:
    """Restrict this process, which has one thread only; paths that do not exist are left out.

    Files of ``/proc`` stay open: their rules end when the kernel drops them from its cache.
    """
    handled = rights_of(version)
    ruleset = kernel.create_ruleset(handled, _TCP, _SCOPES, version)
    try:
        for path, rights in rules(policy):
            try:
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except (FileNotFoundError, PermissionError, NotADirectoryError):
                continue
            try:
                is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
                kernel.add_rule(ruleset, descriptor, rights & handled & (-1 if is_folder else _OF_FILES))
            finally:
                if not path.startswith("/proc/"):
                    os.close(descriptor)
        kernel.restrict_self(ruleset)
    finally:
        os.close(ruleset)
