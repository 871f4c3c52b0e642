"""Calls of the Linux kernel that Python has no functions for: Landlock, seccomp, capabilities.

Imported on all systems; the functions raise ``OSError`` where the kernel lacks the call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from typing import Any

_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_numbers = {"x86_64": (317, 126), "aarch64": (277, 91)}
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _PIDFD_GETFD = 444, 445, 446, 438
_SET_NO_NEW_PRIVS = 38
_PATH_BENEATH = 1
_WITH_NETWORK, _WITH_SCOPES = 4, 6
"""Versions of Landlock that know further fields."""
_VERSION = 1
_FILTER, _ACTION_AVAILABLE = 1, 2
_NEW_LISTENER, _ALLOW_SPECULATION = 8, 4
"""Flags of a filter. Before Linux 5.16, a filtered process is slower unless speculation is allowed."""
_CAPABILITIES_VERSION = 0x20080522
_ASK = 0x7FC00000


def _call(number: int, *arguments: object) -> int:
    """Make a system call; ``OSError`` if it fails."""
    if _libc is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *converted))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _own(column: int) -> int:
    """Return the number of a call that differs between processors."""
    try:
        return _numbers[os.uname().machine][column]
    except KeyError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none."""
    try:
        return _call(_CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def create_ruleset(files: int, network: int, scopes: int, version: int) -> int:
    """Return a descriptor of a set of Landlock rules that handles these rights."""
    known = 1 if version < _WITH_NETWORK else 2 if version < _WITH_SCOPES else 3
    fields = (files, network, scopes)[:known]
    content = struct.pack(f"={len(fields)}Q", *fields)
    return _call(_CREATE_RULESET, ctypes.c_char_p(content), len(content), 0)


def add_rule(ruleset: int, path: int, rights: int) -> None:
    """Permit rights below the file or folder of a descriptor."""
    content = struct.pack("=Qi", rights, path)
    _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.c_char_p(content), 0)


def restrict_self(ruleset: int) -> None:
    """Apply a set of rules to this thread, for ever; later threads inherit it."""
    _call(_RESTRICT_SELF, ruleset, 0)


def forbid_new_privileges() -> None:
    """Have programs that this process might execute gain nothing."""
    if _libc is None or _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs cannot be set")


def keep_capabilities(kept: int) -> None:
    """Drop all capabilities but those of the bits ``kept``; a user who is not root has none."""
    column, size = 1, 24
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITIES_VERSION, 0))
    data = ctypes.create_string_buffer(size)
    _call(_own(column) - 1, header, data)
    effective, permitted, *_ = struct.unpack("=6I", data.raw[:size])
    fields = (effective & kept, permitted & kept, 0, 0, 0, 0)
    _call(_own(column), header, ctypes.create_string_buffer(struct.pack("=6I", *fields)))


def can_ask() -> bool:
    """Return whether the kernel has filters of system calls that another process answers."""
    try:
        action = ctypes.create_string_buffer(struct.pack("=I", _ASK))
        return _call(_own(0), _ACTION_AVAILABLE, 0, action) == 0
    except OSError:
        return False


def install_filter(program: bytes) -> int:
    """Filter the system calls of this thread, for ever; return the listener that gets the questions."""
    code = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    return _call(_own(0), _FILTER, _NEW_LISTENER | _ALLOW_SPECULATION, head)


def copy_descriptor(process: int, descriptor: int) -> int:
    """Return a copy of a descriptor of another process, given by its pidfd."""
    return _call(_PIDFD_GETFD, process, descriptor, 0)


def control(descriptor: int, request: int, content: bytearray) -> None:
    """Call ``ioctl`` with a structure that the kernel may change."""
    if _libc is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    buffer = (ctypes.c_char * len(content)).from_buffer(content)
    if _libc.ioctl(ctypes.c_int(descriptor), ctypes.c_ulong(request), buffer) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
