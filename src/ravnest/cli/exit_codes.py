"""How the command ends."""

from __future__ import annotations

from enum import IntEnum

from ravnest.errors import JobEndedError, RavnestError, ServerUnreachableError


class ExitCode(IntEnum):
    """For scripts; also in ``ravnest --help``."""

    FINE = 0
    ERROR = 1
    """A mistake of the user's, or the server refuses."""
    USAGE = 2
    """Unknown commands or options."""
    JOB_ENDED = 3
    """The job failed or was cancelled."""
    UNREACHABLE = 4
    """No server answers."""


EXPLAINED = (
    "Exit codes: 0 fine; 1 an error, or the server refuses; 2 wrong usage; 3 the job failed or was "
    "cancelled; 4 no server answers."
)


def code_of(error: RavnestError) -> ExitCode:
    """The code for an error that ended a command."""
    if isinstance(error, ServerUnreachableError):
        return ExitCode.UNREACHABLE
    if isinstance(error, JobEndedError):
        return ExitCode.JOB_ENDED
    return ExitCode.ERROR
