"""``module:function`` on the command line: something of the user's, from the current folder."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from ravnest.errors import RavnestError
from ravnest.split.source import line_of_traceback


class TargetError(RavnestError, ValueError):
    """``module:function`` does not name a function that gives what the command needs."""


def call_target(target: str) -> Any:
    """What the user's function returns; what goes wrong in it is the user's to read, with its line."""
    module_name, _, function_name = target.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise TargetError(f"{target!r} is not of the form module:function")
    sys.path.insert(0, str(Path.cwd()))
    sys.dont_write_bytecode = True  # a command writes nothing beside the user's module
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name, None)
        if callable(function):
            return function()
    except ModuleNotFoundError as error:
        raise TargetError(
            f"there is no module {error.name!r} here; run this where it can be imported"
        ) from error
    except Exception as error:  # the user's code may raise anything
        line = line_of_traceback(error.__traceback__)
        raise TargetError(f"{target} fails: {type(error).__name__}: {error}\n{line}".strip()) from error
    raise TargetError(f"the module {module_name} has no function {function_name}")
