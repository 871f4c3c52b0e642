"""Upload of the best model: whole, unchanged, and only files of the job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ravnest.errors import StageFormatError
from ravnest.provider import best_upload
from ravnest.store.best_model import BestModel, BestModelFolder


@pytest.fixture
def job_dir(tmp_path: Path) -> Any:
    node = SimpleNamespace(cluster=0)
    read = lambda: SimpleNamespace(node_spec=node)  # noqa: E731 - a stand-in for a folder
    return SimpleNamespace(trained=tmp_path / "trained", read_assignment=read)


def keep(folder: Path, content: bytes, value: float) -> BestModelFolder:
    best = BestModelFolder(folder, 0)
    incoming = best.incoming / "cluster_0"
    incoming.mkdir(parents=True)
    for name in ("node_0.json", "node_0.safetensors"):
        (incoming / name).write_bytes(content)
    best.replace(BestModel("run", 2, "loss", value))
    return best


def test_the_files_are_uploaded_with_their_description(
    job_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(best_upload, "upload", lambda _api, files, _report, paced: sent.append(files))
    api: Any = None
    assert best_upload.upload_best(api, job_dir, lambda: None, paced=True) is None, (
        "there is no model yet"
    )
    keep(job_dir.trained, b"first", 0.5)
    keep(job_dir.trained, b"second", 0.25)
    found = best_upload.upload_best(api, job_dir, lambda: None, paced=True)
    assert found is not None
    assert (found.epoch, found.metric, found.value) == (2, "loss", 0.25)
    assert [file.name for file in found.files] == ["node_0.json", "node_0.safetensors"]
    assert {path.read_bytes() for path in sent[0].values()} == {b"second"}


@pytest.mark.parametrize("what", ["file", "folder"])
def test_links_are_not_followed(
    job_dir: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(best_upload, "upload", lambda *_, paced: pytest.fail("nothing may be sent"))
    best = keep(job_dir.trained, b"model", 0.5)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "node_0.safetensors").write_bytes(b"a secret")
    if what == "file":
        (best.stages / "node_0.safetensors").unlink()
        (best.stages / "node_0.safetensors").symlink_to(secret / "node_0.safetensors")
    else:
        best.stages.rename(tmp_path / "moved")
        best.stages.symlink_to(secret)
    api: Any = None
    with pytest.raises(StageFormatError, match="is not a file of this job"):
        best_upload.upload_best(api, job_dir, lambda: None, paced=True)
