"""What the README shows runs as written."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_first_python_block_runs() -> None:
    block = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert isinstance(names["loss"], torch.Tensor)


def test_the_provider_script_is_that_of_the_example() -> None:
    """Which another test runs."""
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "Trainer(" in b)
    example = (Path(__file__).parent.parent / "examples" / "digits" / "provider.py").read_text()
    assert all(part in example for part in block.split("\n\n", 1))


def test_its_table_of_the_zoo_is_what_the_zoo_found() -> None:
    def rows(text: str, columns: int) -> dict[str, list[str]]:
        cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
        return {row[0]: row for row in cells if len(row) == columns}

    shown = rows(README, 5)
    found = rows((Path(__file__).parent.parent / "docs" / "zoo.md").read_text(), 8)
    models = [name for name, row in shown.items() if row[1] in ("torchvision", "timm", "transformers")]
    assert len(models) >= 10
    for name in models:
        assert shown[name] == [*found[name][:2], *found[name][4:7]]


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parent.parent
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert not [target for target in targets if not (root / target).exists()]
