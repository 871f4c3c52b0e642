"""Failures of one machine, which say nothing about the training: another machine may take its place."""

from __future__ import annotations


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory cannot be allocated."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def is_machine_failure(error: BaseException) -> bool:
    """Return whether an error would not happen on another machine, or is an interruption."""
    return isinstance(error, KeyboardInterrupt | OSError) or is_out_of_memory(error)
