"""``module:function`` on the command line: a function of the user's, from the current folder."""

from __future__ import annotations

import difflib
import importlib
import shlex
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from ravnest.errors import RavnestError
from ravnest.split.source import line_of_traceback

_PACKAGES = {
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Packages whose name differs from that of the module."""


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
    raise TargetError(
        f"the module {module_name} has no function {function_name}{_similar(module, function_name)}"
    )


def _similar(module: ModuleType, name: str) -> str:
    """Return a question with the function that was probably meant; empty if none is similar."""
    functions = [each for each, value in vars(module).items() if callable(value)]
    found = difflib.get_close_matches(name, functions, n=1)
    return f": did you mean {found[0]}?" if found else ""


def _failure(target: str, error: Exception, hint: str = "") -> TargetError:
    line = line_of_traceback(error.__traceback__)
    message = f"{target} fails: {type(error).__name__}: {error}{hint}"
    return TargetError(f"{message}\n{line}".strip())


def _install_hint(error: ModuleNotFoundError) -> str:
    if error.name is None:
        return ""
    name = error.name.partition(".")[0]
    package = _PACKAGES.get(name, name)
    python = shlex.quote(sys.executable)
    return f"; install the package {package}: {python} -m pip install {package}"


def _reached_other_code(trace: TracebackType | None) -> bool:
    """Return whether an import error comes from inside the target module, not from its own import."""
    files = [frame.filename for frame in traceback.extract_tb(trace)]
    return any(
        file != __file__ and not file.startswith("<frozen importlib") and file != importlib.__file__
        for file in files
    )
