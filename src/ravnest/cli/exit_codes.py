"""Exit codes of the command."""

from __future__ import annotations

from enum import IntEnum

from ravnest.errors import JobEndedError, RavnestError, ServerUnreachableError


class ExitCode(IntEnum):
    """Exit codes for scripts; ``ravnest --help`` lists them."""

    OK = 0
    ERROR = 1
    """The user made a mistake, or the server refused the request."""
    USAGE = 2
    """The command or an option does not exist."""
    JOB_ENDED = 3
    """The job failed or was cancelled."""
    UNREACHABLE = 4
    """No server answers."""
    DEGRADED = 5
    """The job is done, but a cluster did not finish: the model lacks a part of its training."""
    INTERRUPTED = 130
    """Ctrl-C, as a shell reports it."""


EXIT_CODES_HELP = (
    "Exit codes: 0 success; 1 error, or the server refused; 2 wrong usage; 3 the job failed or was "
    "cancelled; 4 no server answers; 5 the job is done, but a cluster did not "
    "finish; 130 interrupted."
)


def exit_code_for(error: RavnestError) -> ExitCode:
    """Return the exit code for an error that ended a command."""
    if isinstance(error, ServerUnreachableError):
        return ExitCode.UNREACHABLE
    if isinstance(error, JobEndedError):
        return ExitCode.JOB_ENDED
    return ExitCode.ERROR
