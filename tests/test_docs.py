"""Documentation pages agree with the code, and their links lead to pages and headings."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import ravnest
from ravnest.runtime import settings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def settings_table() -> str:
    """Return a table of every keyword setting of ``Node`` with its default and docstring."""
    described = dict(described_fields())
    rows = [
        f"| `{field.name}` | `{field.default!r}` | {described[field.name]} |"
        for field in fields(settings.NodeSettings)
    ]
    return "\n".join(["| name | default | |", "|---|---|---|", *rows])


def described_fields() -> Iterator[tuple[str, str]]:
    (tree,) = ast.parse(inspect.getsource(settings.NodeSettings)).body
    assert isinstance(tree, ast.ClassDef)
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(text, ast.Expr), f"{field.target.id} has no docstring"
            assert isinstance(text.value, ast.Constant)
            yield field.target.id, " ".join(str(text.value.value).split()).replace("``", "`")


def test_the_page_of_node_has_every_setting_as_the_code_describes_it() -> None:
    page = (DOCS / "node.md").read_text()
    shown = re.search(r"<!-- settings -->\n(.*?)\n?<!-- end -->", page, re.DOTALL)
    assert shown, "the page has no settings table"
    assert shown[1] == settings_table(), "\n" + settings_table()


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
