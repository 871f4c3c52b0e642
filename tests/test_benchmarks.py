"""Classes of benchmarks that replace classes of the package take the arguments that the package passes.

Benchmarks run rarely: one whose method lacks a new argument would fail unnoticed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def _subclasses() -> dict[str, list[str]]:
    """Return the classes, by module, whose bases come from the package, or from such a module."""
    trees = {path.stem: ast.parse(path.read_text()) for path in sorted(BENCHMARKS.glob("*.py"))}
    found: dict[str, list[str]] = {}
    for name, tree in trees.items():
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            if node.module.partition(".")[0] in {"ravnest", *trees}
            for alias in node.names
        }
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        own = [
            each.name
            for each in classes
            if any(isinstance(base, ast.Name) and base.id in imported for base in each.bases)
        ]
        if own:
            found[name] = own
    return found


def _overrides(cls: type) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Yield the methods that replace one of the package, and what they replace.

    Constructors may differ: benchmarks create some of these objects themselves.
    """
    bases = [base for base in cls.__mro__[1:] if base.__module__.startswith("ravnest")]
    for name, method in vars(cls).items():
        replaced = next((vars(base)[name] for base in bases if name in vars(base)), None)
        if name != "__init__" and inspect.isfunction(method) and inspect.isfunction(replaced):
            yield name, method, replaced


def _mismatch(method: Callable[..., Any], replaced: Callable[..., Any]) -> str:
    """Return why a method cannot be called like the one that it replaces; empty if it can."""
    own, wanted = inspect.signature(method), inspect.signature(replaced)
    parameters = [each for each in wanted.parameters.values() if each.kind not in _VARIADIC]
    keywords = {each.name: None for each in parameters if each.kind is each.KEYWORD_ONLY}
    places = [each for each in parameters if each.name not in keywords]
    required = [each for each in places if each.default is each.empty]
    by_name = {each.name: None for each in places[1:]}  # all but ``self``
    calls: list[tuple[list[None], dict[str, None]]] = [
        ([None] * len(places), keywords),
        ([None] * len(required), {}),
        ([None], by_name | keywords),
    ]
    if any(
        parameter.default is parameter.empty for parameter in parameters if parameter.name in keywords
    ):
        calls[1] = ([None] * len(required), keywords)
    for arguments, named in calls:
        try:
            own.bind(*arguments, **named)
        except TypeError as error:
            return f"{error}: {own} instead of {wanted}"
    return ""


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
SUBCLASSES = [(module, name) for module, names in _subclasses().items() for name in names]


def test_the_classes_are_found() -> None:
    assert ("efficiency", "SleepingStage") in SUBCLASSES
    assert ("contenders", "Racing") in SUBCLASSES


@pytest.mark.parametrize(("module", "name"), SUBCLASSES)
def test_methods_take_the_arguments_of_those_that_they_replace(module: str, name: str) -> None:
    cls = getattr(importlib.import_module(module), name)
    wrong = {
        method: problem
        for method, own, replaced in _overrides(cls)
        if (problem := _mismatch(own, replaced))
    }
    assert not wrong, f"benchmarks/{module}.py: {name} does not fit the class that it replaces"


def test_a_lost_argument_is_found() -> None:
    def forward(self: object, values: int, *, late: bool = False, costly: bool = False) -> None: ...

    def without(self: object, values: int, *, late: bool = False) -> None: ...

    def renamed(self: object, value: int, *, late: bool = False, costly: bool = False) -> None: ...

    def more(self: object, values: int, other: int, **named: bool) -> None: ...

    def fits(self: object, values: int, other: int = 0, **named: bool) -> None: ...

    assert all(_mismatch(each, forward) for each in (without, renamed, more))
    assert not _mismatch(fits, forward)
