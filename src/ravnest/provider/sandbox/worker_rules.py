"""Rules for the arguments of a worker's system calls. Pure."""

from __future__ import annotations

import errno

from ravnest.provider.sandbox.filter_program import ALLOW, ASK, Argument, Rule

_UNIX, _INET, _INET6 = 1, 2, 10
_STREAM, _TCP = 1, 6
_TYPE_BITS = 0xF
"""Bits of a socket's type that are not flags."""
_FAST_OPEN = 0x20000000
"""Flag of ``sendmsg`` and ``sendto`` that connects."""
_ACCESS_MODE, _READ_ONLY, _TRUNCATE = 0o3, 0o0, 0o1000
_THREAD = 0x00010000 | 0x00000100 | 0x00000800
"""Flags of ``clone`` for a thread: CLONE_THREAD, CLONE_VM, CLONE_SIGHAND."""
_NAMESPACES = 0x7E020080
"""Flags of ``clone`` that make namespaces."""
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032)
"""Duplicate, flags, locks and size of a pipe; not the owner of a descriptor, who gets signals."""
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_PRCTL = (15, 16, 21, 39, 0x53564D41)
"""PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP, PR_GET_NO_NEW_PRIVS, PR_SET_VMA (names of memory)."""


def worker_rules(process: int) -> dict[str, Rule]:
    """Return the rules of the worker with this process id, by the name of the call.

    ``connect``, ``bind`` and ``listen`` are answered by the agent.
    """
    asked = Rule(ASK)
    itself = Rule(conditions=(Argument(0, (process,)),))
    itself_or_zero = Rule(conditions=(Argument(0, (0, process)),))
    # A file that may only be read could be emptied by opening it, where Landlock is too old to check it.
    modes = tuple(mode | truncate for mode in (0, 1, 2) for truncate in (0, _TRUNCATE))
    allowed = tuple(mode for mode in modes if mode != _READ_ONLY | _TRUNCATE)
    opening = _ACCESS_MODE | _TRUNCATE
    return {
        "connect": asked,
        "bind": asked,
        "listen": asked,
        "socket": Rule(
            ALLOW,
            (
                Argument(0, (_INET, _INET6)),
                Argument(1, (_STREAM,), _TYPE_BITS),
                Argument(2, (0, _TCP)),
            ),
            errno.EAFNOSUPPORT,
        ),
        # Datagram sockets of a pair could send to any other socket of the machine.
        "socketpair": Rule(
            ALLOW, (Argument(0, (_UNIX,)), Argument(1, (_STREAM,), _TYPE_BITS)), errno.EAFNOSUPPORT
        ),
        "sendto": Rule(
            conditions=(
                Argument(3, (0,), _FAST_OPEN),
                Argument(4, (0,)),
                Argument(4, (0,), upper=True),
            )
        ),
        "sendmsg": Rule(conditions=(Argument(2, (0,), _FAST_OPEN),)),
        "open": Rule(conditions=(Argument(1, allowed, opening),)),
        "openat": Rule(conditions=(Argument(2, allowed, opening),)),
        "clone": Rule(conditions=(Argument(0, (_THREAD,), _THREAD | _NAMESPACES),)),
        "kill": itself,
        "tgkill": itself,
        "prlimit64": itself_or_zero,
        "sched_setaffinity": itself_or_zero,
        "fcntl": Rule(conditions=(Argument(1, _FCNTL),)),
        "ioctl": Rule(ALLOW, (Argument(1, _IOCTL),), errno.ENOTTY),
        "prctl": Rule(conditions=(Argument(0, _PRCTL),)),
    }
