"""The code of docs/tutorials.md runs as written; providers return the initial weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from job_server import JobServer, in_background
from lora_cases import libraries

import ravnest

PAGE = (Path(__file__).parents[1] / "docs" / "tutorials.md").read_text()


def code_of(title: str) -> str:
    """Return all Python blocks of a section."""
    (section,) = (part for part in PAGE.split("\n## ") if part.startswith(title))
    return "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))


@contextmanager
def training(server: JobServer) -> Iterator[None]:
    """Run a provider that takes one assignment and finishes it."""
    with server.provider() as provider:

        def train() -> None:
            provider.take_assignment()
            provider.report("training")
            provider.finish(changed_only=True)

        with in_background(train):
            yield


@pytest.mark.parametrize(
    "title",
    [
        "Fine-tune a model of Hugging Face",
        "A language model from scratch",
        "A loss of your own",
        "Sync or async",
    ],
)
def test_a_tutorial_runs(
    title: str,
    shared_server: JobServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "Hugging Face" in title:
        libraries()
    monkeypatch.setenv("RAVNEST_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shared_server.remember()
    names: dict[str, Any] = {"__name__": "tutorial"}
    code = code_of(title).replace("https://server:7100", shared_server.url)
    with training(shared_server):
        exec(compile(code, "tutorials.md", "exec"), names)
    handle = names["handle"]
    assert isinstance(handle, ravnest.JobHandle)
    handle.close()
    if "Hugging Face" in title:
        assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    if "language" in title:
        assert capsys.readouterr().out.startswith("the quick brown fox")
