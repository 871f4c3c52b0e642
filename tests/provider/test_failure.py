"""Causes of failed workers, and the exit codes that carry them."""

import errno

import pytest

from ravnest.errors import (
    AddressInUseError,
    DataError,
    LinkClosedError,
    RavnestError,
    RunError,
    RunInterruptedError,
    StageFormatError,
    UnreachableError,
)
from ravnest.provider.failure import EXIT_CODES, cause_of, cause_of_exit
from ravnest.schemas.providers import FailureCause


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (DataError("the labels do not fit"), "job"),
        (StageFormatError("damaged"), "job"),
        (RunError("node_1 failed: DataError"), "job"),
        (RavnestError("anything else"), "job"),
        (ValueError("a bug"), "job"),
        (RuntimeError("an operator of torch"), "job"),
        (MemoryError(), "machine"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "machine"),
        (OSError(errno.ENOSPC, "No space left on device"), "machine"),
        (AddressInUseError("port 9000 is taken"), "machine"),
        (RunInterruptedError("node_1 was lost"), "passing"),
        (LinkClosedError("node_1 is gone"), "passing"),
        (UnreachableError("node_1 does not answer"), "passing"),
        (KeyboardInterrupt(), "passing"),
    ],
)
def test_the_cause_of_an_error_travels_as_an_exit_code(
    error: BaseException, cause: FailureCause
) -> None:
    assert cause_of(error) == cause
    assert cause_of_exit(EXIT_CODES[cause]) == cause


@pytest.mark.parametrize(("code", "cause"), [(-9, "passing"), (-11, "passing"), (1, "job"), (77, "job")])
def test_a_signal_passes_and_an_unknown_code_does_not(code: int, cause: str) -> None:
    assert cause_of_exit(code) == cause
