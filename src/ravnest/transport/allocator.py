"""The C library's memory, set up for messages that come and go by the thousand.

By default glibc gives memory back to the system as soon as a few megabytes are free, and asks for it
again with the next message: the kernel then clears the same pages over and over, which takes up to half
of the time of a stream of tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 32 << 20
"""Free at the end of a heap before it shrinks; blocks from this size on have memory of their own. It is
where glibc itself arrives once a program has freed a block of this size."""

_ARENAS = 2
"""Heaps that the threads share. Each keeps that much: with glibc's eight a core, a node took 50 MB more
when it was measured, and was no faster."""


@functools.cache
def keep_freed_memory() -> None:
    """Keep some memory that was freed; does nothing where the user has settings of their own."""
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    if "GLIBC_TUNABLES" in os.environ:
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, _ARENAS)
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
