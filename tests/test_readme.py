"""The code in the README runs as written, and its links lead to files."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_split_example_runs() -> None:
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "Chain" in b)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert isinstance(names["loss"], torch.Tensor)


def test_the_provider_script_is_that_of_the_example() -> None:
    """``tests/test_examples.py`` runs that example."""
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "Trainer(" in b)
    example = (Path(__file__).parent.parent / "examples" / "digits" / "provider.py").read_text()
    assert all(part in example for part in block.split("\n\n", 1))


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parent.parent
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert not [target for target in targets if not (root / target).exists()]
