"""Documentation pages agree with the code, and their links lead to existing pages and headings."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest

import ravnest
from ravnest.runtime import settings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def fields_table(kind: type) -> str:
    """Return a table of the fields of a dataclass with their defaults and docstrings."""
    described = dict(described_fields(kind))
    rows = [f"| `{f.name}` | {default_of(f)} | {described[f.name]} |" for f in fields(kind)]
    return "\n".join(["| name | default | |", "|---|---|---|", *rows])


def default_of(field: Field[Any]) -> str:
    if field.default is not MISSING:
        value = field.default
    elif field.default_factory is not MISSING:
        value = field.default_factory()
    else:
        return ""
    return f"`{value.__name__ if isinstance(value, type) else repr(value)}`"


def described_fields(kind: type) -> Iterator[tuple[str, str]]:
    """Yield each field of a dataclass with the docstring below it."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    for field, text in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(text, ast.Expr), f"{field.target.id} has no docstring"
            assert isinstance(text.value, ast.Constant)
            yield field.target.id, " ".join(str(text.value.value).split()).replace("``", "`")


@pytest.mark.parametrize(
    ("page", "marker", "kind"),
    [("node.md", "settings", settings.NodeSettings), ("submitting.md", "fields", ravnest.Job)],
)
def test_a_table_of_fields_agrees_with_the_code(page: str, marker: str, kind: type) -> None:
    text = (DOCS / page).read_text()
    shown = re.search(rf"<!-- {marker} -->\n(.*?)\n?<!-- end -->", text, re.DOTALL)
    assert shown, f"{page} has no table of {marker}"
    assert shown[1] == fields_table(kind), "\n" + fields_table(kind)


@pytest.mark.parametrize(("page", "made"), [("node.md", ravnest.Node), ("trainer.md", ravnest.Trainer)])
def test_every_parameter_and_method_is_on_its_page(page: str, made: type) -> None:
    text = (DOCS / page).read_text()
    names = [p.name for p in inspect.signature(made).parameters.values() if p.kind is not p.VAR_KEYWORD]
    assert [name for name in names if f"`{name}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(#[^)]*)?\)", page.read_text()):
        path = page if not target else page.parent / target
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor[1:] in slugs, f"{page.name} links to {target}{anchor}"
