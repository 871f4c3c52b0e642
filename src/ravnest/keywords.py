"""Errors for keywords that a class does not have, with the closest one that it has."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

C = TypeVar("C", bound=type[Any])


def unknown_keyword(owner: str, name: str, known: Iterable[str]) -> str:
    """Return the sentence that says what was meant instead of an unknown keyword."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known keywords are {', '.join(names)}"
    return f"{owner} has no keyword {name!r}: {hint}"


def refuses_unknown_keywords(error: type[Exception]) -> Callable[[C], C]:
    """Decorate a class, so that its constructor names the closest keyword to an unknown one."""

    def decorate(cls: C) -> C:
        original = cls.__init__
        known = list(inspect.signature(cls).parameters)

        @functools.wraps(original)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in known:
                    raise error(unknown_keyword(cls.__name__, name, known))
            original(self, *args, **kwargs)

        cls.__init__ = checked
        return cls

    return decorate
