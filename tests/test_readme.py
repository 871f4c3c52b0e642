"""The code in the README runs as written, and its links lead to existing files."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from job_server import JobServer, in_background, small_job

from ravnest.cli.app import Commands
from ravnest.jobs.packing import pack_job

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def python_block(word: str) -> str:
    """Return the only Python block of the README that contains ``word``."""
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if word in b)
    return block


def test_the_split_example_runs() -> None:
    names: dict[str, object] = {}
    exec(compile(python_block("Chain"), "README.md", "exec"), names)
    assert isinstance(names["loss"], torch.Tensor)


def test_the_job_example_can_be_submitted(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(compile(python_block("def job()"), "README.md", "exec"), names)
    assert pack_job(names["job"](), tmp_path).spec.train.samples == 1000


def test_the_submit_example_runs(
    shared_server: JobServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RAVNEST_HOME", str(tmp_path))
    shared_server.remember()
    module = ModuleType("job")
    module.job = small_job  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "job", module)
    block = python_block("ravnest.submit(").replace("https://server:7100", shared_server.url)
    with shared_server.provider() as provider:

        def train() -> None:
            provider.take_assignment()
            provider.report("training")
            provider.finish()

        with in_background(train):
            exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("job-")


def test_the_commands_exist() -> None:
    commands = set(re.findall(r"^(?:\$ )?ravnest ([a-z]+)|`ravnest ([a-z]+)", README, re.MULTILINE))
    names = {name for pair in commands for name in pair if name}
    assert {"demo", "serve", "provide", "submit"} <= names <= set(Commands.lazy)


def test_the_provider_script_is_part_of_the_example() -> None:
    """``tests/test_examples.py`` runs the example."""
    example = (ROOT / "examples" / "digits" / "provider.py").read_text()
    assert all(part in example for part in python_block("Trainer(").split("\n\n", 1))


def test_links_lead_to_files() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert not [target for target in targets if not (ROOT / target).exists()]
