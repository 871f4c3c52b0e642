"""``module:function`` on the command line: a function of the user's, from the current folder."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from ravnest.errors import RavnestError
from ravnest.split.source import line_of_traceback


class TargetError(RavnestError, ValueError):
    """``module:function`` cannot be called, or does not return what the command needs."""


def call_target(target: str) -> Any:
    """Import the user's module, call its function and return the result.

    Raises ``TargetError`` with the line in the user's code if that fails.
    """
    module_name, _, function_name = target.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise TargetError(f"{target!r} is not of the form module:function")
    sys.path.insert(0, str(Path.cwd()))
    sys.dont_write_bytecode = True  # commands write no files next to the user's module
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name, None)
        if callable(function):
            return function()
    except ModuleNotFoundError as error:
        if _reached_other_code(error.__traceback__):
            raise _failure(target, error, _install_hint(error)) from error
        raise TargetError(
            f"there is no module {module_name!r} in {Path.cwd()} or on the Python path ({error}): run "
            "the command in the folder of the module"
        ) from error
    except Exception as error:  # the user's code may raise anything
        raise _failure(target, error) from error
    raise TargetError(f"the module {module_name} has no function {function_name}")


def _failure(target: str, error: Exception, hint: str = "") -> TargetError:
    line = line_of_traceback(error.__traceback__)
    message = f"{target} fails: {type(error).__name__}: {error}{hint}"
    return TargetError(f"{message}\n{line}".strip())


def _install_hint(error: ModuleNotFoundError) -> str:
    if error.name is None:
        return ""
    package = error.name.partition(".")[0]
    return f"; is {package} installed for {sys.executable}?"


def _reached_other_code(trace: TracebackType | None) -> bool:
    """Return whether an import error comes from inside the target module, not from its own import."""
    files = [frame.filename for frame in traceback.extract_tb(trace)]
    return any(
        file != __file__ and not file.startswith("<frozen importlib") and file != importlib.__file__
        for file in files
    )
