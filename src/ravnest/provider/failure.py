"""Causes of failed workers, and the exit codes by which a worker tells its agent."""

from __future__ import annotations

from ravnest.errors import AddressInUseError, RunInterruptedError, TransportError
from ravnest.runtime.machine_failures import is_out_of_memory
from ravnest.schemas.providers import FailureCause

EXIT_CODES: dict[FailureCause, int] = {"job": 1, "machine": 3, "passing": 4}
"""Exit codes of a worker; 2 is that of Python for wrong arguments."""
_CAUSES = {code: cause for cause, code in EXIT_CODES.items()}


def cause_of(error: BaseException) -> FailureCause:
    """Return the cause of an error that ended a worker.

    Errors of the training itself would be repeated on any machine. A lost neighbour, and an error that
    the neighbours report as such, says nothing about the job.
    """
    if isinstance(error, KeyboardInterrupt | RunInterruptedError):
        return "passing"
    if isinstance(error, AddressInUseError | OSError) or is_out_of_memory(error):
        return "machine"
    return "passing" if isinstance(error, TransportError) else "job"


def cause_of_exit(code: int) -> FailureCause:
    """Return the cause of the end of a worker with this exit code; a signal has a negative one."""
    return "passing" if code < 0 else _CAUSES.get(code, "job")
