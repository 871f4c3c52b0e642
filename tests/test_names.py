"""Naming rules of the package: unique public class names, and docstrings that are not fragments.

The checks read the source and import none of it.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ravnest"
FRAGMENT = re.compile(r"(Of|What|Who|Whose|Whom|Whether|How often|How many|How long)\b")
"""Openings of a docstring that leave the reader to guess the subject."""


def duplicate_classes(package: Path) -> dict[str, list[str]]:
    """Return each public class name that several modules define, with these modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(package)))
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def fragments(package: Path) -> list[str]:
    """Return the docstrings of modules, classes, functions and attributes that open as a fragment."""
    return [
        f"{path.relative_to(package)}:{line} {text.splitlines()[0]}"
        for path in sorted(package.rglob("*.py"))
        for line, text in _docstrings(ast.parse(path.read_bytes()))
        if FRAGMENT.match(text)
    ]


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if isinstance(value, str):
                yield node.lineno, value.strip()


def test_public_class_names_are_unique() -> None:
    assert duplicate_classes(PACKAGE) == {}


def test_no_docstring_opens_as_a_fragment() -> None:
    found = fragments(PACKAGE)
    assert not found, "\n" + "\n".join(found)


def test_a_duplicate_class_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Round: ...\nclass _Private: ...\n")
    (tmp_path / "b.py").write_text("class Round: ...\nclass _Private: ...\n")
    assert duplicate_classes(tmp_path) == {"Round": ["a.py", "b.py"]}


@pytest.mark.parametrize(
    "source",
    [
        '"""Of the whole."""',
        'def f():\n    """Whether it is done."""',
        'class A:\n    x: int\n    """Who sent it."""',
    ],
)
def test_a_fragment_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "a.py").write_text(source)
    assert len(fragments(tmp_path)) == 1


def test_the_glossary_has_the_product_words() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^\| ([^|]+?) \|", glossary, re.MULTILINE)
    words = {word.strip() for term in terms for word in term.split(",")}
    expected = {
        *("requester", "provider", "server", "cluster", "Root", "Stem", "Leaf", "stage", "ring"),
        *("round", "plan", "window", "staleness", "micro-batch", "assignment", "artifact", "token"),
    }
    assert expected <= words, expected - words
