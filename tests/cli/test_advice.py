"""Commands that messages advise work when they are pasted: each is parsed by the command line."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from ravnest.cli.app import app

ROOT = Path(__file__).parents[2]
_COMMAND = re.compile(r"`ravnest ([^`]+)`")
_VALUE = "1"
"""Stands for a value that a message fills in, and for a word like URL."""


def _text(node: ast.AST) -> str | None:
    """Return the text of a string or f-string, with a stand-in for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or _VALUE for part in node.values)
    return None


def _strings(tree: ast.AST) -> Iterator[str]:
    """Yield all strings that are not docstrings, and f-strings as a whole."""
    if isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant):
        return
    text = _text(tree)
    if text is not None:
        yield text
        return
    for child in ast.iter_child_nodes(tree):
        yield from _strings(child)


def _advised() -> list[tuple[str, str]]:
    found = []
    for path in sorted((ROOT / "src" / "ravnest").rglob("*.py")):
        for text in _strings(ast.parse(path.read_text(encoding="utf-8"))):
            found += [(str(path.relative_to(ROOT)), command) for command in _COMMAND.findall(text)]
    return found


def _parse(command: str) -> None:
    """Parse a command without running it; raise a usage error if it lacks something."""
    words = [_word(word) for word in shlex.split(command)]
    group: Any = typer.main.get_command(app)
    context = group.make_context("ravnest", words, resilient_parsing=False)
    name, found, rest = group.resolve_command(context, words)
    while hasattr(found, "commands"):
        name, found, rest = found.resolve_command(context, rest)
    found.make_context(name, rest, parent=context)


def _word(word: str) -> str:
    """Return a value for a word in capital letters."""
    return {"ROLE": "provider"}.get(word, _VALUE if word.isupper() and len(word) > 1 else word)


ADVISED = _advised()


def test_messages_advise_commands() -> None:
    assert len(ADVISED) > 15


@pytest.mark.parametrize(("where", "command"), ADVISED, ids=[f"{w}: {c}" for w, c in ADVISED])
def test_an_advised_command_can_be_pasted(where: str, command: str) -> None:
    try:
        _parse(command.replace(f"--role {_VALUE}", "--role provider"))
    except Exception as error:  # the usage errors of typer have no public base class
        pytest.fail(f"{where} advises `ravnest {command}`: {getattr(error, 'message', error)}")
